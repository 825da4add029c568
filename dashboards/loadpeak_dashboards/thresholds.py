"""Every threshold of dashboards and alerts, in one place."""

GIB = 1 << 30

HEADROOM_WARNING_SHARE = 0.10
HEADROOM_CRITICAL_SHARE = 0.05
"""Of the device's memory: a V100 with 32 GB has 1.6 GiB left at the critical share."""
HEADROOM_WARNING_BYTES = 2 * GIB
HEADROOM_CRITICAL_BYTES = 1 * GIB
"""The next larger conversion temporary, a NCCL buffer or a CUDA graph pool needs about as much."""

REGRESSION_SHARE = 0.05
"""A peak that much above the last ready start of the same model on the same host is a regression."""

STALLED_MINUTES = 10
"""Loading without a new layer or phase for so long; large checkpoints on slow disks take minutes."""

RECENT_MINUTES = 15
"""Alerts speak of starts that loaded within this time; older ones are history, also if still exported."""

SAMPLER_GAP_SECONDS = 1.0
"""The sampler reads each 10 ms; a gap a hundred times as long can hide a peak."""

DOWN_MINUTES = 1

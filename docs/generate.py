"""``python docs/generate.py``: write the pages that are made from the code (``make docs``).

A test fails when a page is not what this writes.
"""

import inspect
from collections.abc import Iterable
from pathlib import Path

import msgspec

from loadpeak import record, settings
from loadpeak_exporter import serve_settings
from loadpeak_exporter.catalogue import CATALOGUE, COMMON_LABELS

FOLDER = Path(__file__).parent
MADE = "<!-- made by docs/generate.py; do not edit -->\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _table(*columns: str) -> str:
    return _row(*columns) + "|" + "---|" * len(columns) + "\n"


def settings_page() -> str:
    """docs/settings.md."""
    text = f"""{MADE}
# Settings

Every setting is an environment variable of the process that starts vLLM; workers inherit it. A value that
cannot be used is named in one line and the default is used; commands refuse it. `loadpeak run` has options
for the most common.

"""
    text += _settings(settings.TABLE)
    text += """
## The host service

What `loadpeak serve` reads besides `LOADPEAK_HOME` and `LOADPEAK_LAYERS`. Here a value that cannot be used
ends the command.

"""
    return text + _settings(serve_settings.TABLE)


def _settings(table: Iterable[settings.Setting]) -> str:
    text = _table("variable", "default", "accepted", "what it does")
    for setting in table:
        default = f"`{setting.default}`" if setting.default else ""
        text += _row(f"`{setting.name}`", default, setting.expected, setting.help)
    return text


def metrics_page() -> str:
    """docs/metrics.md."""
    common = ", ".join(f"`{label}`" for label in COMMON_LABELS)
    per_layer = sum(metric.per_layer for metric in CATALOGUE)
    per_phase = [
        metric for metric in CATALOGUE if metric.labels == ("phase",) and metric.name != "loadpeak_phase"
    ]
    single = len(CATALOGUE) - per_layer - len(per_phase) - 2
    text = f"""{MADE}
# Metrics

`/metrics` is served from inside the engine (`LOADPEAK_PORT`, default 9838, or the next free port; the record
names it) by local rank 0, for all ranks of the host. Everything is in base units.

Every series carries {common}, then its own labels. `gpu` is the UUID of the device, `resident` where the
resident memory of the process stands in for a GPU, and empty until the device is known. `layer` is padded
with zeros, so that it sorts. The outcome is that of the whole run. A reading that is not available is a
missing series, never zero.

"""
    text += _table("metric", "type", "labels of its own", "meaning")
    for metric in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        text += _row(f"`{metric.name}`", metric.kind, labels, metric.help)
    text += f"""
## How many series

At most, for a run with R ranks, L layers with series of their own and {len(record.PHASES)} phases:

    R × ({single} + {len(record.OUTCOMES)} outcomes + {len(record.PHASES)} phases
         + {len(per_phase)} × {len(record.PHASES) - 1} phases that have ended + {per_layer} × L)

That is {_series(1, 48)} for one rank with 48 layers and {_series(8, 96):,} for eight ranks with 96.
`LOADPEAK_LAYERS=moe` counts only layers with experts, `off` none of them (L = 0).

The host service exports at most `LOADPEAK_SERVE_RUNS` runs (20) with at most `LOADPEAK_SERVE_LAYERS` layers
(128) of each rank: {20 * _series(8, 128):,} series for a host with eight GPUs at the most, and
{_series(8, 48):,} for one start of a 48-layer model. Runs leave it `LOADPEAK_SERVE_KEEP_HOURS` (24) after
their last line.
"""
    return text


def _series(ranks: int, layers: int) -> int:
    """The formula above."""
    phases = len(record.PHASES)
    total = 0
    for metric in CATALOGUE:
        if metric.per_layer:
            total += layers
        elif metric.name == "loadpeak_phase":
            total += phases
        elif metric.name == "loadpeak_run_outcome":
            total += len(record.OUTCOMES)
        else:
            total += phases - 1 if metric.labels == ("phase",) else 1
    return ranks * total


def record_page() -> str:
    """docs/record.md."""
    text = f"""{MADE}
# The record of a run

`$LOADPEAK_HOME/runs/<run id>/` holds plain files that can be read while they are written:

- `run.json`: what is known before the first weight is loaded.
- `rank-N.jsonl`: the journal of rank N, one JSON object a line.
- `device-N.jsonl`: what the sampler of rank N saw.
- `history-N.pickle.gz`: the allocator's history of rank N, where LOADPEAK_MEMORY_HISTORY asked for one.
- `command.jsonl`: how the command of `loadpeak run` ended.

Each line was one write, so what was written before a process was killed is there; a torn last line is
normal. The `line` field names kind and version; a reader passes over kinds it does not know and says so.
Times are `time.monotonic()` in seconds, one clock for all processes of a host; the first line of a file
carries the wall clock beside it. Sizes are bytes. A field that is missing was not available.

## run.json

"""
    text += _fields(record.Header)
    text += "\n## Parts\n"
    for part in (record.Memory, record.Device):
        text += f"\n### {part.__name__}\n\n{_doc(part)}\n\n{_fields(part)}"
    text += "\n## Lines\n"
    for kind in inspect.get_annotations(_Lines)["kinds"].__args__:
        tag = kind.__struct_config__.tag
        text += f"\n### `{tag}`\n\n{_doc(kind)}\n\n{_fields(kind)}"
    return text


class _Lines:
    kinds: record.AnyLine


def _doc(struct: type) -> str:
    return inspect.cleandoc(struct.__doc__ or "").replace("``", "`").replace(":class:", "")


def _fields(struct: type[msgspec.Struct]) -> str:
    text = _table("field", "type")
    for field in msgspec.structs.fields(struct):
        name = str(field.type).replace("typing.", "").replace("loadpeak.record.", "")
        text += _row(f"`{field.name}`", field.type.__name__ if isinstance(field.type, type) else name)
    return text


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page, "record.md": record_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())

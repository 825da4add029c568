"""An experiment, as frozen structs: what was planned, what became of each startup, what judges read.

An experiment's folder, ``experiments/ID`` beside the run store, holds ``experiment.json`` (one
:class:`Experiment`) and ``startups.jsonl`` (a :class:`Startup` for each one that is over). The runs
themselves are in the run store under the names that the startups give.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from loadpeak_exporter.records import RunRecord

FORMAT = 1
"""Version of an experiment's folder."""
MOST_PAIRS = 1000


class _Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the records."""


class Arm(_Struct, frozen=True):
    """One way to start the command. The first arm of an experiment is the baseline of all others."""

    name: str
    release: str = "off"
    split_limit: str = "vllm"
    alloc_conf: str | None = None
    """Replaces ``PYTORCH_CUDA_ALLOC_CONF``; the environment's own where missing."""
    arguments: tuple[str, ...] = ()
    """Appended to the command."""
    environment: str | None = None
    """Folder of another Python environment, whose ``bin`` comes first."""


class Prompt(_Struct, frozen=True):
    """Text, or token ids where the engine has no tokenizer."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None


class Output(_Struct, frozen=True):
    """What was generated for one prompt, greedily."""

    prompt: int
    """Place in the experiment's prompts, or of the request in an offline script."""
    token_ids: tuple[int, ...]
    stop_reason: str | None = None
    logprobs: tuple[float | None, ...] | None = None
    """Of the selected tokens; an entry is missing where it was not finite, all are where none were given."""


class Experiment(_Struct, frozen=True):
    """What is to be run: ``pairs`` rounds of all arms, every other round backwards."""

    format: int
    experiment: str
    created_at_wall_seconds: Annotated[float, msgspec.Meta(ge=0, lt=1 << 40)]
    hostname: str
    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    arms: Annotated[tuple[Arm, ...], msgspec.Meta(min_length=2)]
    pairs: Annotated[int, msgspec.Meta(ge=1, le=MOST_PAIRS)]
    prompts: tuple[Prompt, ...] = ()
    """Empty for a command that sends its own (an offline script)."""
    max_tokens: int = 128


class Startup(_Struct, frozen=True):
    """One arm of one pair, after its end. ``error`` says in one line why it did not become ready."""

    pair: int
    arm: str
    began_at_wall_seconds: float
    run: Annotated[str, msgspec.Meta(pattern=r"^[^./\\\0\n][^/\\\0\n]*$")] | None = None
    """Missing where nothing was recorded."""
    ready_after_seconds: float | None = None
    """From the start of the command until its last rank was ready; the hashing that follows is not in it."""
    ended_at_wall_seconds: float | None = None
    exit_code: int | None = None
    error: str | None = None
    note: str | None = None
    """What else should be known, for example that a GPU was not empty when it began."""
    outputs: tuple[Output, ...] | None = None


class Evidence(_Struct, frozen=True):
    """Everything that is known of one startup."""

    startup: Startup
    run: RunRecord | None = None
    weights: dict[int, dict[str, str]] | None = None
    """For each rank the hash of each prepared tensor by its name; one without a whole set is missing."""
    not_hashed: dict[int, dict[str, str]] | None = None
    """For each rank with hashes the tensors that could not be hashed, and why."""
    settings: dict[str, str] | None = None
    """The engine's effective settings by name."""

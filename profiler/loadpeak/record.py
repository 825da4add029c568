"""The record of one run: what stands in its files, as frozen structs without behaviour.

A run folder holds ``run.json`` (one :class:`Header`), ``rank-N.jsonl`` (the journal that rank N
writes) and ``device-N.jsonl`` (what the sampler of rank N saw). A line is one JSON object that can
be read alone; its ``line`` field names kind and version, so a reader that meets a newer kind can
say so and go on.

Times are ``time.monotonic()`` in seconds, which on Linux is the same clock in every process of a
host; the first line of each file carries the wall clock beside it. Sizes are bytes. A field that
is missing was not available: it is never zero instead.
"""

import json
from typing import Literal

import msgspec

FORMAT = 1
"""Version of the folder layout and of ``run.json``; lines carry their own version."""

Phase = Literal[
    "init_device", "create_model", "load_weights", "process_weights", "profile", "kv_cache", "warmup", "ready"
]
PHASES: tuple[Phase, ...] = (
    "init_device",
    "create_model",
    "load_weights",
    "process_weights",
    "profile",
    "kv_cache",
    "warmup",
    "ready",
)
"""In the order in which a startup goes through them (vLLM 0.26 and 0.32)."""
LOAD_PHASES = PHASES[: PHASES.index("kv_cache")]
"""Up to the KV cache, which takes what is left: after it every startup is about as full."""

Outcome = Literal["loading", "ready", "oom", "failed", "killed"]
OUTCOMES: tuple[Outcome, ...] = ("loading", "ready", "oom", "failed", "killed")


class _Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of everything in a record."""


class Header(_Struct, frozen=True):
    """``run.json``: what is known before the first weight is loaded, equal for every rank."""

    format: int
    run: str
    created_at_wall_seconds: float
    hostname: str
    loadpeak_version: str
    variant: str
    release: str
    split_limit: str
    experiment: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    engine_instance: str | None = None
    torch_version: str | None = None
    model: str | None = None
    quantization: str | None = None
    load_format: str | None = None
    tp_size: int | None = None
    world_size: int | None = None
    alloc_conf: str | None = None
    """``PYTORCH_ALLOC_CONF`` or ``PYTORCH_CUDA_ALLOC_CONF`` as the process got it."""
    boot_id: str | None = None
    pid_namespace: int | None = None


class Memory(_Struct, frozen=True):
    """One reading of the caching allocator (``torch.cuda.memory_stats``), bytes and counts.

    Peaks are those since the statistics were last reset.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_split_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    retries: int | None = None
    ooms: int | None = None


class Device(_Struct, frozen=True):
    """The device whose memory the sampler reads.

    ``kind`` is ``nvml`` for a GPU or ``resident`` where there is none: then ``used_bytes`` of the
    samples is the resident memory of the rank's process and there is no total.
    """

    kind: Literal["nvml", "resident"]
    name: str
    uuid: str | None = None
    index: int | None = None
    total_bytes: int | None = None


class Line(_Struct, frozen=True, tag_field="line"):
    """A line of a journal or a sample file."""

    at_seconds: float


# ── rank-N.jsonl ──────────────────────────────────────────────────────────────────────────────────


class RankStart(Line, frozen=True, tag="rank/1"):
    """First line of a journal."""

    at_wall_seconds: float
    rank: int
    local_rank: int
    pid: int


class PhaseStart(Line, frozen=True, tag="phase/1"):
    """A phase begins. ``settings`` are the allocator settings in force, as one conf string."""

    phase: Phase
    memory: Memory = Memory()
    settings: str | None = None


class PhaseEnd(Line, frozen=True, tag="phase-end/1"):
    """A phase is over. The peaks are the highest since the last phase ended."""

    phase: Phase
    duration_seconds: float
    memory: Memory = Memory()
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None


class Model(Line, frozen=True, tag="model/1"):
    """A model object exists; ``layers`` are the numbers its conversions will carry."""

    layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    conversions: int


class Conversion(Line, frozen=True, tag="conversion/1"):
    """One module's ``process_weights_after_loading``; ``at_seconds`` is its start.

    A decoder layer has several converted modules (attention projections, experts); ``layer`` is the
    number they share, or missing for modules outside the numbered layers (embedding, head).
    ``after`` is read after the release, if there was one; ``released_bytes`` is missing where the
    policy did not ask for a release.
    """

    name: str
    method: str
    moe: bool
    phase: Phase
    duration_seconds: float
    layer: int | None = None
    layer_done: bool = False
    before: Memory = Memory()
    after: Memory = Memory()
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    retries: int | None = None
    ooms: int | None = None
    released_bytes: int | None = None
    failed: bool = False


class SettingsChange(Line, frozen=True, tag="settings/1"):
    """The allocator's settings were changed at run time; these are in force from then on."""

    settings: str


class MemoryHistory(Line, frozen=True, tag="memory-history/1"):
    """The allocator's history since the first phase was written to a file beside the journal.

    It holds the newest ``entries_limit`` events at most.
    """

    file: str
    entries_limit: int


class Fix(Line, frozen=True, tag="fix/1"):
    """What became of a requested fix: in force, or inactive and why."""

    name: Literal["release", "split_limit"]
    value: str
    active: bool
    detail: str = ""


class Failure(Line, frozen=True, tag="failure/1"):
    """The startup raised. ``message`` is the error's own text, which holds the figures."""

    outcome: Literal["oom", "failed", "killed"]
    error: str
    message: str
    phase: Phase | None = None
    memory: Memory = Memory()


class Ready(Line, frozen=True, tag="ready/1"):
    """The engine can serve."""

    memory: Memory = Memory()


class HookError(Line, frozen=True, tag="hook-error/1"):
    """A hook of loadpeak failed; ``count`` is the number so far in this rank."""

    hook: str
    error: str
    count: int


class Exporter(Line, frozen=True, tag="exporter/1"):
    """The in-process exporter listens."""

    host: str
    port: int


class EngineSettings(Line, frozen=True, tag="engine-settings/1"):
    """The engine's effective settings when it was ready, by name.

    What differs from process to process by nature (ids, ports, measured sizes) and secrets are left out.
    """

    settings: dict[str, str]


class WeightHashes(Line, frozen=True, tag="weight-hashes/1"):
    """Hashes of prepared tensors by their full names, all within one numbered module or outside of any.

    ``module`` is that module's name, or empty.
    """

    module: str
    hashes: dict[str, str]


class WeightsHashed(Line, frozen=True, tag="weights-hashed/1"):
    """Every tensor of the rank's models was seen: so many hashes stand in the lines before.

    ``not_hashed`` names those that could not be hashed, and why.
    """

    tensors: int
    size_bytes: int
    duration_seconds: float
    not_hashed: dict[str, str] = {}


class Exit(Line, frozen=True, tag="exit/1"):
    """The interpreter of the rank is closing in good order."""


# ── device-N.jsonl ────────────────────────────────────────────────────────────────────────────────


class SamplerStart(Line, frozen=True, tag="sampler/1"):
    """First line of a sample file."""

    at_wall_seconds: float
    rank: int
    interval_seconds: float
    pid: int


class DeviceFound(Line, frozen=True, tag="device/1"):
    """The sampler knows which device it reads."""

    device: Device


class Sample(Line, frozen=True, tag="sample/1"):
    """A sample that changed something, or the once-a-second sign of life.

    ``phase_peak_bytes`` is the highest use since the phase began; ``gap_seconds`` is the longest time
    between two samples so far.
    """

    phase: Phase
    used_bytes: int | None = None
    phase_peak_bytes: int | None = None
    gap_seconds: float | None = None


class SamplerWarning(Line, frozen=True, tag="sampler-warning/1"):
    """The one warning a sampler gives about readings that it cannot have."""

    message: str


class RankEnd(Line, frozen=True, tag="rank-end/1"):
    """The rank's process is gone. The code or signal is there only if it could still be read."""

    exit_code: int | None = None
    signal: int | None = None


# ── command.jsonl, written by `loadpeak run` ──────────────────────────────────────────────────────


class CommandEnd(Line, frozen=True, tag="command-end/1"):
    """The command that `loadpeak run` started is over."""

    at_wall_seconds: float
    exit_code: int


AnyLine = (
    RankStart
    | PhaseStart
    | PhaseEnd
    | Model
    | Conversion
    | SettingsChange
    | MemoryHistory
    | Fix
    | Failure
    | Ready
    | HookError
    | Exporter
    | EngineSettings
    | WeightHashes
    | WeightsHashed
    | Exit
    | SamplerStart
    | DeviceFound
    | Sample
    | SamplerWarning
    | RankEnd
    | CommandEnd
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)
_header_decoder = msgspec.json.Decoder(Header)


def _encode(value: Line | Header) -> bytes:
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        # Bytes of a path or of the environment that are no UTF-8: a question mark stands for each.
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=False).encode(errors="replace")


def encode_line(line: Line) -> bytes:
    """One line, ended by a newline."""
    return _encode(line) + b"\n"


def decode_line(data: bytes) -> AnyLine:
    """One line back.

    Raises:
        msgspec.DecodeError: it is not JSON, or not a line of a kind and version known here.
    """
    return _decoder.decode(data)


def encode_header(header: Header) -> bytes:
    """``run.json``, readable."""
    return msgspec.json.format(_encode(header), indent=2) + b"\n"


def decode_header(data: bytes) -> Header:
    """``run.json`` back.

    Raises:
        msgspec.DecodeError: it is not JSON, lacks a field, or is of a newer format.
    """
    header = _header_decoder.decode(data)
    if header.format > FORMAT:
        raise msgspec.ValidationError(f"it is of format {header.format}, this loadpeak knows {FORMAT}")
    return header

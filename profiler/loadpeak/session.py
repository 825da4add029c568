"""The recording of one rank's startup: readings go in, lines come out.

A session knows phases, conversions and peaks. It does not know vLLM, torch or NVML: the allocator,
the clock, the journal and the sampler are given to it.

**Peaks.** PyTorch keeps one peak since the last reset, and others (vLLM above all) reset it too. So
whatever is read is folded into every open window (the phase's and those of the conversions under
way), and :meth:`Session.before_reset` is called before somebody else's reset. The session itself
resets only where vLLM measures nothing: at the end of a phase and at the start of a conversion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from loadpeak.guard import Guard
from loadpeak.record import (
    Conversion,
    Failure,
    Fix,
    Line,
    Memory,
    Model,
    Outcome,
    Phase,
    PhaseEnd,
    PhaseStart,
    Ready,
)

MESSAGE_LIMIT = 8192
"""Characters kept of an error's text; a PyTorch out-of-memory message has about 600."""


class Allocator(Protocol):
    """What a session needs of the caching allocator (:class:`loadpeak.torch_allocator.TorchAllocator`)."""

    def read(self) -> Memory:
        """Current figures and the peaks since the last reset."""

    def reset_peaks(self) -> None:
        """Start a new window for the peaks."""

    def settings(self) -> str | None:
        """The allocator settings in force."""

    def release(self) -> None:
        """Give unused cached blocks back to the device."""


class _Window:
    """The highest peaks seen since it was opened."""

    def __init__(self) -> None:
        self.allocated: int | None = None
        self.reserved: int | None = None

    def fold(self, memory: Memory) -> None:
        self.allocated = _highest(self.allocated, memory.allocated_peak_bytes)
        self.reserved = _highest(self.reserved, memory.reserved_peak_bytes)


class ConvertedModule(Protocol):
    """What an action after a conversion may ask about it."""

    @property
    def moe(self) -> bool:
        """Whether the module holds the experts of a mixture of experts."""

    @property
    def method(self) -> str:
        """Qualified name of the quantization method's class."""


class Session:
    """Records one rank, from ``init_device`` to ready or to its failure.

    Attributes:
        after_conversion: actions that run when an outermost conversion has returned without error,
            each given the module and the reading after it. An action that releases memory returns
            true.
        after_init_device: actions that run once the device is in use (or could not be).
        at_end: actions that run once, when the startup is over for better or worse.
    """

    def __init__(
        self,
        allocator: Allocator,
        write: Callable[[Line], None],
        tell_phase: Callable[[Phase], None] = lambda phase: None,
        clock: Callable[[], float] = time.monotonic,
        is_out_of_memory: Callable[[BaseException], bool] = lambda error: False,
        guard: Guard | None = None,
    ) -> None:
        self.allocator = allocator
        self.guard = guard or Guard()
        self.after_conversion: list[Callable[[ConvertedModule, Memory], bool]] = []
        self.at_end: list[Callable[[], None]] = []
        self.after_init_device: list[Callable[[], None]] = []
        self.phase: Phase = "init_device"
        self.outcome: Outcome = "loading"
        self.write = write
        self.clock = clock
        self._tell_phase = tell_phase
        self._is_out_of_memory = is_out_of_memory
        self._windows: list[_Window] = [_Window()]
        self._phase_started = clock()

    def fix(
        self, name: Literal["release", "split_limit"], value: str, active: bool, detail: str = ""
    ) -> None:
        """Record what became of a requested fix."""
        self.write(Fix(at_seconds=self.clock(), name=name, value=value, active=active, detail=detail))

    def start_phase(self, phase: Phase) -> None:
        """A phase begins; what happened since the last one ended counts to it."""
        self.phase = phase
        self._tell_phase(phase)
        self._phase_started = self.clock()
        memory = self._read()
        self.write(
            PhaseStart(
                at_seconds=self._phase_started, phase=phase, memory=memory, settings=self.allocator.settings()
            )
        )

    def end_phase(self) -> None:
        """The phase is over: its peaks are written and a new window begins."""
        memory = self._read()
        now = self.clock()
        window = self._windows[0]
        self.write(
            PhaseEnd(
                at_seconds=now,
                phase=self.phase,
                duration_seconds=round(now - self._phase_started, 6),
                memory=memory,
                allocated_peak_bytes=window.allocated,
                reserved_peak_bytes=window.reserved,
            )
        )
        self._windows[0] = _Window()
        self.allocator.reset_peaks()
        if self.phase == "init_device":
            self._run(self.after_init_device)

    def before_reset(self) -> None:
        """Somebody is about to reset the allocator's peaks: keep them."""
        self._read()

    def model(self, layers: Sequence[int], moe_layers: Sequence[int], conversions: int) -> None:
        """A model exists, with these layer numbers and so many modules to convert."""
        self.write(
            Model(
                at_seconds=self.clock(),
                layers=tuple(layers),
                moe_layers=tuple(moe_layers),
                conversions=conversions,
            )
        )

    def start_conversion(self) -> ConversionWatch:
        """A module's conversion begins."""
        started = self.clock()
        before = self._read()
        self.allocator.reset_peaks()
        window = _Window()
        self._windows.append(window)
        return ConversionWatch(started, before, window, depth=len(self._windows) - 1)

    def end_conversion(
        self,
        watch: ConversionWatch,
        *,
        name: str,
        method: str,
        moe: bool,
        layer: int | None = None,
        layer_done: bool = False,
        failed: bool = False,
    ) -> None:
        """A module's conversion has returned (or raised: ``failed``); actions run, the line is written."""
        after = self._read()
        window = watch.window
        del self._windows[watch.depth :]
        line = Conversion(
            at_seconds=watch.started,
            name=name,
            method=method,
            moe=moe,
            phase=self.phase,
            duration_seconds=round(self.clock() - watch.started, 6),
            layer=layer,
            layer_done=layer_done,
            before=_current(watch.before),
            after=_current(after),
            allocated_peak_bytes=window.allocated,
            reserved_peak_bytes=window.reserved,
            retries=_difference(after.retries, watch.before.retries),
            ooms=_difference(after.ooms, watch.before.ooms),
            failed=failed,
        )
        if not failed and watch.depth == 1 and self._act(line, after):
            reserved = after.reserved_bytes
            after = self._read()
            line = _with_release(line, _current(after), _difference(reserved, after.reserved_bytes))
        self.write(line)

    def _act(self, line: Conversion, after: Memory) -> bool:
        """Run the actions; true when one of them released memory."""
        released = [
            self.guard.call("after_conversion", action, line, after) for action in self.after_conversion
        ]
        return any(released)

    def ready(self) -> None:
        """The engine can serve; nothing more is recorded."""
        self.phase = "ready"
        self.outcome = "ready"
        self.write(Ready(at_seconds=self.clock(), memory=self._read()))
        self._tell_phase("ready")
        self._finish()

    def failed(self, error: BaseException) -> None:
        """The startup raised; the first error of a startup is the one that counts."""
        if self.outcome != "loading":
            return
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            self.outcome = "killed"
        else:
            self.outcome = "oom" if self._is_out_of_memory(error) else "failed"
        self.write(
            Failure(
                at_seconds=self.clock(),
                outcome=self.outcome,
                error=type(error).__qualname__,
                message=str(error)[:MESSAGE_LIMIT],
                phase=self.phase,
                memory=self._read(),
            )
        )
        self._finish()

    def _finish(self) -> None:
        self._run(self.at_end)

    def _run(self, actions: list[Callable[[], None]]) -> None:
        while actions:
            self.guard.call("action", actions.pop(0))

    def _read(self) -> Memory:
        memory = self.allocator.read()
        for window in self._windows:
            window.fold(memory)
        return memory


class ConversionWatch:
    """A conversion under way: when it began, what stood before, its window."""

    def __init__(self, started: float, before: Memory, window: _Window, depth: int) -> None:
        self.started, self.before, self.window, self.depth = started, before, window, depth


def _current(memory: Memory) -> Memory:
    """The reading without peaks and counts, which stand beside it in the line."""
    return Memory(
        allocated_bytes=memory.allocated_bytes,
        reserved_bytes=memory.reserved_bytes,
        inactive_split_bytes=memory.inactive_split_bytes,
    )


def _with_release(line: Conversion, after: Memory, released_bytes: int | None) -> Conversion:
    return msgspec.structs.replace(line, after=after, released_bytes=released_bytes)


def _difference(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else later - earlier


def _highest(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else max(first, second)

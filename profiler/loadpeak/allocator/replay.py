"""A history replayed under other settings, releases and capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadpeak.allocator.history import Do, History, Step
from loadpeak.allocator.model import AllocatorModel, OutOfMemoryError
from loadpeak.allocator.pools import Block
from loadpeak.allocator.settings import added, parse
from loadpeak.allocator.start import put
from loadpeak.errors import SettingError
from loadpeak.settings import parse_size, release_policy

if TYPE_CHECKING:
    from loadpeak.allocator.segments import SegmentEvent


class Change(NamedTuple):
    """Settings that the program itself put in force for a while, on top of what the process was given.

    Attributes:
        from_event: the first recorded event under them.
        to_event: the first one after them.
        alloc_conf: what is added, in PyTorch's syntax.
    """

    from_event: int
    to_event: int
    alloc_conf: str


def conf_at(alloc_conf: str, changes: Sequence[Change], event: int) -> str:
    """The conf string in force from a place in the recorded history on."""
    for change in changes:
        if change.from_event <= event < change.to_event:
            alloc_conf = added(alloc_conf, change.alloc_conf)
    return alloc_conf


class Boundary(NamedTuple):
    """The end of one module's conversion, where a release policy acts.

    Attributes:
        begin: the first recorded event of the conversion.
        event: the first one after it.
        layer: number of its layer, if it has one.
        moe: whether the module holds experts.
        released: whether the recorded run released there.
    """

    begin: int
    event: int
    layer: int | None
    moe: bool
    released: bool = False


class Release(NamedTuple):
    """A release policy, as in the setting ``LOADPEAK_CACHE_RELEASE``."""

    name: str
    threshold_bytes: int = 0

    @classmethod
    def parse(cls, text: str) -> Release:
        """The policy that a text spells.

        Raises:
            SettingError: it spells none.
        """
        try:
            name, _, size = release_policy(text).partition(":")
        except ValueError:
            raise SettingError("release", text, "off, moe-layer, layer or threshold:SIZE") from None
        return cls(name, parse_size(size) if size else 0)

    def wants(self, boundary: Boundary, model: AllocatorModel) -> bool:
        """Whether to empty the cache after this conversion."""
        if self.name == "moe-layer":
            return boundary.moe
        if self.name == "threshold":
            return model.memory.reserved_bytes - model.allocated_bytes >= self.threshold_bytes
        return self.name == "layer"


class Scenario(NamedTuple):
    """What to replay a history under."""

    alloc_conf: str
    release: Release = Release("off")
    capacity_bytes: int | None = None
    changes: tuple[Change, ...] = ()


class LayerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """From the end of the layer before to the end of this one.

    ``layer`` is missing before the first conversion and after the last layer.
    """

    layer: int | None
    allocated_bytes: int
    reserved_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay came to.

    ``failed_bytes`` is the segment that there was no room for, ``failed_layer`` where (missing outside the
    layers); ``complete`` says whether the replay reached the end of the history all the same.
    """

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    end_reserved_bytes: int
    end_allocated_bytes: int
    retries: int
    calls: int
    layers: tuple[LayerFigures, ...]
    failed_bytes: int | None = None
    failed_layer: int | None = None
    complete: bool = True


class Replay:
    """One history under one scenario.

    Attributes:
        model: the allocator as it stands.
        blocks: the block behind each number that is in use; what stands behind others means nothing.
        addresses: where each block was handed out, kept only while a goal is looked for.
        layer: number of the layer under way, if any is.
    """

    def __init__(
        self,
        history: History,
        scenario: Scenario,
        boundaries: Sequence[Boundary] = (),
        on_event: SegmentEvent | None = None,
    ) -> None:
        """Get ready to replay.

        Raises:
            SettingError: the scenario's conf string cannot be used.
        """
        self._history, self._scenario = history, scenario
        self.model = AllocatorModel(
            parse(conf_at(scenario.alloc_conf, scenario.changes, -1)),
            scenario.capacity_bytes,
            on_event,
            self._finish_frees,
        )
        self.blocks = put(self.model, history.start)
        self.addresses = [block.address for block in self.blocks]
        self._steps = self._plan(boundaries)
        self.layer: int | None = None
        self._asked: dict[int, Block] = {}
        self._layers: list[LayerFigures] = []
        self._peaks = (0, 0)
        self._failure: tuple[int, int | None] | None = None
        self._complete = True

    def run(self, until_reserved: int | None = None) -> bool:
        """Replay all of it, or until so much is reserved.

        Returns:
            Whether it got there: false when a request found no memory, or when it ended short of the goal.
        """
        at = 0
        for until, act in [*self._steps, (len(self._history.operations), None)]:
            try:
                if self._play(at, until, until_reserved):
                    return True
            except OutOfMemoryError as error:
                self._fail(error)
                self._complete = False
                return False
            at = until
            if act is not None:
                act()
        return until_reserved is None

    def outcome(self) -> Outcome:
        """What it came to, after :meth:`run`."""
        self._close_window(None if self._complete else self.layer)
        allocated, reserved = self._peaks
        memory = self.model.memory
        size, layer = self._failure or (None, None)
        return Outcome(
            peak_reserved_bytes=reserved,
            peak_allocated_bytes=allocated,
            end_reserved_bytes=memory.reserved_bytes,
            end_allocated_bytes=self.model.allocated_bytes,
            retries=self.model.retries,
            calls=memory.calls,
            layers=tuple(self._layers),
            failed_bytes=size,
            failed_layer=layer,
            complete=self._complete,
        )

    def _play(self, begin: int, end: int, until_reserved: int | None) -> bool:
        """The operations between two steps; true when so much is reserved."""
        alloc, free, blocks = self.model.alloc, self.model.free, self.blocks
        keep = blocks.append
        if until_reserved is None:
            for operation in self._history.operations[begin:end]:
                if operation >= 0:
                    keep(alloc(operation))
                else:
                    free(blocks[~operation])
            return False
        for operation in self._history.operations[begin:end]:
            if operation >= 0:
                keep(alloc(operation))
                self.addresses.append(blocks[-1].address)
                if self.model.memory.reserved_bytes >= until_reserved:
                    return True
            else:
                free(blocks[~operation])
        return False

    # ── what happens between operations ───────────────────────────────────────────────────────────

    def _plan(self, boundaries: Sequence[Boundary]) -> list[tuple[int, Callable[[], None] | None]]:
        """Everything between operations, with the operation that comes next, in order."""
        at = self._history.operation_at
        ours = {at(boundary.event) for boundary in boundaries if boundary.released}
        planned: list[tuple[int, int, Callable[[], None]]] = []
        conf, changes = self._scenario.alloc_conf, self._scenario.changes
        for event in {event for change in changes for event in change[:2]}:
            planned.append((event, at(event), partial(self._apply, conf_at(conf, changes, event))))
        if boundaries:
            first = boundaries[0].begin
            planned.append((first, at(first), partial(self._begin, _next_layer(boundaries))))
        for place, boundary in enumerate(boundaries, start=1):
            end = partial(self._end, boundary, _next_layer(boundaries[place:]))
            planned.append((boundary.event, at(boundary.event), end))
        for step in self._history.steps:
            if step.do is not Do.EMPTY_CACHE or step.at not in ours:
                planned.append((step.event, step.at, partial(self._do, step)))
        return [(at, act) for _, at, act in sorted(planned, key=lambda one: one[:2])]

    def _apply(self, conf: str) -> None:
        self.model.apply(parse(conf))

    def _do(self, step: Step) -> None:
        if step.do is Do.EMPTY_CACHE:
            self.model.empty_cache()
        elif step.do is Do.USE_LANE:
            self.model.use_lane(step.value)
        elif step.do is Do.ASK_FREE:
            self._asked[step.value] = self.blocks[step.value]
        elif step.do is Do.FREE:
            block = self._asked.pop(step.value, None)
            if block is not None:
                self.model.free(block)
        else:
            try:
                self.model.free(self.model.alloc(step.value))
            except OutOfMemoryError as error:
                self._fail(error)

    def _finish_frees(self) -> None:
        """The allocator waits for other streams: what they used is free now."""
        while self._asked:
            self.model.free(self._asked.popitem()[1])

    def _fail(self, error: OutOfMemoryError) -> None:
        self._failure = self._failure or (error.size, self.layer)

    # ── layers ────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, first: int | None) -> None:
        """The first conversion begins."""
        self._close_window(None)
        self.layer = first

    def _end(self, boundary: Boundary, following: int | None) -> None:
        """A module's conversion is over, and its layer's if the next one is of another."""
        if self._scenario.release.wants(boundary, self.model):
            self.model.empty_cache()
        if boundary.layer is not None and boundary.layer != following:
            self._close_window(boundary.layer)
            self.layer = following

    def _close_window(self, layer: int | None) -> None:
        model, memory = self.model, self.model.memory
        self._layers.append(
            LayerFigures(
                layer=layer,
                allocated_bytes=model.allocated_bytes,
                reserved_bytes=memory.reserved_bytes,
                allocated_peak_bytes=model.allocated_peak_bytes,
                reserved_peak_bytes=memory.reserved_peak_bytes,
            )
        )
        self._peaks = (
            max(self._peaks[0], model.allocated_peak_bytes),
            max(self._peaks[1], memory.reserved_peak_bytes),
        )
        model.allocated_peak_bytes = model.allocated_bytes
        memory.reserved_peak_bytes = memory.reserved_bytes


def _next_layer(boundaries: Sequence[Boundary]) -> int | None:
    return next((boundary.layer for boundary in boundaries if boundary.layer is not None), None)


def replay(history: History, scenario: Scenario, boundaries: Sequence[Boundary] = ()) -> Outcome:
    """All of a history under one scenario.

    Raises:
        SettingError: the scenario's conf string cannot be used.
    """
    run = Replay(history, scenario, boundaries)
    run.run()
    return run.outcome()

"""What a session writes, driven by an allocator whose figures the test sets."""

import pytest

from loadpeak.guard import Guard
from loadpeak.record import Conversion, Failure, Memory, PhaseEnd, PhaseStart, Ready
from loadpeak.session import Session
from tests.fakes import AbsentAllocator, FakeAllocator, FakeClock, Lines, MiB, phase_of


class Bench:
    """A session and everything around it."""

    def __init__(self, allocator: FakeAllocator | None = None) -> None:
        self.allocator = allocator or FakeAllocator()
        self.clock = FakeClock(step=0.001)
        self.lines = Lines()
        self.phases: list[str] = []
        self.session = Session(
            self.allocator,
            self.lines.append,
            self.phases.append,
            clock=self.clock,
            is_out_of_memory=lambda error: "out of memory" in str(error),
        )

    def convert(self, work: int = 0, keep: int = 0, moe: bool = True, failed: bool = False) -> Conversion:
        """A conversion that needs ``work`` for a moment and leaves ``keep`` live."""
        watch = self.session.start_conversion()
        self.allocator.allocate(work + keep)
        self.allocator.free(work)
        self.session.end_conversion(
            watch, name="model.layers.0.mlp.experts", method="m.M", moe=moe, layer=0, failed=failed
        )
        return self.lines.of(Conversion)[-1]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_phase_carries_the_settings_in_force_at_its_start(bench: Bench) -> None:
    bench.allocator.conf = "expandable_segments:True,max_split_size_mb:20"
    with phase_of(bench.session, "load_weights"):
        bench.allocator.conf = None
    assert bench.lines.one(PhaseStart).settings == "expandable_segments:True,max_split_size_mb:20"


def test_peak_of_a_phase_is_what_was_highest_within_it(bench: Bench) -> None:
    with phase_of(bench.session, "create_model"):
        bench.allocator.allocate(100 * MiB)
        bench.allocator.free(60 * MiB)
    with phase_of(bench.session, "load_weights"):
        bench.allocator.allocate(10 * MiB)
    first, second = bench.lines.of(PhaseEnd)
    assert first.allocated_peak_bytes == 100 * MiB
    assert second.allocated_peak_bytes == 50 * MiB
    assert second.reserved_peak_bytes == 100 * MiB


def test_peak_between_two_phases_counts_to_the_later(bench: Bench) -> None:
    with phase_of(bench.session, "process_weights"):
        pass
    bench.allocator.allocate(300 * MiB)
    bench.allocator.free(300 * MiB)
    with phase_of(bench.session, "profile"):
        pass
    assert bench.lines.of(PhaseEnd)[-1].allocated_peak_bytes == 300 * MiB


def test_peak_survives_a_reset_by_somebody_else(bench: Bench) -> None:
    with phase_of(bench.session, "process_weights"):
        bench.allocator.allocate(200 * MiB)
        bench.allocator.free(200 * MiB)
        bench.session.before_reset()
        bench.allocator.reset_peaks()
    assert bench.lines.one(PhaseEnd).allocated_peak_bytes == 200 * MiB


def test_phase_does_not_reset_the_peaks_that_vllm_measures(bench: Bench) -> None:
    """vLLM reads its profiling peak inside determine_available_memory: nothing of ours may come between."""
    bench.session.start_phase("profile")
    bench.allocator.allocate(70 * MiB)
    bench.allocator.free(70 * MiB)
    assert bench.allocator.allocated_peak == 70 * MiB
    bench.session.end_phase()


def test_conversion_has_its_own_peaks_and_the_phase_keeps_the_highest(bench: Bench) -> None:
    bench.session.start_phase("process_weights")
    bench.allocator.allocate(500 * MiB)
    bench.allocator.free(400 * MiB)
    line = bench.convert(work=50 * MiB, keep=5 * MiB)
    assert line.before.allocated_bytes == 100 * MiB
    assert line.allocated_peak_bytes == 155 * MiB
    assert line.after.allocated_bytes == 105 * MiB
    bench.session.end_phase()
    assert bench.lines.one(PhaseEnd).allocated_peak_bytes == 500 * MiB


def test_conversion_inside_a_conversion_counts_to_both(bench: Bench) -> None:
    outer = bench.session.start_conversion()
    bench.convert(work=80 * MiB)
    bench.session.end_conversion(outer, name="outer", method="m.M", moe=True)
    inner_line, outer_line = bench.lines.of(Conversion)
    assert inner_line.allocated_peak_bytes == outer_line.allocated_peak_bytes == 80 * MiB


def test_retries_and_ooms_are_those_inside_the_conversion(bench: Bench) -> None:
    bench.allocator.retries = 7
    watch = bench.session.start_conversion()
    bench.allocator.retries, bench.allocator.ooms = 9, 1
    bench.session.end_conversion(watch, name="x", method="m.M", moe=False)
    line = bench.lines.one(Conversion)
    assert (line.retries, line.ooms) == (2, 1)


def test_action_runs_after_an_outermost_conversion_only(bench: Bench) -> None:
    released: list[str] = []

    def release(module: object, memory: Memory) -> bool:
        released.append("now")
        bench.allocator.release()
        return True

    bench.session.after_conversion.append(release)
    outer = bench.session.start_conversion()
    bench.convert(work=80 * MiB)
    assert released == []
    bench.session.end_conversion(outer, name="outer", method="m.M", moe=True)
    assert released == ["now"]
    inner_line, outer_line = bench.lines.of(Conversion)
    assert inner_line.released_bytes is None
    assert outer_line.released_bytes == 80 * MiB
    assert outer_line.after.reserved_bytes == 0


def test_no_action_after_a_conversion_that_raised(bench: Bench) -> None:
    bench.session.after_conversion.append(lambda module, memory: pytest.fail("released after an error"))
    assert bench.convert(work=1, failed=True).failed


def test_failing_action_loses_neither_the_line_nor_the_engine(bench: Bench) -> None:
    guard = Guard()
    bench.session.guard = guard

    def broken(module: object, memory: Memory) -> bool:
        raise RuntimeError("no")

    bench.session.after_conversion.append(broken)
    assert bench.convert(work=1).released_bytes is None
    assert guard.errors == 1


def test_ready_is_told_once_and_ends_the_session(bench: Bench) -> None:
    ended: list[str] = []
    bench.session.at_end.append(lambda: ended.append("end"))
    bench.allocator.allocate(16 * MiB)
    bench.session.ready()
    bench.session.failed(RuntimeError("later"))
    assert bench.lines.one(Ready).memory.allocated_bytes == 16 * MiB
    assert bench.phases == ["ready"]
    assert ended == ["end"]
    assert not bench.lines.of(Failure)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "oom"),
        (ValueError("bad checkpoint"), "failed"),
        (KeyboardInterrupt(), "killed"),
        (SystemExit(1), "killed"),
    ],
)
def test_error_decides_the_outcome_and_keeps_its_text(
    bench: Bench, error: BaseException, outcome: str
) -> None:
    bench.session.start_phase("load_weights")
    bench.session.failed(error)
    failure = bench.lines.one(Failure)
    assert (failure.outcome, failure.message, failure.phase) == (outcome, str(error), "load_weights")


def test_first_error_counts(bench: Bench) -> None:
    bench.session.failed(RuntimeError("out of memory"))
    bench.session.failed(ValueError("a consequence"))
    assert bench.lines.one(Failure).outcome == "oom"


def test_without_an_allocator_readings_are_missing_not_zero() -> None:
    bench = Bench(AbsentAllocator())
    with phase_of(bench.session, "load_weights"):
        line = bench.convert(work=1)
    assert line.before == Memory()
    assert (line.allocated_peak_bytes, line.released_bytes, line.retries) == (None, None, None)
    assert bench.lines.one(PhaseStart).settings is None

"""What a recorded history tells about the program, and what a replay makes of it."""

from loadpeak.allocator.history import Do
from loadpeak.allocator.replay import Boundary, Change, Release, Replay, Scenario, replay
from loadpeak.allocator.settings import UNLIMITED
from loadpeak.allocator.sizes import MIB
from tests.allocator.making import Recorder

EXPANDABLE = "expandable_segments:True"


def test_release_before_a_free_is_the_programs() -> None:
    recorder = Recorder()
    kept, dropped = recorder.alloc(MIB), recorder.alloc(30 * MIB)
    recorder.free(dropped, 30 * MIB)
    recorder.add("segment_free", 30 * MIB, dropped)
    recorder.free(kept, MIB)
    assert [step.do for step in recorder.history().steps] == [Do.EMPTY_CACHE]


def with_release_before(request: int, *, split_limit: int | None = None) -> list[Do]:
    """A 64 MiB block goes back, then a request comes; the highest point so far was before it."""
    recorder = Recorder()
    at = recorder.add("segment_alloc", 64 * MIB)
    recorder.alloc(64 * MIB, address=at)
    recorder.free(at, 64 * MIB)
    recorder.add("segment_free", 64 * MIB, at)
    recorder.add("segment_alloc", 64 * MIB, at)
    recorder.alloc(request, address=at)
    return [step.do for step in recorder.history(max_split_bytes=split_limit or UNLIMITED).steps]


def test_release_of_what_could_have_served_the_request_is_the_programs() -> None:
    """The last release of a load that released per layer, at its highest point."""
    assert with_release_before(30 * MIB) == [Do.EMPTY_CACHE]


def test_release_before_a_request_that_nothing_could_serve_is_the_allocators() -> None:
    assert with_release_before(80 * MIB) == []
    assert with_release_before(12 * MIB, split_limit=20 * MIB) == []


def test_release_is_the_programs_where_there_was_room() -> None:
    recorder = Recorder()
    first = recorder.add("segment_alloc", 64 * MIB)
    recorder.alloc(64 * MIB, address=first)
    second = recorder.add("segment_alloc", 200 * MIB)
    recorder.alloc(200 * MIB, address=second)
    recorder.free(second, 200 * MIB)
    recorder.add("segment_free", 200 * MIB, second)
    recorder.free(first, 64 * MIB)
    recorder.add("segment_free", 64 * MIB, first)
    recorder.add("segment_alloc", 80 * MIB)
    recorder.alloc(80 * MIB)
    history = recorder.history()
    assert [step.do for step in history.steps] == [Do.EMPTY_CACHE, Do.EMPTY_CACHE]
    assert history.limit_bytes is None


def out_of_memory() -> Recorder:
    recorder = Recorder()
    at = recorder.add("segment_alloc", 64 * MIB)
    recorder.alloc(64 * MIB, address=at)
    recorder.add("oom", 50 * MIB)
    return recorder


def test_request_that_failed_tells_the_limit() -> None:
    history = out_of_memory().history()
    assert history.limit_bytes == (64 + 50) * MIB
    assert replay(history, Scenario("", capacity_bytes=history.limit_bytes - 1)).failed_bytes
    assert replay(history, Scenario("", capacity_bytes=history.limit_bytes)).failed_bytes is None


def test_request_that_failed_counts_for_the_peak_where_it_would_not_fail() -> None:
    outcome = replay(out_of_memory().history(), Scenario(""))
    assert outcome.peak_reserved_bytes == (64 + 50) * MIB


def test_block_that_another_stream_still_uses_is_free_only_then() -> None:
    recorder = Recorder()
    at = recorder.alloc(30 * MIB)
    recorder.add("free_requested", 30 * MIB, at)
    recorder.alloc(30 * MIB)
    recorder.add("free_completed", 30 * MIB, at)
    recorder.alloc(30 * MIB)
    outcome = replay(recorder.history(), Scenario(""))
    assert outcome.peak_reserved_bytes == 60 * MIB


def test_retry_waits_for_the_other_stream() -> None:
    recorder = Recorder()
    at = recorder.alloc(30 * MIB)
    recorder.add("free_requested", 30 * MIB, at)
    recorder.alloc(40 * MIB)
    recorder.add("free_completed", 30 * MIB, at)
    outcome = replay(recorder.history(), Scenario("", capacity_bytes=50 * MIB))
    assert outcome.retries == 1
    assert outcome.failed_bytes is None
    assert outcome.end_allocated_bytes == 40 * MIB


def test_private_pool_is_known_from_the_snapshots_segments_or_from_the_event() -> None:
    recorder = Recorder()
    inside = recorder.alloc(30 * MIB)
    recorder.alloc(30 * MIB, pool_id=(0, 2))
    segment = {
        "address": inside,
        "total_size": 30 * MIB,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 1),
        "blocks": [],
    }
    lanes = [step.value for step in recorder.history([segment]).steps]
    assert lanes == [(0, (0, 1)), (0, (0, 2))]


def test_block_from_before_the_recording_can_be_freed() -> None:
    recorder = Recorder()
    recorder.free(1 << 40, 30 * MIB)
    recorder.alloc(20 * MIB)
    history = recorder.history()
    assert history.start.reserved_bytes == 30 * MIB
    assert replay(history, Scenario("")).peak_reserved_bytes == 30 * MIB


def test_settings_change_where_the_program_changed_them() -> None:
    recorder = Recorder()
    first = recorder.alloc(64 * MIB)
    recorder.free(first, 64 * MIB)
    second = recorder.alloc(12 * MIB)
    recorder.free(second, 12 * MIB)
    recorder.alloc(12 * MIB)
    limited = Change(3, 6, "max_split_size_mb:20")
    history = recorder.history()
    assert replay(history, Scenario("")).peak_reserved_bytes == 64 * MIB
    assert replay(history, Scenario("", changes=(limited,))).peak_reserved_bytes == 76 * MIB


def layers() -> Recorder:
    """Two layers, each of which frees 64 MiB and then needs 30."""
    recorder = Recorder()
    sources = [recorder.alloc(64 * MIB) for _ in range(2)]
    for source in sources:
        recorder.free(source, 64 * MIB)
        recorder.alloc(24 * MIB)
    return recorder


def test_release_policy_acts_at_the_boundaries() -> None:
    history = layers().history()
    scenario = Scenario("max_split_size_mb:20,max_non_split_rounding_mb:1")
    boundaries = [Boundary(2, 4, 0, moe=True), Boundary(4, 7, 1, moe=False)]
    ends = {
        name: replay(history, scenario._replace(release=Release.parse(name)), boundaries).layers
        for name in ("off", "moe-layer", "layer", "threshold:100MiB")
    }
    reserved = {name: [window.reserved_bytes // MIB for window in found[1:3]] for name, found in ends.items()}
    assert reserved == {
        "off": [128, 152],
        "moe-layer": [64, 88],
        "layer": [64, 24],
        "threshold:100MiB": [128, 24],
    }


def test_release_of_the_recorded_policy_is_not_the_programs() -> None:
    """What loadpeak released while it recorded is not there when another policy is asked."""
    recorder = Recorder()
    at = recorder.alloc(64 * MIB)
    recorder.free(at, 64 * MIB)
    recorder.add("segment_free", 64 * MIB, at)
    recorder.free(recorder.alloc(MIB), MIB)
    history = recorder.history()
    released = [Boundary(0, 3, 0, moe=True, released=True)]
    off, again = (
        replay(history, Scenario("", Release(name)), released).end_reserved_bytes
        for name in ("off", "moe-layer")
    )
    assert (off, again) == (66 * MIB, 2 * MIB)


def test_replay_stops_where_no_memory_is_left() -> None:
    recorder = Recorder()
    for _ in range(3):
        recorder.alloc(64 * MIB)
    run = Replay(
        recorder.history(), Scenario(EXPANDABLE, capacity_bytes=150 * MIB), [Boundary(0, 3, 5, True)]
    )
    assert not run.run()
    outcome = run.outcome()
    assert (outcome.failed_bytes, outcome.failed_layer, outcome.complete) == (64 * MIB, 5, False)
    assert [window.layer for window in outcome.layers] == [None, 5], "the layer that was under way"

"""Set up the recording of one worker: folder, journal, sampler, session and extensions."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loadpeak import __version__, memory_history, parts, run_folder, torch_allocator, weight_hashes
from loadpeak.journal import Journal
from loadpeak.record import FORMAT, Exit, Failure, Header, HookError, Line, RankStart, Ready
from loadpeak.sampler.process import SamplerProcess
from loadpeak.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

    from loadpeak.guard import Guard
    from loadpeak.record import Phase
    from loadpeak.settings import Settings
    from loadpeak.vllm_worker import Worker

T = TypeVar("T")

logger = logging.getLogger("loadpeak")


class Recording:
    """The recording of one worker's startup.

    Attributes:
        worker: the vLLM worker.
        settings: the settings of this process.
        guard: counts and swallows our own failures.
        session: the recorder.
        folder: the run's folder, or nothing when it cannot be written; fixes then work unrecorded.
    """

    def __init__(self, worker: Worker, settings: Settings, guard: Guard) -> None:
        self.worker, self.settings, self.guard = worker, settings, guard
        guard.on_error = self._record_hook_error
        self.folder: Path | None = None
        self._journal: Journal | None = None
        self._sampler: SamplerProcess | None = None
        self._lost_said = False
        self._unsaid: Ready | Failure | None = None
        allocator = torch_allocator.TorchAllocator()
        try:
            self._open()
        except OSError as error:
            logger.warning(
                "nothing is recorded, the run store %s cannot be written (%s); "
                "set LOADPEAK_HOME to a folder that can",
                settings.home,
                error,
            )
        self.session = Session(
            allocator,
            self.write,
            self._tell_phase,
            is_out_of_memory=torch_allocator.is_out_of_memory,
            guard=guard,
        )
        self.session.at_end.append(self._stop_sampler)
        self.session.after_init_device.append(self._name_device)
        guard.call("memory_history", memory_history.attach, self, allocator)
        guard.call("weight_hashes", weight_hashes.attach, self)
        for extension in parts.find(parts.EXTENSIONS):
            guard.call(f"extension {extension.name}", self._attach, extension)
        multiprocessing.util.Finalize(None, self._exit, exitpriority=10)

    def _attach(self, extension: EntryPoint) -> None:
        extension.load()(self)

    def write(self, line: Line) -> None:
        """Append a line to the journal of this rank."""
        if self._journal is None:
            return
        lost = self._journal.lost
        self._journal.append(line)
        if self._journal.lost > lost and isinstance(line, Ready | Failure):
            self._unsaid = line
        if self._journal.lost and not self._lost_said:
            self._lost_said = True
            logger.warning("lines of the record are lost, %s cannot be written", self._journal.path)

    def _open(self) -> None:
        now, wall = time.monotonic(), time.time()
        rank = self.worker.rank
        folder = run_folder.join(self.settings.home, rank, self._header, self.settings.run_id, wall)
        self._journal = Journal(run_folder.journal_path(folder, rank))
        self.folder = folder
        self.write(
            RankStart(
                at_seconds=now,
                at_wall_seconds=wall,
                rank=rank,
                local_rank=self.worker.local_rank,
                pid=os.getpid(),
            )
        )
        self._sampler = self.guard.call(
            "sampler",
            SamplerProcess,
            run_folder.device_path(folder, rank),
            rank,
            self.settings.sample_interval_seconds,
        )

    def _header(self, run: str) -> Header:
        boot_id, pid_namespace = run_folder.whereabouts()
        return Header(
            format=FORMAT,
            run=run,
            created_at_wall_seconds=time.time(),
            hostname=platform.node(),
            loadpeak_version=__version__,
            variant=self.settings.variant,
            experiment=self.settings.experiment,
            torch_version=torch_allocator.torch_version(),
            alloc_conf=torch_allocator.environment_conf(),
            release=self.settings.cache_release,
            split_limit=self.settings.split_limit,
            boot_id=boot_id,
            pid_namespace=pid_namespace,
            **self.worker.facts,
        )

    def _tell_phase(self, phase: Phase) -> None:
        if self._sampler is not None:
            self._tell_sampler(self._sampler.phase, phase)

    def _name_device(self) -> None:
        if self._sampler is not None:
            self._tell_sampler(self._sampler.device, torch_allocator.TorchAllocator().device_uuid())

    def _tell_sampler(self, tell: Callable[[T], None], argument: T) -> None:
        try:
            tell(argument)
        except ChildProcessError as error:
            self._sampler = None
            self.guard.report("sampler", error)

    def _stop_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()

    def sampler_ended(self, seconds: float) -> bool:
        """Wait at most so long for the stopped sampler; true where none reads the device any more."""
        return self._sampler is None or self._sampler.ended(seconds)

    def _exit(self) -> None:
        """The interpreter closes: say what has not been said, or could not be while the disk was full."""
        if self.session.outcome == "loading":
            self.write(Exit(at_seconds=time.monotonic()))
        elif self._unsaid is not None:
            self.write(self._unsaid)

    def _record_hook_error(self, hook: str, error: BaseException, count: int) -> None:
        text = f"{type(error).__name__}: {error}"[:500]
        self.write(HookError(at_seconds=time.monotonic(), hook=hook, error=text, count=count))

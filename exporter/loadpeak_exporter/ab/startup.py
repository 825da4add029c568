"""One arm of one pair: start it, wait until it is ready, ask it, stop it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadpeak.errors import CommandError
from loadpeak_exporter import launch
from loadpeak_exporter.ab.completions import AnswerError, Client, address_of, says_server
from loadpeak_exporter.ab.interrupts import Interrupts
from loadpeak_exporter.ab.plan import arm_command, arm_environment
from loadpeak_exporter.ab.processes import Command
from loadpeak_exporter.ab.records import Arm, Experiment, Output, Startup
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunStore

POLL_SECONDS = 0.2
FAILED_SECONDS = 60.0
"""An engine whose startup has failed may take so long to end by itself."""
_ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LOG_TAIL_BYTES = 256 << 10

_output_lines = msgspec.json.Decoder(Output)


class Limits(NamedTuple):
    """How long we wait, in seconds."""

    ready_seconds: float
    """For an engine to be ready."""
    answer_seconds: float
    """For one answer, and for a script to end once its engine is ready."""


class NotReadyError(Exception):
    """A startup did not come to its outputs; the text is one line."""


Watch = Callable[[str, Callable[[], RunRecord | None]], None]
"""Told at each look what is going on, and how to read the run."""


class Attempt:
    """A startup under way."""

    def __init__(
        self,
        experiment: Experiment,
        arm: Arm,
        pair: int,
        *,
        environ: dict[str, str],
        home: Path,
        log: Path,
        limits: Limits,
    ) -> None:
        """Prepare it; nothing runs yet.

        Raises:
            CommandError: the arm's program is missing, or its port is in use by somebody else.
            SettingError: a setting cannot be used.
        """
        self._experiment, self._arm, self._pair, self._log, self._limits = experiment, arm, pair, log, limits
        self._outputs = log.with_suffix(".outputs.jsonl")
        self._command = arm_command(arm, experiment.command)
        self._environ = arm_environment(
            arm, environ, LOADPEAK_EXPERIMENT=experiment.experiment, LOADPEAK_OUTPUTS=str(self._outputs)
        )
        self._run = self._environ["LOADPEAK_RUN_ID"]
        self._reader = RunStore(home).reader(self._run)
        self._address = address_of(self._command, self._environ)
        self._client = Client(self._address, limits.answer_seconds)
        taken = self._address.taken()
        if taken and says_server(self._command):
            raise CommandError(
                f"something listens on {self._address.host}:{self._address.port} already; "
                "stop it, or give the command another --port"
            )
        self._may_serve = not taken

    def read(self) -> RunRecord | None:
        """The run so far; nothing before it is recorded."""
        record = self._reader.read()
        return record if isinstance(record, RunRecord) else None

    def run(self, watch: Watch, interrupts: Interrupts) -> Startup:
        """From the start of the command until it and all its processes are gone.

        Raises:
            CommandError: the command cannot be run at all.
            KeyboardInterrupt: somebody wants to stop before it is over; the command is gone all the same.
        """
        self._outputs.unlink(missing_ok=True)
        began_wall, began = time.time(), time.monotonic()
        command = Command(self._command, self._environ, self._log)
        outputs, error = None, None
        try:
            with interrupts.raised():
                outputs = self._wait(command, began, watch)
        except (NotReadyError, AnswerError) as problem:
            error = str(problem)
        finally:
            exit_code = command.stop(lambda: interrupts.hurried)
        record = self.read()
        ready = [rank.ready_at_seconds for rank in record.ranks] if record else []
        return Startup(
            pair=self._pair,
            arm=self._arm.name,
            began_at_wall_seconds=began_wall,
            ended_at_wall_seconds=time.time(),
            run=record.run if record else None,
            ready_after_seconds=(
                round(max(at for at in ready if at is not None) - began, 3)
                if ready and None not in ready
                else None
            ),
            exit_code=exit_code,
            error=error,
            outputs=outputs,
        )

    def _wait(self, command: Command, began: float, watch: Watch) -> tuple[Output, ...] | None:
        """Until a server has answered all prompts, or a script has ended.

        Raises:
            NotReadyError: it did neither.
            AnswerError: a prompt got no answer.
        """
        failed_at: float | None = None
        ready_at: float | None = None
        while True:
            record, now = self.read(), time.monotonic()
            watch("starting", self.read)
            if command.exit_code is not None:
                return self._ended(command.exit_code)
            if self._may_serve and self._client.healthy():
                return self._serve(watch)
            outcome = record.outcome if record else "loading"
            if outcome == "ready":
                ready_at = ready_at or now
                if now - ready_at > self._limits.answer_seconds:
                    raise NotReadyError(
                        f"it was ready, but neither answered on port {self._address.port} nor ended "
                        f"within {self._limits.answer_seconds:.0f} s"
                    )
            elif outcome != "loading":
                failed_at = failed_at or now
                if now - failed_at > FAILED_SECONDS:
                    raise NotReadyError(self._failure() or f"it {outcome} and did not end")
            elif now - began > self._limits.ready_seconds:
                why = "its output is in " + self._log.name
                if record is None:
                    why = launch.nothing_recorded(self._command[0], self._environ)
                raise NotReadyError(f"it was not ready within {self._limits.ready_seconds:.0f} s; {why}")
            time.sleep(POLL_SECONDS)

    def _serve(self, watch: Watch) -> tuple[Output, ...]:
        """Ask a server that is up."""
        record = self.read()
        if record is None:
            raise NotReadyError(launch.nothing_recorded(self._command[0], self._environ))
        if not self._experiment.prompts:
            raise NotReadyError("it serves, and there are no prompts for it; give --prompts FILE")
        watch("answering", self.read)
        outputs = self._client.outputs(self._experiment.prompts, self._experiment.max_tokens)
        watch("stopping", self.read)
        return outputs

    def _ended(self, exit_code: int) -> tuple[Output, ...] | None:
        """The outputs of a script that has ended.

        Raises:
            NotReadyError: it failed, or was no script of vLLM.
        """
        record = self.read()
        failure = self._failure()
        if failure is None and (exit_code or record is None or record.outcome != "ready"):
            failure = f"it ended with exit code {exit_code}" + self._last_error()
            if not exit_code and record is None:
                failure = launch.nothing_recorded(self._command[0], self._environ)
        if failure is not None:
            raise NotReadyError(failure)
        try:
            lines = self._outputs.read_bytes().splitlines()
            return tuple(_output_lines.decode(line) for line in lines)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise NotReadyError(f"{self._outputs.name} cannot be read: {error}") from error

    def _failure(self) -> str | None:
        """What the record says about a failed startup."""
        record = self.read()
        for rank in record.ranks if record else ():
            if rank.failure is not None:
                phase = f" in {rank.failure.phase}" if rank.failure.phase else ""
                return f"{rank.failure.outcome}{phase}: {rank.failure.reason}"
        return None

    def _last_error(self) -> str:
        """The last line of its output that names an error."""
        with self._log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        found = [line.strip() for line in lines if _ERROR_LINE.search(line)]
        if not found:
            return f"; its output is in {self._log.name}"
        return ": " + "".join(filter(str.isprintable, _COLOUR.sub("", found[-1])))[:300]

"""What an experiment runs: its arms, its prompts, its order; read from the options of ``loadpeak ab``."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from loadpeak.errors import CommandError
from loadpeak_exporter import launch
from loadpeak_exporter.ab.records import Arm, Experiment, Prompt

BASELINE = "baseline"
DEFAULT_ARMS = (Arm(name=BASELINE), Arm(name="fix", release="moe-layer"))
ARM_HELP = (
    "NAME:SETTING with release=POLICY, split-limit=keep, alloc-conf=CONF, flag=FLAG or environment=FOLDER"
)

DEFAULT_PROMPTS = tuple(
    Prompt(text=text)
    for text in (
        "The capital of France is",
        "Water boils at a temperature of",
        "def fibonacci(n):",
        "Once upon a time, in a small village by the sea,",
        "List the planets of the solar system in order:",
        "Translate into German: The library opens at nine.",
    )
)
DEFAULT_TOKEN_PROMPTS = tuple(
    Prompt(token_ids=tuple(range(start, start + 8))) for start in (10, 30, 50, 70, 90, 110)
)
"""For an engine without a tokenizer; small numbers are in every vocabulary."""
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


def parse_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    """The arms of ``--arm`` options, the baseline first.

    An option is ``NAME:SETTING``, or several settings separated as in a shell; options of one name add up.

    Raises:
        CommandError: one cannot be read.
        SettingError: a setting has a value that cannot be used.
    """
    if not texts:
        return DEFAULT_ARMS
    arms: dict[str, Arm] = {}
    for text in texts:
        name, _, settings = text.partition(":")
        if not name or any(c in "/\\ \t\n" for c in name) or name.startswith("."):
            raise CommandError(f"--arm {text!r} cannot be used: expected {ARM_HELP}")
        arm = arms.get(name, Arm(name=name))
        try:
            words = shlex.split(settings)
            for word in words:
                arm = _with(arm, word, text)
        except ValueError as error:
            raise CommandError(f"--arm {text!r} cannot be read: {error}") from error
        if not words and name != BASELINE:
            raise CommandError(f"--arm {text!r} changes nothing: expected {ARM_HELP}")
        arms[name] = arm
    baseline = arms.pop(BASELINE, Arm(name=BASELINE))
    if not arms:
        raise CommandError("an experiment needs an arm beside the baseline: --arm " + ARM_HELP)
    for arm in (baseline, *arms.values()):
        arm_environment(arm, os.environ)
    return baseline, *arms.values()


def _with(arm: Arm, setting: str, option: str) -> Arm:
    """The arm with one more setting.

    Raises:
        CommandError: there is no such setting, or its value cannot be used.
        ValueError: a quotation in it does not end.
    """
    key, equals, value = setting.partition("=")
    change = _CHANGES.get(key)
    if change is None or not equals:
        raise CommandError(f"--arm {option!r}: {setting!r} cannot be used: expected {ARM_HELP}")
    return change(arm, value)


def _with_folder(arm: Arm, value: str) -> Arm:
    try:
        folder = Path(value).expanduser().absolute()
    except RuntimeError as error:
        raise CommandError(f"environment={value}: {error}; name a Python environment") from error
    if not value or not (folder / "bin").is_dir():
        raise CommandError(
            f"environment={value}: there is no folder {folder / 'bin'}; name a Python environment"
        )
    return msgspec.structs.replace(arm, environment=str(folder))


_CHANGES: dict[str, Callable[[Arm, str], Arm]] = {
    "release": lambda arm, value: msgspec.structs.replace(arm, release=value),
    "split-limit": lambda arm, value: msgspec.structs.replace(arm, split_limit=value),
    "alloc-conf": lambda arm, value: msgspec.structs.replace(arm, alloc_conf=value),
    "flag": lambda arm, value: msgspec.structs.replace(
        arm, arguments=arm.arguments + tuple(shlex.split(value))
    ),
    "environment": _with_folder,
}


def arm_environment(arm: Arm, base: Mapping[str, str], **more: str) -> dict[str, str]:
    """The environment of an arm's command, with a new run id.

    Raises:
        SettingError: a setting of the arm has a value that cannot be used.
    """
    environ = dict(base)
    environ.pop("LOADPEAK_RUN_ID", None)  # one name cannot be that of several startups
    if arm.alloc_conf is not None:
        # PyTorch prefers the newer name, so neither may be left over.
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            environ.pop(name, None)
        environ |= {"PYTORCH_CUDA_ALLOC_CONF": arm.alloc_conf} if arm.alloc_conf else {}
    if arm.environment is not None:
        environ["VIRTUAL_ENV"] = arm.environment
        environ["PATH"] = f"{arm.environment}/bin{os.pathsep}{environ.get('PATH', os.defpath)}"
    return launch.environment(
        environ,
        LOADPEAK_VARIANT=arm.name,
        LOADPEAK_CACHE_RELEASE=arm.release,
        LOADPEAK_SPLIT_LIMIT=arm.split_limit,
        LOADPEAK_EVIDENCE="on",
        **more,
    )


def arm_command(arm: Arm, command: Sequence[str]) -> list[str]:
    """What an arm starts: its environment's program of that name, where it has an environment.

    Raises:
        CommandError: the arm's environment has no such program.
    """
    program = command[0]
    if arm.environment is not None:
        program = f"{arm.environment}/bin/{Path(program).name}"
        if shutil.which(program) is None:
            raise CommandError(
                f"arm {arm.name}: {program} cannot be run; is vLLM installed in that environment?"
            )
    return [program, *command[1:], *arm.arguments]


def order(experiment: Experiment) -> Iterator[tuple[int, Arm]]:
    """Pair and arm of every startup: the first round forwards, the second backwards, and so on."""
    for pair in range(experiment.pairs):
        for arm in experiment.arms if pair % 2 == 0 else reversed(experiment.arms):
            yield pair, arm


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file: one a line; in a ``.jsonl`` file strings or lists of token ids.

    Raises:
        CommandError: the file cannot be read, holds no prompt, or an empty one.
    """
    try:
        # Only line feeds end a line: other separators of Unicode may stand in a prompt.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise CommandError(f"the prompts {path} cannot be read: {error}") from error
    json = path.suffix.lower() == ".jsonl"
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _json_prompt(path, number, line) if json else Prompt(text=line)
        if not (prompt.text or prompt.token_ids):
            raise CommandError(f"{path} line {number} is an empty prompt; take it out")
        prompts.append(prompt)
    if not prompts:
        raise CommandError(f"{path} holds no prompt: expected one a line")
    return tuple(prompts)


def _json_prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        value = msgspec.json.decode(line, type=str | tuple[_TokenId, ...])
    except msgspec.DecodeError as error:
        raise CommandError(
            f"{path} line {number} is no prompt: expected a JSON string or a list of token ids ({error})"
        ) from error
    return Prompt(text=value) if isinstance(value, str) else Prompt(token_ids=value)


def default_prompts(command: Sequence[str]) -> tuple[Prompt, ...]:
    """Texts, or token ids for an engine that is started without a tokenizer."""
    return DEFAULT_TOKEN_PROMPTS if "--skip-tokenizer-init" in command else DEFAULT_PROMPTS


def same_plan(one: Experiment, other: Experiment) -> str | None:
    """The first field in which two plans differ, with both values; nothing where they are the same."""
    for name in ("hostname", "command", "arms", "pairs", "prompts", "max_tokens"):
        before, after = getattr(one, name), getattr(other, name)
        if before != after:
            return f"its {name} {_short(before)} would become {_short(after)}"
    return None


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else text[:200] + "…"

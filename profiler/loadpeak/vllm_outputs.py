"""Write down what a script generates through ``vllm.LLM`` (``LOADPEAK_OUTPUTS``), behind its back.

Where it asks for no log-probabilities, those of the selected tokens are asked for on copies of its sampling
parameters, and taken out of what it gets.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from loadpeak.vllm_adapter import when_imported

if TYPE_CHECKING:
    from loadpeak.guard import Guard

METHODS = ("generate", "chat", "wait_for_completion")
"""Methods of ``vllm.LLM`` that return finished requests; one that a version lacks is passed over."""


class Generated(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generated sequence; ``prompt`` counts them in the order in which the script got them."""

    prompt: int
    token_ids: list[int]
    stop_reason: str | None = None
    logprobs: list[float | None] | None = None
    """Of the selected tokens; missing where one is not finite."""


def record_outputs(path: Path, guard: Guard) -> None:
    """Append to a file what every ``vllm.LLM`` of this process generates."""
    writer = _Writer(path)

    def patch(module: ModuleType) -> None:
        for name in METHODS:
            original = getattr(module.LLM, name, None)
            if original is not None and not hasattr(original, "__loadpeak__"):
                setattr(module.LLM, name, _recorded(original, writer, guard))

    when_imported("vllm.entrypoints.llm", lambda module: guard.call("outputs", patch, module))


class _Writer:
    """Appends sequences; knows whether a call is inside another recorded one."""

    def __init__(self, path: Path) -> None:
        self._path, self._count = path, 0
        self.busy = False

    def write(self, results: Iterable[Any]) -> None:
        lines = []
        for result in results:
            for sequence in getattr(result, "outputs", ()):
                if hasattr(sequence, "token_ids"):
                    lines.append(msgspec.json.encode(_generated(self._count, sequence)) + b"\n")
                    self._count += 1
        with self._path.open("ab") as file:
            file.write(b"".join(lines))


def _recorded(original: Callable[..., Any], writer: _Writer, guard: Guard) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def recorded(llm: Any, *args: Any, **kwargs: Any) -> Any:
        if writer.busy:
            return original(llm, *args, **kwargs)
        asked = guard.call("outputs", _ask, signature, llm, args, kwargs) or (args, kwargs, None)
        writer.busy = True
        try:
            results = original(llm, *asked[0], **asked[1])
        finally:
            writer.busy = False
        guard.call("outputs", writer.write, results)
        if asked[2] is not None:
            guard.call("outputs", _hide, results, asked[2])
        return results

    recorded.__loadpeak__ = True  # type: ignore[attr-defined]
    return recorded


def _ask(
    signature: inspect.Signature, llm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool | list[bool]] | None:
    """The arguments with log-probabilities asked for, and for which requests that was our doing.

    Nothing where the call takes no sampling parameters, or others than we know.
    """
    if "sampling_params" not in signature.parameters:
        return None
    bound = signature.bind(llm, *args, **kwargs)
    given = bound.arguments.get("sampling_params")
    if given is None:
        given = llm.get_default_sampling_params()
    several = isinstance(given, (list, tuple))
    known = list(given) if several else [given]
    if any(type(params).__name__ != "SamplingParams" for params in known):
        return None
    ours = [params.logprobs is None for params in known]
    changed = [_with_logprobs(params) if mine else params for params, mine in zip(known, ours, strict=True)]
    bound.arguments["sampling_params"] = changed if several else changed[0]
    return bound.args[1:], bound.kwargs, ours if several else ours[0]


def _with_logprobs(params: Any) -> Any:
    """A copy that asks for the selected token's log-probability and no other."""
    copy = params.clone()
    copy.logprobs = 0
    return copy


def _hide(results: Any, ours: bool | list[bool]) -> None:
    """Take the log-probabilities that only we asked for out of the results."""
    for number, result in enumerate(results):
        if ours[number] if isinstance(ours, list) else ours:
            for sequence in result.outputs:
                sequence.logprobs = None
                sequence.cumulative_logprob = None


def _generated(number: int, sequence: Any) -> Generated:
    token_ids = [int(token) for token in sequence.token_ids]
    logprobs: list[float | None] | None = None
    if sequence.logprobs is not None:
        logprobs = [
            _finite(choices[token].logprob)
            for token, choices in zip(token_ids, sequence.logprobs, strict=True)
        ]
    return Generated(
        prompt=number,
        token_ids=token_ids,
        stop_reason=stop_reason(sequence.finish_reason, sequence.stop_reason),
        logprobs=logprobs,
    )


def stop_reason(finish_reason: Any, detail: Any) -> str | None:
    """Why a sequence ended, in one word, with the stop token or text where vLLM tells it."""
    if finish_reason is None:
        return None
    return str(finish_reason) if detail is None else f"{finish_reason}:{detail}"


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None

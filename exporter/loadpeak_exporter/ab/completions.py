"""Ask a server that speaks the OpenAI API: is it up, and what does it generate, greedily."""

from __future__ import annotations

import http.client
import json
import math
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from loadpeak.vllm_outputs import stop_reason
from loadpeak_exporter.ab.records import Output, Prompt

HEALTH_SECONDS = 5.0
CLAMPED_LOGPROB = -9999.0
"""What vLLM's server answers in place of minus infinity."""


_SILENCE = (OSError, UnicodeError, http.client.HTTPException)
"""How asking fails where there is no server, or what listens speaks no HTTP."""


class AnswerError(Exception):
    """A server did not answer as expected; the text is one line."""


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: tuple[float | None, ...]


class _Choice(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _Answer(msgspec.Struct, frozen=True):
    """What is read of a completion."""

    choices: Annotated[tuple[_Choice, ...], msgspec.Meta(min_length=1)]


class Address(NamedTuple):
    """Where a server is to listen, by its command's own arguments."""

    host: str
    port: int
    key: str | None = None
    """What it asks its clients for."""

    @property
    def url(self) -> str:
        """Its root."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def taken(self) -> bool:
        """Whether anything listens there now."""
        try:
            socket.create_connection((self.host, self.port), timeout=2).close()
        except (OSError, UnicodeError):  # a host's name may be no name at all
            return False
        return True


def address_of(command: Sequence[str], environ: Mapping[str, str]) -> Address:
    """The address in a command: ``--host``, ``--port`` and ``--api-key``, as ``vllm serve`` reads them."""
    host = _option(command, "--host") or "127.0.0.1"
    port = _option(command, "--port") or ""
    return Address(
        {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host),
        int(port) if port.isdecimal() else 8000,
        _option(command, "--api-key") or environ.get("VLLM_API_KEY") or None,
    )


def says_server(command: Sequence[str]) -> bool:
    """Whether a command looks like a server, before it has answered."""
    return "serve" in command or "--port" in command or any("api_server" in part for part in command)


def _option(command: Sequence[str], name: str) -> str | None:
    """The last value of an option; missing where it is not given."""
    value = None
    for place, part in enumerate(command):
        if part == name and place + 1 < len(command):
            value = command[place + 1]
        elif part.startswith(name + "="):
            value = part.partition("=")[2]
    return value


class Client:
    """Talks to one server, without any proxy."""

    def __init__(self, address: Address, timeout_seconds: float) -> None:
        """Wait at most so long for one answer."""
        self._address, self._timeout = address, timeout_seconds
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def healthy(self) -> bool:
        """Whether the server says that it can serve."""
        try:
            self._ask("/health", None, HEALTH_SECONDS)
        except (*_SILENCE, AnswerError):
            return False
        return True

    def outputs(self, prompts: Sequence[Prompt], max_tokens: int) -> tuple[Output, ...]:
        """What is generated for each prompt, one after another.

        Raises:
            AnswerError: a prompt was refused, or the server did not answer.
        """
        models = self._json("/v1/models", None, "the list of models")
        try:
            model = models["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise AnswerError("the server names no model at /v1/models") from None
        return tuple(self._output(model, number, prompt, max_tokens) for number, prompt in enumerate(prompts))

    def _output(self, model: str, number: int, prompt: Prompt, max_tokens: int) -> Output:
        body = {
            "model": model,
            "prompt": prompt.text if prompt.token_ids is None else list(prompt.token_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 1,
            "return_token_ids": True,
            # Keeps the server from needing a tokenizer for its answer.
            "return_tokens_as_token_ids": True,
        }
        answer = self._json("/v1/completions", body, f"prompt {number}")
        try:
            choice = msgspec.convert(answer, _Answer).choices[0]
        except msgspec.ValidationError as error:
            raise AnswerError(
                f"prompt {number}: {error}; expected the answer of a vLLM server that returns token ids"
            ) from error
        return Output(
            prompt=number,
            token_ids=choice.token_ids,
            stop_reason=stop_reason(choice.finish_reason, choice.stop_reason),
            logprobs=None if choice.logprobs is None else _finite(choice.logprobs.token_logprobs),
        )

    def _json(self, path: str, body: dict[str, Any] | None, what: str) -> Any:
        try:
            return json.loads(self._ask(path, body, self._timeout))
        except AnswerError as error:
            raise AnswerError(f"{what}: {error}") from error
        except (*_SILENCE, ValueError, RecursionError) as error:
            reason = getattr(error, "reason", None) or error
            raise AnswerError(f"{what}: no answer that can be read ({reason})") from error

    def _ask(self, path: str, body: dict[str, Any] | None, seconds: float) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._address.key:
            headers["Authorization"] = f"Bearer {self._address.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address.url + path, data, headers)
        try:
            with self._opener.open(request, timeout=seconds) as response:
                answer: bytes = response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise AnswerError(f"status {error.code}: {_message(error.read())}") from None
        return answer


def _message(body: bytes) -> str:
    """The text of an error answer in one line."""
    try:
        error = json.loads(body)
        text = str(error.get("error", error).get("message", error))
    except (ValueError, AttributeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:300]


def _finite(logprobs: tuple[float | None, ...]) -> tuple[float | None, ...]:
    return tuple(
        value if value is not None and math.isfinite(value) and value > CLAMPED_LOGPROB else None
        for value in logprobs
    )

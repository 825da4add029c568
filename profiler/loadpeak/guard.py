"""Keep our failures out of the engine: each is logged once, counted and swallowed."""

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("loadpeak")


class Guard:
    """Runs our own code inside somebody else's process.

    Args:
        on_error: told the hook, the error and the number of errors so far; may fail itself.
    """

    def __init__(self, on_error: Callable[[str, BaseException, int], None] = lambda *_: None) -> None:
        self.errors = 0
        self.on_error = on_error
        self._said: set[str] = set()

    def call(self, hook: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The function's result, or nothing if it raised."""
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must not see it
            self.report(hook, error)
            return None

    def report(self, hook: str, error: BaseException) -> None:
        """Count an error and log it if this hook had none before."""
        self.errors += 1
        if hook not in self._said:
            self._said.add(hook)
            logger.warning(
                "the hook %s failed (%s: %s); the engine goes on without it",
                hook,
                type(error).__name__,
                error,
            )
        try:
            self.on_error(hook, error, self.errors)
        except Exception:
            logger.debug("a hook error could not be recorded", exc_info=True)

"""A vLLM source tree: find its MoE loaders, make the diff, write it all or nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import libcst as cst

from loadpeak.errors import CommandError
from loadpeak_patches.source.rewrite import Finding, rewrite

WHERE = "model_executor/layers"


class PatchedFile(NamedTuple):
    """One file with MoE loaders in it; ``path`` is relative to the folder that holds ``vllm``."""

    path: Path
    before: str
    after: str
    findings: list[Finding]

    def diff(self) -> str:
        """A unified diff that ``git apply`` takes; empty where nothing changes."""
        name = self.path.as_posix()
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            f"a/{name}",
            f"b/{name}",
        )
        return "".join(lines)


def root_of(path: Path) -> Path:
    """The folder that holds the package ``vllm``: a checkout, site-packages, or the package's own parent.

    Raises:
        CommandError: there is no vLLM there.
    """
    for candidate in (path, path.parent):
        if (candidate / "vllm" / WHERE).is_dir():
            return candidate
    raise CommandError(
        f"no vLLM in {path}: expected a checkout or a folder with vllm/{WHERE}; "
        "`python -c 'import vllm; print(vllm.__path__[0])'` tells where an installed one is"
    )


def patched_files(path: Path) -> Iterator[PatchedFile]:
    """Every file of a vLLM tree that has MoE loaders which drop their sources.

    Raises:
        CommandError: there is no vLLM there, or a file of it is no Python.
    """
    root = root_of(path)
    for file in sorted((root / "vllm" / WHERE).rglob("*.py")):
        before = file.read_text()
        if "process_weights_after_loading" not in before:
            continue
        try:
            after, findings = rewrite(before)
        except cst.ParserSyntaxError as error:
            raise CommandError(
                f"{file}: cannot be parsed: {error.message} (line {error.raw_line})"
            ) from error
        if findings:
            yield PatchedFile(file.relative_to(root), before, after, findings)


def write(path: Path, files: list[PatchedFile]) -> None:
    """Write the changed files: all of them or, if one cannot be written, none.

    Raises:
        CommandError: a file cannot be written; those written before have their old text again.
    """
    root = root_of(path)
    done: list[PatchedFile] = []
    for file in files:
        try:
            (root / file.path).write_text(file.after)
        except OSError as error:
            for earlier in done:
                (root / earlier.path).write_text(earlier.before)
            raise CommandError(
                f"{root / file.path} cannot be written: {error.strerror}; nothing was changed"
            ) from error
        done.append(file)

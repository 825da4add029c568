"""A vLLM source tree: find its MoE loaders, make the diff, write it all or nothing."""

from __future__ import annotations

import contextlib
import difflib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import libcst as cst

from loadpeak.errors import CommandError
from loadpeak_patches.source.loaders import METHOD
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
        # Only line feeds end a line for git; form feeds and separators of Unicode stand in sources.
        before, after = (io.StringIO(text, newline="\n").readlines() for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )


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
        CommandError: there is no vLLM there, or a file of it cannot be read or is no Python.
    """
    root = root_of(path)
    for file in sorted((root / "vllm" / WHERE).rglob("*.py")):
        try:
            before = file.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"{file}: cannot be read: {error}") from error
        if METHOD not in before:
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

    All texts are on the disk, beside their files, before the first file gets its own.

    Raises:
        CommandError: a file cannot be written; nothing was changed.
    """
    root = root_of(path)
    with contextlib.ExitStack() as undone:
        staged: list[tuple[Path, Path]] = []
        for file in files:
            target = (root / file.path).resolve()
            new = target.with_name(f".{target.name}.loadpeak")
            undone.callback(new.unlink, missing_ok=True)
            try:
                new.write_bytes(file.after.encode())
                shutil.copymode(target, new)
            except OSError as error:
                raise CommandError(
                    f"{root / file.path} cannot be written: {error.strerror}; nothing was changed"
                ) from error
            staged.append((new, target))
        for new, target in staged:
            new.replace(target)

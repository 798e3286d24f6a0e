"""The files of a training run: which are found below the given paths, which are read, and why others are left out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from onepass.train.commands import files
from onepass.train.commands.errors import UserError, reason

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass
class Source:
    """One file: the name that decides its part, its bytes, and a digest that shows changes."""

    name: str
    content: bytes
    digest: str
    validation: bool = False


class LeftOut(NamedTuple):
    """A file below a given directory that is not read."""

    name: str
    why: str


def standard_library() -> Path:
    """Return the directory of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def why_no_text(content: bytes) -> str | None:
    """Return why these bytes are not text, or None if they are.

    Text of any encoding has no NUL byte, UTF-16 and UTF-32 aside; a model of bytes needs to know no more. An empty file
    or white space alone teaches nothing.
    """
    if not content.strip():
        return "it is empty" if not content else "it is only white space"
    nul = content.find(b"\0")
    return None if nul < 0 else f"it is binary: byte {nul} is NUL"


def read_text(path: Path) -> bytes:
    """Read one file that the user named; raise UserError if it is not text."""
    content = files.read(path)
    if why := why_no_text(content):
        raise UserError(f"{path} is no text ({why}); give files of text")
    return content


def gather(paths: Sequence[str]) -> tuple[list[Source], list[LeftOut]]:
    """Read the files that are given or found; return them and what was left out of the directories."""
    left_out: list[LeftOut] = []
    candidates: list[tuple[str, Path, bool]] = []
    for argument in paths:
        root = Path(argument)
        if root.is_dir():
            candidates += _walk(root, left_out)
        else:
            candidates.append((root.name, root, True))
    if not paths:
        candidates += _walk(standard_library(), left_out, library=True)
    sources: list[Source] = []
    name_of: dict[str, str] = {}
    for name, path, is_argument in candidates:
        content = read_text(path) if is_argument else files.read(path)
        if not is_argument and (why := why_no_text(content)):
            left_out.append(LeftOut(name, why))
            continue
        digest = hashlib.sha256(content).hexdigest()
        # the same text under two names could land in both training and validation
        if digest in name_of:
            left_out.append(LeftOut(name, f"its text is that of {name_of[digest]}"))
            continue
        name_of[digest] = name
        sources.append(Source(name, content, digest))
    if not sources:
        where = ", ".join(paths) if paths else str(standard_library())
        why = f" ({left_out[0].name}: {left_out[0].why})" if left_out else ""
        raise UserError(f"there is no text in {where:.200}{why:.200}; give files or directories of text")
    return sources, left_out


def _walk(root: Path, left_out: list[LeftOut], *, library: bool = False) -> Iterator[tuple[str, Path, bool]]:
    """Yield name and path of the visible regular files below a directory, in the same order on every file system.

    Of a library these are its Python files without tests. A link could lead to any file of the machine, such as a key:
    who means a link out of the directory names it.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"can't read {error.filename}: {reason(error)}")

    inside, skipped = root.resolve(), SKIPPED if library else {"__pycache__"}
    for place, folders, names in os.walk(root, onerror=refuse):
        folder = Path(place)
        shown = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        folders[:] = [name for name in shown if not (folder / name).is_symlink()]
        for name in sorted({*names, *shown} - set(folders)):
            if name.startswith(".") or (library and not name.endswith(".py")):
                continue
            path = folder / name
            below = path.relative_to(root).as_posix()
            if path.is_symlink() and path.is_dir():
                left_out.append(LeftOut(below, "it is a link to a directory"))
            elif path.is_symlink() and path.exists() and not path.resolve().is_relative_to(inside):
                left_out.append(LeftOut(below, "it is a link out of the directory; give the link itself"))
            elif path.is_file():
                # regular files only: reading a pipe or a socket could wait for ever
                yield below, path, False

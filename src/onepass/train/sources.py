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
    found: list[tuple[str, Path, bool]] = []
    for given in paths:
        root = Path(given)
        if root.is_dir():
            found += [(name, path, False) for name, path in _walk(root, left_out)]
        else:
            found.append((root.name, root, True))
    if not paths:
        root = standard_library()
        found += [(path.relative_to(root).as_posix(), path, False) for path in python_sources(root)]
    sources: list[Source] = []
    seen: dict[str, str] = {}
    for name, path, named in found:
        content = read_text(path) if named else files.read(path)
        if not named and (why := why_no_text(content)):
            left_out.append(LeftOut(name, why))
            continue
        digest = hashlib.sha256(content).hexdigest()
        # the same text under two names could land in both training and validation
        if digest in seen:
            left_out.append(LeftOut(name, f"its text is that of {seen[digest]}"))
            continue
        seen[digest] = name
        sources.append(Source(name, content, digest))
    if not sources:
        where = ", ".join(paths) if paths else str(standard_library())
        why = f" ({left_out[0].name}: {left_out[0].why})" if left_out else ""
        raise UserError(f"there is no text in {where:.200}{why:.200}; give files or directories of text")
    return sources, left_out


def python_sources(root: Path) -> Iterator[Path]:
    """Yield the Python files of a library, without its tests."""
    for folder, names in _folders(root, SKIPPED):
        yield from (path for name in names if name.endswith(".py") and (path := folder / name).is_file())


def _walk(root: Path, left_out: list[LeftOut]) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the regular files below a directory, hidden ones aside.

    A link could lead to any file of the machine, such as a key: who means a link out of the directory names it.
    """
    inside = root.resolve()
    for folder, names in _folders(root, {"__pycache__"}):
        for name in names:
            path = folder / name
            shown = path.relative_to(root).as_posix()
            if path.is_symlink() and path.exists():
                if path.is_dir():
                    left_out.append(LeftOut(shown, "it is a link to a directory"))
                    continue
                if not path.resolve().is_relative_to(inside):
                    left_out.append(LeftOut(shown, "it is a link out of the directory; give the link itself"))
                    continue
            # regular files only: reading a pipe or a socket could wait for ever
            if path.is_file():
                yield shown, path


def _folders(root: Path, skipped: set[str]) -> Iterator[tuple[Path, list[str]]]:
    """Yield every directory with its visible files and links, in an order that does not depend on the file system."""

    def refuse(error: OSError) -> None:
        raise UserError(f"can't read {error.filename}: {reason(error)}")

    for folder, folders, names in os.walk(root, onerror=refuse):
        shown = [name for name in folders if name not in skipped and not name.startswith(".")]
        links = [name for name in shown if Path(folder, name).is_symlink()]
        folders[:] = sorted(set(shown) - set(links))
        yield Path(folder), sorted(name for name in (*names, *links) if not name.startswith("."))

"""Files that are whole or not there: every write survives a kill at any moment, also of the machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from onepass.core.errors import UserError

SUFFIX = ".partial"


def write(path: Path, content: bytes | str) -> None:
    """Put `content` at `path` so that a reader finds the old file or the new one, never a part of one.

    The bytes go to a neighbour first and are on the disk before the neighbour takes the name; then the directory's
    entry is brought to the disk too.
    """
    partial = path.with_name(path.name + SUFFIX)
    try:
        with open(partial, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(f"can't write {path}: {(error.strerror or str(error)).lower()}") from None


def sync_directory(path: Path) -> None:
    """Bring a directory's entries to the disk, where the system can (Windows can't open one)."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Files that are whole or not there: every write survives a kill at any moment, also of the machine.

No write goes through a symbolic link in the last place of a path, so that a link planted in a shared directory costs
its target nothing. Links to directories on the way are followed: they are the user's to set.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from pathlib import Path

from onepass.core.errors import UserError, reason

_PARTIAL = re.compile(r"(.+?)(\.[0-9a-f]{8})?\.partial", re.DOTALL)
# some file systems can't bring a directory to the disk, and say so
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP}


def write(path: Path, content: bytes | str) -> None:
    """Put `content` at `path` so that a reader finds the old file or the new one, never a part of one.

    The bytes go to a neighbour first and are on the disk before the neighbour takes the name; then the directory's
    entry is brought to the disk too. The neighbour is always a new file with a random name: two writers of one path
    never share it, and a link that waits at some name is never met. A link at `path` itself is replaced.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        file = open(partial, "xb")  # noqa: SIM115
        try:
            with file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise UserError(f"can't write {path}: {reason(error)}") from None


def partial_of(name: str) -> str | None:
    """Return the name that a file left by a killed `write` would have taken; None for any other file."""
    found = _PARTIAL.fullmatch(name)
    return found[1] if found else None


def open_regular(path: Path, flags: int) -> int:
    """Open a file by its descriptor; a link, a pipe or a device in its place is an OSError that says so."""
    try:
        # without O_NONBLOCK a pipe would keep us waiting for its other end
        special = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        handle = os.open(path, flags | special, 0o666)
    except OSError:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file")
    return handle


def extend(path: Path, content: bytes, length: int) -> None:
    """Add `content` to a file of `length` bytes and bring it to the disk; a file of another length is refused."""
    try:
        with os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            if (size := os.fstat(file.fileno()).st_size) != length:
                raise UserError(f"{path} has {size:,} bytes instead of {length:,}: something else wrote to it")
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"can't write {path}: {reason(error)}") from None


def cut(path: Path, length: int) -> None:
    """Cut a file to its first `length` bytes; an absent one becomes an empty one."""
    try:
        handle = open_regular(path, os.O_WRONLY | os.O_CREAT)
        try:
            os.ftruncate(handle, length)
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise UserError(f"can't write {path}: {reason(error)}") from None


def read(path: Path) -> bytes:
    """Read a whole file; a pipe or a device, which may never end, is refused."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is neither a file nor a directory")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"can't read {path}: {reason(error)}") from None
    except ValueError:
        # a NUL byte, or half of a surrogate pair
        raise UserError(f"can't read {path}: no file can have this name") from None


def sync_directory(path: Path) -> None:
    """Bring a directory's entries to the disk, where the system can (Windows can't open one)."""
    if os.name != "posix":
        return
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        # a directory that may be written and not read
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(handle)

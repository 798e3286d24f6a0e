"""Write files so that they survive a kill at any moment, of the process or of the machine.

No write follows a symbolic link in the last place of a path: a link planted in a shared directory can't harm its
target. Links to parent directories are followed, as the user set them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from pathlib import Path

from onepass.train.commands.errors import UserError, doing

_PARTIAL = re.compile(r"(.+?)(\.[0-9a-f]{8})?\.partial", re.DOTALL)
# errors from file systems that can't sync a directory
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP}


def write(path: Path, content: bytes | str) -> None:
    """Replace the file at `path` atomically: a reader finds the old content or the new, never a part.

    The bytes go to a new file beside it and are synced before that file is renamed; then the directory is synced. The
    new file's random name keeps two writers of one path apart and avoids links planted at a predictable name. A link
    at `path` itself is replaced.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    with doing(f"write {path}"):
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


def partial_of(name: str) -> str | None:
    """Return the final name of a file that a killed `write` left behind; None for any other file."""
    match = _PARTIAL.fullmatch(name)
    return match[1] if match else None


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file and return its descriptor; raise OSError for a link, a pipe or a device."""
    try:
        # without O_NONBLOCK, opening a pipe blocks until its other end opens
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
    """Append `content` to a file of `length` bytes and sync it; raise UserError for a file of another length."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with doing(f"write {path}"), os.fdopen(open_regular(path, flags), "ab") as file:
        if (size := os.fstat(file.fileno()).st_size) != length:
            raise UserError(f"{path} has {size:,} bytes instead of {length:,}: something else wrote to it")
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def cut(path: Path, length: int) -> None:
    """Truncate a file to `length` bytes and sync it; create an absent one."""
    with doing(f"write {path}"), os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT), "ab") as file:
        file.truncate(length)
        os.fsync(file.fileno())


def read(path: Path) -> bytes:
    """Read a whole file; raise UserError for a directory, and for a pipe or a device, which may never end."""
    try:
        with doing(f"read {path}"):
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory, not a file" if stat.S_ISDIR(mode) else "neither a file nor a directory"
                raise UserError(f"{path} is {kind}")
            return path.read_bytes()
    except ValueError:
        # the name holds a NUL byte or half of a surrogate pair
        raise UserError(f"can't read {path}: no file can have this name") from None


def sync_directory(path: Path) -> None:
    """Sync a directory's entries to the disk where the system can (Windows can't open a directory)."""
    if os.name != "posix":
        return
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        # the directory is writable but not readable
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(handle)

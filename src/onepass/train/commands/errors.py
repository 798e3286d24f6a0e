"""Errors that a command reports to its user."""

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """A one-line message for the command line: what was given, what is accepted. Exit code 2, no traceback."""


def reason(error: OSError) -> str:
    """Return the operating system's reason in a few words."""
    return (error.strerror or str(error)).lower()


@contextlib.contextmanager
def doing(action: str) -> Iterator[None]:
    """Turn an error of the operating system into a UserError: can't `action`, and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"can't {action}: {reason(error)}") from None


@contextlib.contextmanager
def enough_memory(message: str) -> Iterator[None]:
    """Turn the end of memory, which torch's allocators and NumPy say by errors of many kinds, into a UserError."""
    signs = "OutOfMemoryError", "MemoryError", "CPUAllocator", "bad_alloc", "could not create a memory object"
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not any(sign in f"{type(error).__name__}: {error}" for sign in signs):
            raise
        raise UserError(message) from None


def printable(text: str) -> str:
    r"""Escape what a terminal would interpret or hide, so that a name is visible in full on one line.

    Control characters, line feeds, changes of direction and undecodable bytes become Python's escapes: a file named
    "a", escape, "[2J" is shown as a\x1b[2J.
    """
    return "".join(c if c == " " or c.isprintable() else c.encode("unicode_escape").decode() for c in text)

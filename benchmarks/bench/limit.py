"""A time limit for rivals to get ready: some autotune for minutes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TookTooLongError(BaseException):
    """Interrupts the main thread. A BaseException, because compilers and autotuners catch Exceptions and go on."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLongError in the block after `seconds` (0: never); works with SIGALRM in the main thread only."""
    main = threading.current_thread() is threading.main_thread()
    if not seconds or not main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise TookTooLongError(f"took longer than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)

"""A limit on how long a rival may take to get ready: some tune themselves for minutes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TookTooLongError(BaseException):
    """Raised wherever the main thread is; no Exception, because compilers and autotuners catch those and go on."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLongError inside after `seconds` (0: never); no limit without SIGALRM or off the main thread."""
    main = threading.current_thread() is threading.main_thread()
    if not seconds or not main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise TookTooLongError(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

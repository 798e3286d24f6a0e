"""Ctrl-C while the command `onepass` loads torch: one line, as later; `onepass/__init__.py` imports this first."""

import os
import signal
import sys
from pathlib import Path

# a program that imports onepass gets its KeyboardInterrupt
_PROGRAM = Path(sys.argv[0] if sys.argv else "").stem
_COMMAND = _PROGRAM == "onepass" or (_PROGRAM == "-m" and "onepass" in sys.orig_argv)
_LOADS = _COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _end(*_: object) -> None:
    # no exception: C code that torch and NumPy run while they load loses it, or answers with another
    os.write(2, b"onepass: interrupted\n")
    os._exit(130)


def is_loaded() -> None:
    """Leave Ctrl-C to Python and `__main__` again."""
    if _LOADS:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if _LOADS:
    signal.signal(signal.SIGINT, _end)

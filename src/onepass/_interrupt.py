"""Ctrl-C and refused settings while the command `onepass` loads: one line; `onepass/__init__.py` imports this first."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

# a program that imports onepass gets its KeyboardInterrupt, and its ValueError
_PROGRAM = Path(sys.argv[0] if sys.argv else "").stem
_COMMAND = _PROGRAM == "onepass" or (_PROGRAM == "-m" and "onepass" in sys.orig_argv)
_LOADS = _COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _end(*_: object) -> None:
    # no exception: C code that torch and NumPy run while they load loses it, or answers with another
    os.write(2, b"onepass: interrupted\n")
    os._exit(130)


def _refuse(kind: Any, error: Any, trace: Any) -> None:
    # a switch is read, and its value refused, when its module is imported: before `__main__` can catch it
    if not (isinstance(error, ValueError) and str(error).startswith("ONEPASS_")):
        return sys.__excepthook__(kind, error, trace)
    os.write(2, f"onepass: {error}\n".encode("ascii", "backslashreplace"))
    os._exit(2)


def is_loaded() -> None:
    """Leave Ctrl-C and errors to Python and `__main__` again."""
    if sys.excepthook is _refuse:
        sys.excepthook = sys.__excepthook__
    if _LOADS:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if _COMMAND and sys.excepthook is sys.__excepthook__:
    sys.excepthook = _refuse
if _LOADS:
    signal.signal(signal.SIGINT, _end)

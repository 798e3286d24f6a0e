"""All cases of this folder in one start of processes."""

from __future__ import annotations

from interpreter import speed_up
from onepass.core.launch import INTERPRET
from sharded import modules, operators, optimizer  # noqa: F401
from sharded.compare import CASES
from sharded.processes import main

# kernels run in the interpreter there, which is slow
KERNELS = ("modules: each process has whole rows",)

if __name__ == "__main__":
    if INTERPRET:
        speed_up()
    main({name: run for name, run in CASES.items() if not INTERPRET or name in KERNELS})

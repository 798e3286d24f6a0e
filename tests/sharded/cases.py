"""All cases of this folder in one start of processes."""

from __future__ import annotations

from onepass.core.launch import INTERPRET
from sharded import balance, modules, operators, optimizer  # noqa: F401
from sharded.compare import CASES
from sharded.processes import main

if __name__ == "__main__":
    # kernels run there in the interpreter, which is slow
    main({name: run for name, run in CASES.items() if not INTERPRET or name == "modules: spread over the sequence"})

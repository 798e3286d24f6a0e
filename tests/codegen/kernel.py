"""A compilation of a Triton kernel with its budget, and what the files in budgets/ share."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """One compilation of a Triton kernel with its budget.

    Attributes:
        name: shown in the test id.
        fn: thunk that imports and returns the @triton.jit function (Triton stays lazy).
        signature: argument → Triton type ("*bf16", "i32", "fp32", …).
        constexprs: argument → value, None for a tensor that is not there; they come before the signature.
        divisible: arguments the launcher guarantees to be multiples of 16.
        num_warps, num_stages: launch options.
        maxnreg: the launch's limit of registers per thread on NVIDIA targets (0: no limit).
        max_registers: budget of registers per thread on NVIDIA targets.
        max_spill_bytes: budget of local memory for spills (0 for everything a launch table uses).
        vector_loads: 16-byte global loads must appear.
        max_amd_spills: budget of spilled vector registers on AMD (0 is the aim; more is what remains to improve).
        amd: False for a kernel that runs on NVIDIA GPUs only (another one does its work on AMD).
        least_arch: the oldest NVIDIA target that it compiles for (another compilation does its work on older ones).
    """

    name: str
    fn: Callable[[], Any]
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int = 0
    max_registers: int = 128
    max_spill_bytes: int = 0
    vector_loads: bool = True
    max_amd_spills: int = 0
    amd: bool = True
    least_arch: int = 80


_SIZES = ("s_row_stride", "gy_row_stride", "k_stride", "eps_stride", "mask_row_stride", "n_rows", "n_cols", "n_splits",
          "chunk", "tiles", "i_pass", "t", "n_iters", "n_changing")  # fmt: skip
_NUMBERS = ("k_value", "eps_value", "eps_first", "eps_last", "log2_decay", "eps_before", "eps")
DIVISIBLE = ("s_ptr", "y_ptr", "gy_ptr", "ds_ptr", "mask_ptr", "s_row_stride", "gy_row_stride", "mask_row_stride",
             "n_cols", "chunk")  # fmt: skip


def signature(names: str, dtype: str) -> dict[str, str]:
    """Return the Triton types of kernel arguments by their names."""
    types = dict.fromkeys(_SIZES, "i32") | dict.fromkeys(_NUMBERS, "fp32") | {"mask_ptr": "*u8", "mailbox_ptr": "*i64"}
    types |= dict.fromkeys(("s_ptr", "y_ptr", "gy_ptr", "ds_ptr"), f"*{dtype}")
    return {n: types.get(n, "*fp32") for n in names.split()}


def i32(*names: str) -> dict[str, str]:
    """Return the Triton types of integer arguments."""
    return dict.fromkeys(names, "i32")


def pointers(types: dict[str, str]) -> tuple[str, ...]:
    """Return the names of the arguments that are pointers: launches align them to 16 bytes."""
    return tuple(name for name, t in types.items() if t.startswith("*"))


def kernel(module: str, name: str) -> Callable[[], Any]:
    """Return a thunk that imports a kernel of `onepass.<module>`: Triton stays lazy."""
    return lambda: getattr(importlib.import_module(f"onepass.{module}"), name)


def ast_source(kernel: Kernel) -> Any:
    """Return the kernel with the signature, constants and divisible arguments that its spec names."""
    from triton.compiler import ASTSource

    fn = kernel.fn()
    constexprs = {(fn.arg_names.index(k),): v for k, v in kernel.constexprs.items()}
    types = {n: t for n, t in kernel.signature.items() if n not in kernel.constexprs}
    signature = {n: types.get(n, "constexpr") for n in fn.arg_names}
    missing = [n for n in fn.arg_names if n not in kernel.signature and n not in kernel.constexprs]
    assert not missing, f"the spec of {kernel.name} says nothing about {missing}"
    attrs = {(fn.arg_names.index(n),): [["tt.divisibility", 16]] for n in kernel.divisible if n in types}
    return ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=attrs)


def all_kernels() -> list[Kernel]:
    """Every kernel compilation with a budget."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "budgets")]))
    return [kernel for name in names for kernel in importlib.import_module(f"codegen.budgets.{name}").KERNELS]

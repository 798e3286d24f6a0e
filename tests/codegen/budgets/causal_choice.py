"""Budgets of the kernels of causal_choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codegen.kernel import Kernel
from onepass.core.launch import next_power_of_2, triton_installed

_TYPES = {
    **dict.fromkeys(("s_ptr", "threshold_ptr", "gate_ptr", "dgate_ptr", "sums_ptr", "ds_ptr", "eps"), "fp32"),
    **dict.fromkeys(("came_ptr", "real_ptr", "start_ptr"), "i32"),
    "index_ptr": "i64",
    "mask_ptr": "u8",
}


def _kernel(title: str, fn: Any, masked: bool, warps: int, registers: int, constants: dict[str, Any]) -> Kernel:
    constants = {"HAS_MASK": masked, **constants}
    absent = () if masked else ("mask_ptr", "real_ptr")
    constants |= {a: None for a in fn.arg_names if a in absent}
    pointers = [a for a in fn.arg_names if a.endswith("_ptr") and a not in constants]
    signature = {
        a: ("*" if a in pointers else "") + _TYPES.get(a, "i32") for a in fn.arg_names if a not in constants
    }  # fmt: skip
    # a block may begin at any offset, so there are no 16-byte loads
    return Kernel(
        title, lambda: fn, signature, constants, pointers, num_warps=warps, max_registers=registers, vector_loads=False
    )


def _kernels() -> Iterator[Kernel]:
    if not triton_installed():
        return
    from onepass.ops.causal_choice import kernels as kt

    for n, block, memory, masked in ((32768, 128, 2048, False), (65536, 8, 8192, True)):
        s = kt.shape(n, block, memory)
        title, tile = f"n={n} block={block}", {"BLOCK_B": s.block_b, "BLOCK_C": s.block_c}
        constants = {"BLOCK_M": s.block_m, "BLOCK_R": s.block_r, "BLOCK_C": s.block_c}
        yield _kernel(f"causal threshold {title}", kt.threshold_kernel, masked, s.warps, 80, constants)
        constants = {"N_FIRST": next_power_of_2(s.n_first), "STEP": s.step, **tile}
        yield _kernel(f"causal choose {title}", kt.choose_kernel, masked, 4, 80, constants)
        yield _kernel(f"causal sums {title}", kt.sums_kernel, masked, 4, 80, tile)
        yield _kernel(f"causal gradient {title}", kt.gradient_kernel, masked, 4, 96, {"STEP": s.step, **tile})


KERNELS = list(_kernels())

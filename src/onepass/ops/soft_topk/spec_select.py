"""What the selection kernels may cost: see spec.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from onepass.core.launch import triton_installed
from onepass.core.spec import Kernel

_INTS = (
    "s_row_stride", "mask_row_stride", "n_rows", "n_cols", "n_splits", "tiles", "k", "total",
)  # fmt: skip
_TYPES = {
    **dict.fromkeys(_INTS, "i32"),
    **dict.fromkeys(("s_ptr", "y_ptr", "value_ptr", "gate_ptr", "g_ptr"), "*fp32"),
    **dict.fromkeys(("packed_ptr", "out_ptr", "index_ptr"), "*i64"),
    **dict.fromkeys(("totals_ptr", "state_ptr", "ranks_ptr"), "*i32"),
}


def _kernel(
    title: str, name: str, constants: dict[str, Any], warps: int, registers: int, *, wide: bool = True, **types: str
) -> Kernel:
    from . import kernels_select

    arguments = getattr(kernels_select, name).arg_names
    signature = {a: t for a, t in {**_TYPES, **types}.items() if a in arguments}
    pointers = [a for a in signature if a.endswith("_ptr")]
    constants = {**({"mask_ptr": None, "UNIT": 16, "HAS_MASK": False} if "mask_ptr" in arguments else {}), **constants}

    def load() -> Callable[..., Any]:
        return getattr(kernels_select, name)  # type: ignore[no-any-return]

    return Kernel(
        title, load, signature, constants, pointers, num_warps=warps, max_registers=registers, vector_loads=wide
    )


def _kernels() -> Iterator[Kernel]:
    if not triton_installed():
        return
    from . import kernels_select as ks

    for dtype, cols in (("fp32", 64), ("fp32", 1024), ("fp32", 8192), ("fp32", 32768), ("bf16", 8192)):
        plan = ks.plan(1 << 16, cols, 132)
        scan = min(plan.block_c, ks.PER_SCAN * plan.warps, ks.TILE)
        blocks = {"PACKED": True, "BLOCK_R": plan.block_r, "BLOCK_C": plan.block_c, "BLOCK_T": scan}
        yield _kernel(f"topk select {dtype} {cols}", "select_kernel", blocks, plan.warps, 112, s_ptr=f"*{dtype}")
    for k in (64, 2048):
        block_r, block_k, warps = ks.sort_shape(64, k, 132)
        blocks = {"FETCH": True, "HARD": True, "BLOCK_R": block_r, "BLOCK_K": block_k}
        yield _kernel(f"topk sort {k}", "sort_kernel", blocks, warps, 80, wide=False)
    plan = ks.plan(8, 1 << 20, 132)
    digit = {"PASS": 3, "LAST": True, "BLOCK_C": plan.block_c}
    yield _kernel("topk count, long rows", "count_kernel", digit, plan.warps, 96)
    blocks = {"PACKED": True, "N_PASSES": 4, "N_SPLITS": 64, "BLOCK_C": plan.block_c}
    yield _kernel("topk collect, long rows", "collect_kernel", blocks, plan.warps, 128)


KERNELS = list(_kernels())

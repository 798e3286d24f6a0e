"""What the kernels of topk may cost: see spec.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onepass.core.launch import triton_installed
from onepass.core.spec import Kernel

_INTS = (
    "gate_row_stride", "gate_col_stride", "value_row_stride", "value_col_stride", "s_row_stride", "eps_stride",
    "mask_row_stride", "n_rows", "n_cols", "n_splits", "tiles", "k", "run", "steps",
)  # fmt: skip
_TYPES = {
    **dict.fromkeys(_INTS, "i32"),
    **dict.fromkeys(
        ("s_ptr", "y_ptr", "value_ptr", "gate_ptr", "ds_ptr", "deps_ptr", "q_ptr", "partial_ptr", "solution_ptr"),
        "*fp32",
    ),
    **dict.fromkeys(("packed_ptr", "out_ptr", "index_ptr"), "*i64"),
    **dict.fromkeys(("totals_ptr", "state_ptr", "ranks_ptr"), "*i32"),
}


def _kernel(
    title: str,
    fn: Any,
    constants: dict[str, Any],
    warps: int,
    registers: int,
    *,
    wide: bool = True,
    maxnreg: int = 0,
    **types: str,
) -> Kernel:  # fmt: skip
    signature = {a: t for a, t in {**_TYPES, **types}.items() if a in fn.arg_names and a not in constants}
    pointers = [a for a in signature if a.endswith("_ptr")]
    return Kernel(
        title, lambda: fn, signature, constants, pointers, num_warps=warps, max_registers=registers, maxnreg=maxnreg,
        vector_loads=wide,
    )  # fmt: skip


def _kernels() -> Iterator[Kernel]:
    if not triton_installed():
        return
    from . import kernels_select as ks
    from . import kernels_topk as kt
    from .kernels_common import PER_WARP, shape

    unmasked = {"mask_ptr": None, "UNIT": 16, "HAS_MASK": False}
    for dtype, cols in (("fp32", 64), ("fp32", 1024), ("fp32", 8192), ("fp32", 32768), ("bf16", 8192)):
        plan = ks.plan(1 << 16, cols, 132)
        scan = min(plan.block_c, ks.PER_SCAN * plan.warps, ks.TILE)
        blocks = {**unmasked, "BLOCK_R": plan.block_r, "BLOCK_C": plan.block_c, "BLOCK_T": scan}
        yield _kernel(f"topk select {dtype} {cols}", ks.select_kernel, blocks, plan.warps, 112, s_ptr=f"*{dtype}")
    for k in (64, 2048):
        block_r, block_k, warps = ks.sort_shape(64, k, 132)
        blocks = {"FETCH": True, "HARD": True, "BLOCK_R": block_r, "BLOCK_K": block_k}
        yield _kernel(f"topk sort {k}", ks.sort_kernel, blocks, warps, 80, wide=False)
    yield _kernel("topk runs", ks.run_kernel, {"BLOCK": ks.RUN}, 16, 64, wide=False)
    blocks = {"LAST": True, "FETCH": True, "HARD": True, "WAYS": ks.WAYS, "BLOCK": ks.MERGED}
    yield _kernel("topk merge", ks.merge_kernel, blocks, 4, 120, wide=False)
    plan = ks.plan(8, 1 << 20, 132)
    digit = {**unmasked, "PASS": 3, "LAST": True, "BLOCK_C": plan.block_c}
    yield _kernel("topk count, long rows", ks.count_kernel, digit, plan.warps, ks.RESIDENT, maxnreg=ks.RESIDENT)
    blocks = {**unmasked, "N_PASSES": 4, "N_SPLITS": 64, "BLOCK_C": ks.COLLECTED}
    yield _kernel("topk collect, long rows", ks.collect_kernel, blocks, plan.warps, ks.RESIDENT, maxnreg=ks.RESIDENT)
    given = {"value_ptr": None, "HAS_GATES": True, "HAS_VALUES": False}
    options = {"eps_ptr": None, "HAS_EPS": False, "mask_ptr": None, "HAS_MASK": False}
    needs = {"NEED_S": True, "NEED_EPS": False}
    for kind, cols in ((0, 1024), (0, 8192), (0, 32768), (1, 8192)):
        rows = shape(64, cols, PER_WARP, kt.LONGEST)
        block_k = min(kt.SELECTED, kt.SELECTED_PER_WARP * rows.warps)
        blocks = {"KIND": kind, "BLOCK_R": rows.block_r, "BLOCK_C": cols, "BLOCK_K": block_k, "VEC": 16}
        constants = {**given, **options, **needs, **blocks}
        yield _kernel(f"topk backward {kind} {cols}", kt.row_kernel, constants, rows.warps, 112, eps_value="fp32")
    long = shape(8, 1 << 20, PER_WARP, kt.LONGEST)
    blocks = {"KIND": 0, **options, "NEED_EPS": False, "BLOCK_C": long.block_c, "BLOCK_K": kt.SELECTED, "VEC": 16}
    yield _kernel("topk backward, sums", kt.sums_kernel, blocks, long.warps, 80, eps_value="fp32")
    blocks = {"KIND": 0, **options, **needs, "N_SPLITS": long.splits, "BLOCK_C": long.block_c, "VEC": 16}
    yield _kernel("topk backward, rest", kt.rest_kernel, blocks, long.warps, 80, eps_value="fp32")
    blocks = {"KIND": 0, **given, "eps_ptr": None, "HAS_EPS": False, "BLOCK_K": kt.SELECTED}
    yield _kernel("topk backward, selected", kt.selected_kernel, blocks, 4, 80, wide=False, eps_value="fp32")


KERNELS = list(_kernels())

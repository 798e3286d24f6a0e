"""Budgets of the kernels of soft_topk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codegen.kernel import DIVISIBLE, Kernel, i32, signature
from onepass.core.launch import triton_installed
from onepass.ops.soft_topk.op import KINDS

_FORWARD = ("s_ptr k_ptr eps_ptr mask_ptr y_ptr solution_ptr mailbox_ptr s_row_stride k_stride eps_stride "
            "mask_row_stride n_rows n_cols k_value eps_value")  # fmt: skip
_BACKWARD = ("gy_ptr s_ptr eps_ptr mask_ptr solution_ptr sums_ptr partial_ptr ds_ptr dk_ptr deps_ptr gy_row_stride "
             "s_row_stride eps_stride mask_row_stride n_rows n_cols n_splits tiles eps_value")  # fmt: skip
_SUMS = ("index_ptr g_ptr s_ptr eps_ptr solution_ptr sums_ptr g_row_stride g_col_stride s_row_stride eps_stride n_rows "
         "k eps_value")  # fmt: skip
_CHOSEN = ("index_ptr g_ptr s_ptr eps_ptr solution_ptr q_ptr ds_ptr g_row_stride g_col_stride s_row_stride eps_stride "
           "n_rows n_cols k eps_value")  # fmt: skip
_ROW = ("index_ptr g_ptr s_ptr eps_ptr mask_ptr solution_ptr ds_ptr deps_ptr g_row_stride g_col_stride s_row_stride "
        "eps_stride mask_row_stride n_rows n_cols k eps_value")  # fmt: skip
_INDEXED = {"index_ptr": "*i64", **i32("g_row_stride", "g_col_stride", "k")}
_FORWARD_SHAPES = (
    ("fp32", 0, 64), ("fp32", 0, 1024), ("fp32", 0, 8192), ("fp32", 0, 16384), ("fp32", 0, 32768), ("bf16", 0, 8192),
    ("fp32", 1, 8192), ("fp32", 2, 8192), ("fp32", 3, 8192), ("fp32", 1, 16384),
)  # fmt: skip
# spill bytes allowed under the launch's register limit: more rows at once gain more than the spills cost, which are in
# the bracketed search that few rows take
_CROWDED = {
    (0, 1024): 168, (0, 8192): 336, (0, 16384): 304, (0, 32768): 704, (1, 8192): 304, (2, 8192): 192, (3, 8192): 496,
    (1, 16384): 304,
}  # fmt: skip


def _kernels() -> Iterator[Kernel]:
    if not triton_installed():
        return
    from onepass.ops._shared import kernels_mailbox, kernels_rows
    from onepass.ops.soft_topk import kernels, kernels_backward, kernels_chosen

    plain: dict[str, Any] = {"k_ptr": None, "eps_ptr": None, "mask_ptr": None}
    for dtype, kind, cols in _FORWARD_SHAPES:
        plan = kernels.forward_shape(1 << 16, cols, kind)
        yield Kernel(
            f"soft_topk forward {KINDS[kind]} {dtype} {plan.block_r}x{cols}",
            lambda: kernels.forward_kernel, signature(_FORWARD, dtype),
            {**plain, "mailbox_ptr": None, "KIND": kind, "TEAM": 0, "WIDTH": 1, "BLOCK_R": plan.block_r,
             "BLOCK_C": cols, "VEC": 16}, DIVISIBLE, **kernels.forward_options(plan, kind), max_registers=176,
            max_spill_bytes=_CROWDED.get((kind, cols), 0),
        )  # fmt: skip
    for dtype, cols in (("fp32", 64), ("fp32", 1024), ("fp32", 8192), ("bf16", 8192)):
        plan = kernels_rows.shape(1 << 16, cols, kernels_rows.HALF_PER_WARP, kernels_backward.LONGEST)
        yield Kernel(
            f"soft_topk backward {dtype} {plan.block_r}x{cols}",
            lambda: kernels_backward.backward_kernel, signature(_BACKWARD, dtype),
            {"eps_ptr": None, "mask_ptr": None, "sums_ptr": None, "partial_ptr": None, "KIND": 0,
             "NEED_S": True, "NEED_EPS": False, "SUMS_ONLY": False, "N_SPLITS": 0, "BLOCK_R": plan.block_r,
             "BLOCK_C": cols, "VEC": 16},
            DIVISIBLE, num_warps=plan.warps, max_registers=80,
        )  # fmt: skip
    for k in (8, 64, 2048):
        block_r, block_k, warps = kernels_chosen.shape_of_chosen(k)
        yield Kernel(
            f"soft_topk sums of {k} chosen", lambda: kernels_chosen.sums_kernel, signature(_SUMS, "fp32") | _INDEXED,
            {"eps_ptr": None, "KIND": 0, "BLOCK_R": block_r, "BLOCK_K": block_k}, DIVISIBLE, num_warps=warps,
            max_registers=64, vector_loads=False,
        )  # fmt: skip
        yield Kernel(
            f"soft_topk {k} chosen", lambda: kernels_chosen.chosen_kernel, signature(_CHOSEN, "fp32") | _INDEXED,
            {"eps_ptr": None, "KIND": 0, "BLOCK_R": block_r, "BLOCK_K": block_k}, DIVISIBLE, num_warps=warps,
            max_registers=72, vector_loads=False,
        )  # fmt: skip
    for cols, k in ((64, 8), (1024, 64), (32768, 2048)):
        per_warp = kernels_rows.HALF_PER_WARP * (2 if cols > kernels_rows.CROWDED else 1)
        plan = kernels_rows.shape(1 << 16, cols, per_warp, kernels_chosen.LONGEST)
        yield Kernel(
            f"soft_topk {k} chosen of {plan.block_r}x{cols}", lambda: kernels_chosen.row_kernel,
            signature(_ROW, "fp32") | _INDEXED,
            {"eps_ptr": None, "mask_ptr": None, "KIND": 0, "NEED_S": True, "NEED_EPS": False, "BLOCK_R": plan.block_r,
             "BLOCK_C": cols, "BLOCK_K": kernels_chosen.chosen_at_a_time(plan, k), "VEC": 16}, DIVISIBLE,
            num_warps=plan.warps, max_registers=80,
        )  # fmt: skip
    block, warps, per_sm = kernels.TEAM
    team = {"TEAM": 64, "WIDTH": 256, "BLOCK_R": 1, "BLOCK_C": block}
    for kind in (0, 1):
        yield Kernel(
            f"soft_topk team {KINDS[kind]}", lambda: kernels.forward_kernel, signature(_FORWARD, "fp32"),
            {**plain, **team, "KIND": kind, "VEC": 16}, DIVISIBLE,
            **kernels_mailbox.resident(warps, per_sm), max_registers=128,
            max_spill_bytes=256 if kind else 16, amd=False,
        )  # fmt: skip


KERNELS = list(_kernels())

"""Budgets of the kernels of coor_descent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codegen.kernel import DIVISIBLE, Kernel, signature
from onepass.core.launch import triton_installed

_FORWARD = ("s_ptr k_ptr mask_ptr y_ptr trace_ptr mailbox_ptr s_row_stride k_stride mask_row_stride n_rows n_cols "
            "k_value n_iters n_changing eps_first eps_last log2_decay")  # fmt: skip
_BACKWARD = ("gy_ptr s_ptr k_ptr mask_ptr trace_ptr partial_ptr ds_ptr dk_ptr gy_row_stride s_row_stride "
             "k_stride mask_row_stride n_rows n_cols n_splits k_value n_iters n_changing eps_first eps_last "
             "log2_decay")  # fmt: skip
_SHAPES = (("fp32", 64), ("fp32", 1024), ("fp32", 8192), ("fp32", 32768), ("bf16", 8192))
# spill bytes allowed under the launch's register limit, for the reason given in soft_topk
_CROWDED = {8192: 128, 32768: 128}


def _kernels() -> Iterator[Kernel]:
    if not triton_installed():
        return
    from onepass.ops._shared import kernels_mailbox, kernels_rows
    from onepass.ops.coor_descent import kernels

    plain: dict[str, Any] = {"k_ptr": None, "mask_ptr": None}
    for dtype, cols in _SHAPES:
        plan = kernels.forward_shape(1 << 16, cols)
        yield Kernel(
            f"coor_descent forward {dtype} {plan.block_r}x{cols}",
            lambda: kernels.forward_kernel, signature(_FORWARD, dtype),
            {**plain, "mailbox_ptr": None, "TEAM": 0, "WIDTH": 1, "BLOCK_R": plan.block_r, "BLOCK_C": cols, "VEC": 16},
            DIVISIBLE, **kernels.forward_options(plan), max_registers=160,
            max_spill_bytes=_CROWDED.get(cols, 0),
        )  # fmt: skip
        if cols > kernels.BACKWARD_MAX_COLS:
            continue
        plan = kernels_rows.shape(1 << 16, cols, kernels_rows.HALF_PER_WARP, kernels.BACKWARD_MAX_COLS)
        yield Kernel(
            f"coor_descent backward {dtype} {plan.block_r}x{cols}",
            lambda: kernels.backward_kernel, signature(_BACKWARD, dtype),
            {**plain, "partial_ptr": None, "N_SPLITS": 0, "BLOCK_R": plan.block_r, "BLOCK_C": cols, "VEC": 16},
            DIVISIBLE, num_warps=plan.warps, max_registers=128,
        )  # fmt: skip
    block, warps, per_sm = kernels.TEAM
    yield Kernel(
        "coor_descent team", lambda: kernels.forward_kernel, signature(_FORWARD, "fp32"),
        {**plain, "TEAM": 64, "WIDTH": 256, "BLOCK_R": 1, "BLOCK_C": block, "VEC": 16}, DIVISIBLE,
        # spills 96 bytes under Triton 3.9, 104 under 3.6, and is still faster than an exchange without spills
        **kernels_mailbox.resident(warps, per_sm), max_registers=128, max_spill_bytes=104, amd=False,
    )  # fmt: skip


KERNELS = list(_kernels())

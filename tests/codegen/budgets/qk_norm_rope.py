"""Kernel budgets of qk_norm_rope, for heads that models have."""

from __future__ import annotations

from codegen.kernel import Kernel, i32, kernel, pointers
from onepass.ops.qk_norm_rope import kernels


def _kernel(t: str, what: str, backward: bool, d: int, rotary: int, interleaved: bool = False) -> Kernel:
    of_two = ("batch_stride", "token_stride", "head_stride")
    names = ["q", "k", "qw", "kw", "cos", "sin", "positions", "q_out", "k_out"]
    strided = ["q", "k"]
    if backward:
        names = ["dq_out", "dk_out", *names[:7], "dq", "dk", "dqw", "dkw"]
        strided = ["dq", "dk", "q", "k"]
    types = {"cos": "*fp32", "sin": "*fp32", "positions": "*i64", "dqw": "*fp32", "dkw": "*fp32"}
    signature = {f"{n}_ptr": types.get(n, f"*{t}") for n in names}
    integers = ["q_rows", "k_rows", "q_heads", "k_heads", "tokens", *(f"{n}_{s}" for n in strided for s in of_two)]
    integers += ["n_positions", "cos_stride", "sin_stride", "positions_batch_stride", "positions_stride"]
    tile = kernels.BACKWARD_BYTES // (2 if t == "bf16" else 4) if backward else kernels.FORWARD_TILE
    heads = kernels.heads_of(d, rotary, interleaved, tile)
    of_heads = ("D", "VEC", "TABLE_VEC", "ROTARY", "HALF", "REST", "INTERLEAVED", "BLOCK_R")
    constants = dict(zip(of_heads, heads, strict=True))
    return Kernel(
        f"qk_norm_rope {'backward' if backward else 'forward'} {t} D={d} {what}",
        kernel("ops.qk_norm_rope.kernels", f"rope_{'backward' if backward else 'forward'}_kernel"),
        signature | {"eps": "fp32", "offset": "fp32"} | i32(*integers, *(() if backward else ("q_tiles",))),
        constants | ({"STAGES": kernels.BACKWARD_STAGES} if backward else {}), pointers(signature),
        num_warps=kernels.WARPS, max_registers=168, max_amd_spills=52,
    )  # fmt: skip


KERNELS = [
    _kernel(t, what, backward, d, rotary, what == "interleaved")
    for t, what, d, rotary in (
        ("bf16", "halves", 128, 128),
        ("bf16", "interleaved", 128, 128),
        ("bf16", "half of it rotated", 128, 64),
        ("bf16", "halves", 96, 96),
        ("fp32", "halves", 128, 128),
        ("fp32", "interleaved", 128, 128),
    )
    for backward in (False, True)
]

__all__ = ["KERNELS"]

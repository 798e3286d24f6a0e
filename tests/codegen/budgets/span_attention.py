"""Budgets of the kernels of span_attention and rotary."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from codegen.kernel import Kernel, i32, kernel
from onepass.ops.span_attention.kernels import shape

_STRIDES = [f"{t}_{d}" for t in "qkv" for d in ("batch", "row", "head")]
_COMMON = i32(*_STRIDES, "span_batch", "n", "m", "heads") | {"scale": "fp32"}


def _pointers(names: str, element: str) -> dict[str, str]:
    kinds = {"first": "*i32", "last": "*i32", "begin": "*i32", "end": "*i32", "mask": "*u8", "lse": "*fp32"}
    return {f"{n}_ptr": kinds.get(n, "*fp32" if n == "delta" else f"*{element}") for n in names.split()}


_KERNELS = {
    "forward": "q k v first last mask out lse",
    "queries": "dout q k v out lse first last mask dq delta",
    "keys": "dout q k v lse delta first last mask begin end dk dv",
}
_MORE = {"forward": {}, "queries": {"dq_row": "i32"}, "keys": {"dkv_row": "i32", "tile_batch": "i32"}}
# element type, products → registers of forward, queries, keys
_BUDGETS = {("bf16", "ieee"): (208, 255, 255), ("fp32", "tf32"): (255, 255, 255), ("fp32", "tf32x3"): (255, 255, 255)}
# bytes of spills on sm_80; on sm_90 they are 128, 8, 0 and 0
_SPILLS = {"forward fp32 tf32": 392, "queries fp32 tf32": 24, "keys fp32 tf32": 120, "queries bf16 ieee": 8}


def _kernels() -> Iterator[Kernel]:
    for (element, precision), budgets in _BUDGETS.items():
        dtype = torch.bfloat16 if element == "bf16" else torch.float32
        for (name, pointers), budget in zip(_KERNELS.items(), budgets, strict=True):
            block_q, block_k, block_d, warps, stages = shape(name, 64, dtype, precision)
            signature = _pointers(pointers, element)
            kind = f"{name} {element} {precision}"
            yield Kernel(
                f"span_attention {kind}", kernel("ops.span_attention.kernels", f"{name}_kernel"),
                signature | _COMMON | _MORE[name],
                {"UNIT": 16, "BLOCK_Q": block_q, "BLOCK_K": block_k, "D": 64, "BLOCK_D": block_d, "HAS_MASK": False,
                 "PRECISION": precision},
                tuple(signature), num_warps=warps, num_stages=stages, max_registers=budget,
                max_spill_bytes=_SPILLS.get(kind, 0), amd=element == "bf16",
            )  # fmt: skip


def _rotary_kernels() -> Iterator[Kernel]:
    strides = [f"{t}_{d}" for t in ("x", "out") for d in ("batch", "row", "head")]
    numbers = i32(*strides, "position_batch", "n", "heads")
    floats = dict.fromkeys(("log2_base_high", "log2_base_low"), "fp32")
    pointers = {"x_ptr": "*bf16", "positions_ptr": "*i64", "out_ptr": "*bf16"}
    # cos and sin need the stack for large angles, which do not occur here
    yield Kernel(
        "rotary", kernel("ops.span_attention.kernels_rotary", "rotary_kernel"), pointers | numbers | floats,
        {"UNIT": 16, "HALF": 32, "INVERSE": False, "HAS_POSITIONS": True, "BLOCK_N": 16, "BLOCK_C": 32},
        tuple(pointers), num_warps=2, max_registers=72, max_spill_bytes=32,
    )  # fmt: skip


KERNELS = [*_kernels(), *_rotary_kernels()]

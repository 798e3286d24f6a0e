"""Cases of weighted_sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Impl, staged
from onepass.ops.weighted_sum.op import weighted_sum


def _impls(x: Tensor, w: Tensor) -> dict[str, Callable[[], Tensor]]:
    compiled = torch.compile(lambda a, b: (a * b).sum(-1))
    return {
        "onepass": lambda: weighted_sum(x, w),
        "x @ w": lambda: x @ w,
        "(x*w).sum": lambda: (x * w).sum(-1),
        "einsum": lambda: torch.einsum("nd,d->n", x, w),
        "torch.compile (x*w).sum": lambda: compiled(x, w),
    }


def _case(rows: int, cols: int, dtype: torch.dtype, stage: str, device: str = "cuda") -> Case:
    def make() -> Mapping[str, Impl]:
        x, w = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((rows, cols), (cols,)))
        return staged(stage, _impls(x, w), (x, w))

    floor = rows * cols * dtype.itemsize * (1 if stage == "forward" else 2)
    return Case("weighted_sum", stage, {"rows": rows, "cols": cols}, dtype, floor, make, 2e-2, device)


def _vectors_case(rows: int, cols: int, vectors: int, device: str = "cuda") -> Case:
    def make() -> Mapping[str, Callable[[], Any]]:
        x = torch.randn(rows, cols, device=device, dtype=torch.bfloat16)
        w = torch.randn(vectors, cols, device=device, dtype=torch.bfloat16)
        return {"onepass": lambda: weighted_sum(x, w), "x @ w": lambda: x @ w.mT}

    params = {"rows": rows, "cols": cols, "vectors": vectors}
    return Case("weighted_sum", "forward", params, torch.bfloat16, rows * cols * 2, make, 2e-2, device)


_SIZES = ((1048576, 64), (131072, 320), (262144, 512), (65536, 4096), (8192, 32768))
_CPU_SIZES = ((65536, 64), (8192, 512), (2048, 4096))
CASES = [
    _case(rows, cols, dtype, stage, device)
    for device, sizes in (("cuda", _SIZES), ("cpu", _CPU_SIZES))
    for rows, cols in sizes
    for dtype in (torch.bfloat16, torch.float32)
    for stage in ("forward", "backward")
] + [
    _vectors_case(rows, cols, vectors, device)
    for device, sizes in (("cuda", ((262144, 512), (65536, 4096))), ("cpu", ((8192, 512),)))
    for rows, cols in sizes
    for vectors in (4, 16)
]

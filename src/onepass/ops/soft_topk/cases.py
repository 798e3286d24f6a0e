"""Benchmark cases of soft_topk: shapes, temperatures and rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import Case, Impl, Missing, backward_of, graphed, optional
from onepass.ops.coor_descent.op import coor_descent

from . import rivals
from .op import KINDS, soft_topk

# widths of rows at a constant number of elements, then temperatures
WIDTHS = (256, 1024, 4096, 32768, 131072, 1 << 20)
ELEMENTS = 1 << 26
TEMPERATURES = (1.0, 0.3, 0.1, 0.03, 0.01)
# small enough for a CPU
CPU_CELLS = ((1, 1 << 20), (256, 8192), (16, 8192), (64, 1024))


def _rivals(s: Tensor, k: float, eps: float, kind: str) -> dict[str, Callable[[], Tensor] | Missing]:
    if kind == "clamp":
        entmax = optional("entmax")
        if entmax is None:
            return {"entmax budget_bisect": Missing("entmax")}
        return {"entmax budget_bisect": lambda: entmax.budget_bisect(s / eps, budget=k)}
    if kind == "laplace":
        return {"LapSum by sorting": lambda: rivals.lapsum(s, k, eps)}
    if kind == "sigmoid":
        torchsort = optional("torchsort")
        ranks: Any = Missing("torchsort") if torchsort is None else lambda: torchsort.soft_rank(s)
        return {"SOFT by Sinkhorn (200)": lambda: rivals.sinkhorn(s, k, eps), "torchsort soft_rank": ranks}
    found: dict[str, Callable[[], Tensor] | Missing] = {
        "coor_descent T=50": lambda: coor_descent(s, n_iters=50, k=k, eps=eps)
    }
    if not s.is_cuda:
        eager = optional("colt5_attention.coor_descent")
        found["colt5 eager T=50"] = (
            Missing("colt5-attention") if eager is None else lambda: eager.coor_descent(s, n_iters=50, k=k, eps=eps)
        )
    return found


def _case(
    rows: int, cols: int, kind: str, eps: float, stage: str, dtype: torch.dtype, against: bool = False,
    device: str = "cuda",
) -> Case:  # fmt: skip
    def make() -> Mapping[str, Impl]:
        s = torch.randn(rows, cols, device=device, dtype=dtype).requires_grad_(stage == "backward")
        k = cols / 8
        gy = torch.randn(rows, cols, device=device, dtype=dtype)

        def ours() -> Tensor:
            return soft_topk(s, k, eps=eps, kind=kind)

        def staged(run: Callable[[], Tensor]) -> Impl:
            return run if stage == "forward" else backward_of(run, (s,), gy)

        def prepare() -> Callable[[], Any]:
            return ours if stage == "forward" else backward_of(ours, (s,), gy).build()

        impls: dict[str, Impl] = {"onepass": staged(ours)}
        if rows < 8 and device == "cuda":
            impls["onepass, CUDA graph"] = graphed(prepare)
        if against:
            others = _rivals(s, k, eps, kind)
            impls |= {name: f if isinstance(f, Missing) else staged(f) for name, f in others.items()}
        return impls

    floor = rows * cols * dtype.itemsize * (2 if stage == "forward" else 3)
    params = {"rows": rows, "cols": cols, "kind": kind, "eps": eps}
    return Case("soft_topk", stage, params, dtype, floor, make, device=device)


def _cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for eps in TEMPERATURES if dtype == torch.float32 else (1.0, 0.1, 0.03):
            yield _case(8192, 8192, "capped_exp", eps, "forward", dtype)
        for kind in ("sigmoid", "laplace", "clamp"):
            yield _case(8192, 8192, kind, 0.1, "forward", dtype, against=True)
        for kind in KINDS if dtype == torch.float32 else ("capped_exp",):
            yield _case(8192, 8192, kind, 0.1, "backward", dtype)
    for kind in KINDS:
        for stage in ("forward", "backward"):
            yield _case(1024, 8192, kind, 0.1, stage, torch.float32, against=True)
    for cols in WIDTHS:
        for stage in ("forward", "backward"):
            yield _case(ELEMENTS // cols, cols, "capped_exp", 0.1, stage, torch.float32)
    for stage in ("forward", "backward"):
        yield _case(2, 1 << 20, "capped_exp", 0.1, stage, torch.float32)
        for rows, cols in CPU_CELLS:
            yield _case(rows, cols, "capped_exp", 0.1, stage, torch.float32, against=True, device="cpu")
        for kind in ("sigmoid", "laplace", "clamp"):
            yield _case(256, 8192, kind, 0.1, stage, torch.float32, against=True, device="cpu")


CASES = list(_cases())

"""Benchmark cases of soft_topk: shapes, temperatures, rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Impl, Timed, backward_of, graphed, rival, staged
from onepass.ops.coor_descent.op import coor_descent
from onepass.ops.soft_topk.op import KINDS, soft_topk

RIVALS = {"colt5_attention": "colt5-attention", "entmax": "entmax"}


def lapsum(scores: Tensor, k: float, eps: float) -> Tensor:
    """Return the `laplace` gates by one sort: between two neighbours the threshold solves a quadratic equation.

    Struski et al. (arXiv 2503.06242). Assumes that the threshold lies between the smallest and the largest score.
    """
    n = scores.shape[-1]
    s = scores.sort(dim=-1).values / eps
    below = (s.logcumsumexp(-1) - s).exp()
    above = ((-s).flip(-1).logcumsumexp(-1).flip(-1) + s).exp()
    ahead = torch.arange(n - 1, -1, -1, device=s.device, dtype=s.dtype)
    total = 0.5 * below + ahead - 0.5 * (above - 1)
    left = ((total >= k).sum(-1, keepdim=True) - 1).clamp(0, n - 2)
    a, start = below.gather(-1, left), s.gather(-1, left)
    b = above.gather(-1, left + 1) * (start - s.gather(-1, left + 1)).exp()
    rest = n - 1 - left - k
    t = start + ((rest + (rest * rest + a * b).sqrt()) / b).log()
    x = scores / eps - t
    tail = 0.5 * (-x.abs()).exp()
    return torch.where(x < 0, tail, 1 - tail)


def sinkhorn(scores: Tensor, k: float, eps: float) -> Tensor:
    """Return the `sigmoid` gates by 200 Sinkhorn iterations towards the marginals (k, n - k).

    Xie et al. (arXiv 2002.06504).
    """
    n = scores.shape[-1]
    c = torch.zeros_like(scores[..., :1])
    for _ in range(200):
        chosen = ((scores + c) / eps).sigmoid().sum(-1, keepdim=True)
        c = c + eps * (torch.log(k / chosen) - torch.log((n - k) / (n - chosen)))
    return ((scores + c) / eps).sigmoid()


# widths of rows at a constant number of elements, then temperatures
WIDTHS = (256, 1024, 4096, 32768, 131072, 1 << 20)
ELEMENTS = 1 << 26
TEMPERATURES = (1.0, 0.3, 0.1, 0.03, 0.01)
# small enough for a CPU
CPU_CELLS = ((1, 1 << 20), (256, 8192), (16, 8192), (64, 1024))


def _rivals(s: Tensor, k: float, eps: float, kind: str) -> dict[str, Timed]:
    if kind == "clamp":
        return {"entmax budget_bisect": rival("entmax", lambda m: lambda: m.budget_bisect(s / eps, budget=k))}
    if kind == "laplace":
        return {"LapSum by sorting": lambda: lapsum(s, k, eps)}
    if kind == "sigmoid":
        ranks = rival("torchsort", lambda m: lambda: m.soft_rank(s))
        return {"SOFT by Sinkhorn (200)": lambda: sinkhorn(s, k, eps), "torchsort soft_rank": ranks}
    options: dict[str, Any] = {"n_iters": 50, "k": k, "eps": eps}
    impls: dict[str, Timed] = {"coor_descent T=50": lambda: coor_descent(s, **options)}
    if not s.is_cuda:
        colt5 = "colt5_attention.coor_descent"
        impls["colt5 eager T=50"] = rival(colt5, lambda m: lambda: m.coor_descent(s, **options))
    return impls


def _case(
    rows: int, cols: int, kind: str, eps: float, stage: str, dtype: torch.dtype, against: bool = False,
    device: str = "cuda",
) -> Case:  # fmt: skip
    def make() -> Mapping[str, Impl]:
        s = torch.randn(rows, cols, device=device, dtype=dtype).requires_grad_(stage == "backward")
        k = cols / 8

        def ours() -> Tensor:
            return soft_topk(s, k, eps=eps, kind=kind)

        def prepare() -> Callable[[], Any]:
            return ours if stage == "forward" else backward_of(ours, (s,)).build()

        impls = staged(stage, {"onepass": ours}, (s,))
        if rows < 8 and device == "cuda":
            impls["onepass, CUDA graph"] = graphed(prepare)
        if against:
            impls |= staged(stage, _rivals(s, k, eps, kind), (s,))
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

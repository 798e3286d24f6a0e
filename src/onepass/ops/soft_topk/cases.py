"""What coor_descent and soft_topk are measured against, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import Case, Impl, Missing, Prepared, backward_of, optional

from . import reference, rivals
from .op import soft_topk
from .op_descent import coor_descent

# the published defaults, and those of the later paper
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "T=50 eps=0.1": {"n_iters": 50, "eps": 0.1},
    "T=20 eps=4→0.03": {"n_iters": 20, "eps": 0.03, "eps_init": 4.0, "eps_decay": 0.7},
}
DESCENT_CELLS = ((4096, 1024), (1024, 8192), (256, 32768))
SEGMENTS = (1, 4, 10)


def _descent_impls(s: Tensor, k: float, options: Mapping[str, Any]) -> dict[str, Callable[[], Tensor]]:
    found: dict[str, Callable[[], Tensor]] = {"onepass": lambda: coor_descent(s, k=k, **options)}
    eager = optional("colt5_attention.coor_descent")
    kernel = optional("colt5_attention.triton_coor_descent")
    if eager is not None:
        found["colt5 eager"] = lambda: eager.coor_descent(s, k=k, **options)
    if kernel is not None:
        for segments in SEGMENTS:
            found[f"colt5 triton segments={segments}"] = lambda n=segments: kernel.triton_coor_descent(  # type: ignore[misc]
                s, k=k, checkpoint_segments=n, **options
            )
    compiled = torch.compile(reference.coor_descent)
    found["torch.compile of the iteration"] = lambda: compiled(s, k=k, **options)
    return found


def _descent_case(rows: int, cols: int, name: str, stage: str) -> Case:
    def make() -> Mapping[str, Impl]:
        s = torch.randn(rows, cols, device="cuda").requires_grad_(stage == "backward")
        impls = _descent_impls(s, cols / 8, SCHEDULES[name])
        missing = {} if "colt5 eager" in impls else {"colt5": Missing("colt5-attention")}
        if stage == "forward":
            return {**impls, **missing}
        gy = torch.randn(rows, cols, device="cuda")
        return {**{label: backward_of(f, (s,), gy) for label, f in impls.items()}, **missing}

    floor = rows * cols * 4 * (2 if stage == "forward" else 3)
    params = {"rows": rows, "cols": cols, "schedule": name}
    # gradients of entries beside a kink may flip between two roundings of the same threshold
    return Case("coor_descent", stage, params, torch.float32, floor, make, check=2e-3 if stage == "forward" else None)


def _rivals(s: Tensor, k: float, eps: float, kind: str) -> dict[str, Impl]:
    if kind == "clamp":
        entmax = optional("entmax")
        if entmax is None:
            return {"entmax budget_bisect": Missing("entmax")}
        return {"entmax budget_bisect": lambda: entmax.budget_bisect(s / eps, budget=k)}
    if kind == "laplace":
        return {"LapSum by sorting": lambda: rivals.lapsum(s, k, eps)}
    if kind == "sigmoid":
        torchsort = optional("torchsort")
        ranks: Impl = Missing("torchsort") if torchsort is None else lambda: torchsort.soft_rank(s)
        return {"SOFT by Sinkhorn (200)": lambda: rivals.sinkhorn(s, k, eps), "torchsort soft_rank": ranks}
    return {"coor_descent T=50": lambda: coor_descent(s, n_iters=50, k=k, eps=eps)}


def _soft_case(rows: int, cols: int, kind: str, eps: float, stage: str, dtype: torch.dtype) -> Case:
    def make() -> Mapping[str, Impl]:
        s = torch.randn(rows, cols, device="cuda", dtype=dtype).requires_grad_(stage == "backward")
        k = cols / 8

        def ours() -> Tensor:
            return soft_topk(s, k, eps=eps, kind=kind)

        if stage == "forward":
            return {"onepass": ours, **_rivals(s, k, eps, kind)}
        gy = torch.randn(rows, cols, device="cuda", dtype=dtype)

        def replayed() -> Callable[[], Any]:
            y = ours()
            graph = torch.cuda.CUDAGraph()
            torch.autograd.grad(y, s, gy, retain_graph=True)
            with torch.cuda.graph(graph):
                torch.autograd.grad(y, s, gy, retain_graph=True)
            return graph.replay

        graphed: dict[str, Impl] = {"onepass, CUDA graph": Prepared(replayed)} if rows < 8 else {}
        return {"onepass": backward_of(ours, (s,), gy), **graphed}

    floor = rows * cols * dtype.itemsize * (2 if stage == "forward" else 3)
    params = {"rows": rows, "cols": cols, "kind": kind, "eps": eps}
    return Case("soft_topk", stage, params, dtype, floor, make)


def _cases() -> Iterator[Case]:
    for name in SCHEDULES:
        for rows, cols in DESCENT_CELLS:
            for stage in ("forward", "backward"):
                yield _descent_case(rows, cols, name, stage)
    for dtype in (torch.float32, torch.bfloat16):
        for eps in (1.0, 0.1, 0.03):
            yield _soft_case(8192, 8192, "capped_exp", eps, "forward", dtype)
        for kind in ("sigmoid", "laplace", "clamp"):
            yield _soft_case(8192, 8192, kind, 0.1, "forward", dtype)
        yield _soft_case(8192, 8192, "capped_exp", 0.1, "backward", dtype)
        yield _soft_case(65536, 256, "capped_exp", 0.1, "forward", dtype)
    for stage in ("forward", "backward"):
        yield _soft_case(2, 1 << 20, "capped_exp", 0.1, stage, torch.float32)


CASES = list(_cases())

"""Benchmark cases of coor_descent: shapes, schedules, rivals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Impl, Timed, rival, staged
from onepass.ops.coor_descent.op import coor_descent

RIVALS = {"colt5_attention": "colt5-attention"}


def descent(
    scores: Tensor, *, n_iters: int, k: float, eps: float = 0.1, eps_init: float | None = None, eps_decay: float = 1.0
) -> Tensor:
    """Run T steps in torch operators that torch.compile captures as one graph; no mask, no edge cases."""
    current = max(eps if eps_init is None else eps_init, eps)
    b = -scores
    a = torch.zeros_like(scores[..., :1])
    for _ in range(n_iters):
        a = current * (math.log(k) - ((scores + b) / current).logsumexp(-1, keepdim=True))
        b = -(scores + a).relu()
        current = max(current * eps_decay, eps)
    return ((scores + a + b) / current).exp()


# the published defaults, then those of the later paper
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "T=50 eps=0.1": {"n_iters": 50, "eps": 0.1},
    "T=20 eps=4→0.03": {"n_iters": 20, "eps": 0.03, "eps_init": 4.0, "eps_decay": 0.7},
}
CELLS = ((4096, 1024), (1024, 8192), (256, 32768))
COMPILED = (1024, 8192)
SEGMENTS = (1, 4, 10)
STEPS = (5, 10, 20, 100)
# small enough for a CPU
CPU_CELLS = ((1, 1 << 20), (256, 8192), (16, 8192), (64, 1024))


def _impls(s: Tensor, k: float, options: Mapping[str, Any], compiled: bool) -> dict[str, Timed]:
    eager = rival("colt5_attention.coor_descent", lambda m: lambda: m.coor_descent(s, k=k, **options))
    impls: dict[str, Timed] = {"onepass": lambda: coor_descent(s, k=k, **options), "colt5 eager": eager}
    for segments in SEGMENTS if s.is_cuda else ():

        def use(module: Any, n: int = segments) -> Callable[[], Tensor]:
            return lambda: module.triton_coor_descent(s, k=k, checkpoint_segments=n, **options)  # type: ignore[no-any-return]

        impls[f"colt5 triton segments={segments}"] = rival("colt5_attention.triton_coor_descent", use)
    if compiled:
        # tracing takes ten seconds per shape and schedule, so one shape only
        iteration = torch.compile(descent, fullgraph=True)
        impls["torch.compile of the iteration"] = lambda: iteration(s, k=k, **options)
    return impls


def _case(rows: int, cols: int, name: str, options: Mapping[str, Any], stage: str, device: str = "cuda") -> Case:
    def make() -> Mapping[str, Impl]:
        s = torch.randn(rows, cols, device=device)
        compiled = name in SCHEDULES and (rows, cols) == COMPILED and s.is_cuda
        return staged(stage, _impls(s, cols / 8, options, compiled), (s,))

    floor = rows * cols * 4 * (2 if stage == "forward" else 3)
    params = {"rows": rows, "cols": cols, "schedule": name}
    # gradients are not compared: beside a kink, two roundings of one threshold give different ones
    check = 2e-3 if stage == "forward" else None
    return Case("coor_descent", stage, params, torch.float32, floor, make, check, device)


def _cases() -> Iterator[Case]:
    for name, options in SCHEDULES.items():
        for rows, cols in CELLS:
            for stage in ("forward", "backward"):
                yield _case(rows, cols, name, options, stage)
    for steps in STEPS:
        for stage in ("forward", "backward"):
            yield _case(1024, 8192, f"T={steps} eps=0.1", {"n_iters": steps, "eps": 0.1}, stage)
    for stage in ("forward", "backward"):
        for rows, cols in CPU_CELLS:
            yield _case(rows, cols, "T=50 eps=0.1", SCHEDULES["T=50 eps=0.1"], stage, "cpu")


CASES = list(_cases())

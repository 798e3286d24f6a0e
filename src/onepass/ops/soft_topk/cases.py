"""What coor_descent, soft_topk and topk are measured against, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import Case, Impl, Missing, Prepared, backward_of, optional

from . import rivals
from .op import KINDS, soft_topk
from .op_descent import coor_descent
from .op_topk import topk

# the published defaults, and those of the later paper
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "T=50 eps=0.1": {"n_iters": 50, "eps": 0.1},
    "T=20 eps=4→0.03": {"n_iters": 20, "eps": 0.03, "eps_init": 4.0, "eps_decay": 0.7},
}
DESCENT_CELLS = ((4096, 1024), (1024, 8192), (256, 32768))
COMPILED = (1024, 8192)
SEGMENTS = (1, 4, 10)
# over n with as many elements, over T, over eps
WIDTHS = (256, 1024, 4096, 32768, 131072, 1 << 20)
ELEMENTS = 1 << 26
STEPS = (5, 10, 20, 100)
TEMPERATURES = (1.0, 0.3, 0.1, 0.03, 0.01)
# small enough for a CPU
CPU_CELLS = ((1, 1 << 20), (256, 8192), (16, 8192), (64, 1024))
TOPK_CELLS = ((64, 32768, 2048), (1024, 8192, 512), (4096, 1024, 64), (8, 1 << 20, 65536))


def _descent_impls(s: Tensor, k: float, options: Mapping[str, Any], compiled: bool) -> dict[str, Callable[[], Tensor]]:
    found: dict[str, Callable[[], Tensor]] = {"onepass": lambda: coor_descent(s, k=k, **options)}
    eager = optional("colt5_attention.coor_descent")
    kernel = optional("colt5_attention.triton_coor_descent")
    if eager is not None:
        found["colt5 eager"] = lambda: eager.coor_descent(s, k=k, **options)
    if kernel is not None and s.is_cuda:
        for segments in SEGMENTS:
            found[f"colt5 triton segments={segments}"] = lambda n=segments: kernel.triton_coor_descent(  # type: ignore[misc]
                s, k=k, checkpoint_segments=n, **options
            )
    if compiled:
        # each shape and schedule takes ten seconds to trace, so not everywhere
        iteration = torch.compile(rivals.descent, fullgraph=True)
        found["torch.compile of the iteration"] = lambda: iteration(s, k=k, **options)
    return found


def _graphed(prepare: Callable[[], Callable[[], Any]]) -> Prepared:
    """The replay of a CUDA graph of the call that `prepare` returns."""

    def build() -> Callable[[], Any]:
        # autograd runs a backward pass on the stream of its forward pass: both belong on the stream of the capture
        new_stream: Any = torch.cuda.Stream
        stream, graph = new_stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run = prepare()
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        return graph.replay

    return Prepared(build)


def _descent_case(
    rows: int, cols: int, name: str, options: Mapping[str, Any], stage: str, device: str = "cuda"
) -> Case:
    def make() -> Mapping[str, Impl]:
        s = torch.randn(rows, cols, device=device).requires_grad_(stage == "backward")
        impls = _descent_impls(s, cols / 8, options, name in SCHEDULES and (rows, cols) == COMPILED and s.is_cuda)
        missing = {} if "colt5 eager" in impls else {"colt5": Missing("colt5-attention")}
        if stage == "forward":
            return {**impls, **missing}
        gy = torch.randn(rows, cols, device=device)
        return {**{label: backward_of(f, (s,), gy) for label, f in impls.items()}, **missing}

    floor = rows * cols * 4 * (2 if stage == "forward" else 3)
    params = {"rows": rows, "cols": cols, "schedule": name}
    # gradients of entries beside a kink may flip between two roundings of the same threshold
    check = 2e-3 if stage == "forward" else None
    return Case("coor_descent", stage, params, torch.float32, floor, make, check, device)


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


def _soft_case(
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
            impls["onepass, CUDA graph"] = _graphed(prepare)
        if against:
            others = _rivals(s, k, eps, kind)
            impls |= {name: f if isinstance(f, Missing) else staged(f) for name, f in others.items()}
        return impls

    floor = rows * cols * dtype.itemsize * (2 if stage == "forward" else 3)
    params = {"rows": rows, "cols": cols, "kind": kind, "eps": eps}
    return Case("soft_topk", stage, params, dtype, floor, make, device=device)


def _topk_case(rows: int, cols: int, k: int, stage: str, device: str = "cuda") -> Case:
    """Selection with trainable gates; the rival puts them together from torch.topk and our soft_topk."""

    def make() -> Mapping[str, Impl]:
        s = torch.randn(rows, cols, device=device, requires_grad=True)

        def ours() -> tuple[Tensor, Tensor]:
            found = topk(s, k)
            return found.values, found.gates

        def apart() -> tuple[Tensor, Tensor]:
            values, indices = torch.topk(s, k)
            soft = soft_topk(s, k).gather(-1, indices)
            return values, soft + (1 - soft).detach()

        if stage == "forward":
            impls: dict[str, Impl] = {"onepass": ours, "torch.topk + soft_topk": apart}
            impls["torch.topk without gates"] = lambda: torch.topk(s.detach(), k)
            if device == "cuda":
                impls["onepass, CUDA graph"] = _graphed(lambda: lambda: topk(s.detach(), k))
            return impls
        gy = torch.randn(rows, k, device=device)

        def gradient(run: Callable[[], tuple[Tensor, Tensor]]) -> Impl:
            return backward_of(lambda: run()[1], (s,), gy)

        return {"onepass": gradient(ours), "torch.topk + soft_topk": gradient(apart)}

    # forward: a value, an index and a gate for each of k; backward: the gates' gradients, scores, and theirs
    floor = rows * (cols * 4 + k * 16) if stage == "forward" else rows * (cols * 8 + k * 12)
    return Case("topk", stage, {"rows": rows, "cols": cols, "k": k}, torch.float32, floor, make, device=device)


def _cases() -> Iterator[Case]:
    for name, options in SCHEDULES.items():
        for rows, cols in DESCENT_CELLS:
            for stage in ("forward", "backward"):
                yield _descent_case(rows, cols, name, options, stage)
    for steps in STEPS:
        for stage in ("forward", "backward"):
            yield _descent_case(1024, 8192, f"T={steps} eps=0.1", {"n_iters": steps, "eps": 0.1}, stage)
    for dtype in (torch.float32, torch.bfloat16):
        for eps in TEMPERATURES if dtype == torch.float32 else (1.0, 0.1, 0.03):
            yield _soft_case(8192, 8192, "capped_exp", eps, "forward", dtype)
        for kind in ("sigmoid", "laplace", "clamp"):
            yield _soft_case(8192, 8192, kind, 0.1, "forward", dtype, against=True)
        for kind in KINDS if dtype == torch.float32 else ("capped_exp",):
            yield _soft_case(8192, 8192, kind, 0.1, "backward", dtype)
    for kind in KINDS:
        for stage in ("forward", "backward"):
            yield _soft_case(1024, 8192, kind, 0.1, stage, torch.float32, against=True)
    for cols in WIDTHS:
        for stage in ("forward", "backward"):
            yield _soft_case(ELEMENTS // cols, cols, "capped_exp", 0.1, stage, torch.float32)
    for stage in ("forward", "backward"):
        yield _soft_case(2, 1 << 20, "capped_exp", 0.1, stage, torch.float32)
        for rows, cols, k in TOPK_CELLS:
            yield _topk_case(rows, cols, k, stage)
    for stage in ("forward", "backward"):
        for rows, cols in CPU_CELLS:
            yield _soft_case(rows, cols, "capped_exp", 0.1, stage, torch.float32, against=True, device="cpu")
            yield _descent_case(rows, cols, "T=50 eps=0.1", SCHEDULES["T=50 eps=0.1"], stage, "cpu")
            yield _topk_case(rows, cols, cols // 16, stage, "cpu")
        for kind in ("sigmoid", "laplace", "clamp"):
            yield _soft_case(256, 8192, kind, 0.1, stage, torch.float32, against=True, device="cpu")


CASES = list(_cases())

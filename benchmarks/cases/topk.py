"""Benchmark cases of topk: shapes and rivals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.case import Case, Impl, graphed, staged
from onepass.ops.soft_topk.op import soft_topk
from onepass.ops.topk.op import topk

CELLS = ((64, 32768, 2048), (1024, 8192, 512), (4096, 1024, 64), (8, 1 << 20, 65536))
# users with many rows: sparse autoencoders, indexers of sparse attention (by index too), expert routers, vocabularies
MANY_ROWS = (
    (4096, 65536, 32), (8192, 131072, 64), (16384, 24576, 64), (4096, 16384, 32), (4096, 32768, 2048),
    (8192, 8192, 2048), (16384, 16384, 2048), (65536, 64, 8), (32768, 256, 8), (256, 128256, 50),
)  # fmt: skip
# small enough for a CPU
CPU_CELLS = ((1, 1 << 20), (256, 8192), (16, 8192), (64, 1024))


def _case(rows: int, cols: int, k: int, stage: str, device: str = "cuda") -> Case:
    """Measure selection with trainable gates; the rival combines torch.topk with our soft_topk."""

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
                impls["onepass, CUDA graph"] = graphed(lambda: lambda: topk(s.detach(), k))
            return impls
        return staged(stage, {"onepass": lambda: ours()[1], "torch.topk + soft_topk": lambda: apart()[1]}, (s,))

    # forward: read scores, write a value, an index and a gate for each of k, 16 bytes
    # backward: read scores, write their gradients, and 12 bytes for each of k: index and gradient of the gate
    floor = rows * (cols * 4 + k * 16) if stage == "forward" else rows * (cols * 8 + k * 12)
    return Case("topk", stage, {"rows": rows, "cols": cols, "k": k}, torch.float32, floor, make, device=device)


def _of_many_rows(rows: int, cols: int, k: int, dtype: torch.dtype, is_sorted: bool) -> Case:
    """Measure the selection alone beside torch.topk."""

    def make() -> Mapping[str, Impl]:
        s = torch.randn(rows, cols, device="cuda").to(dtype)
        return {
            "onepass": lambda: topk(s, k, sorted=is_sorted).values,
            "torch.topk": lambda: torch.topk(s, k, sorted=is_sorted).values if is_sorted else _by_index(s, k),
        }

    # read scores, write a value, an index and a gate for each of k
    floor = rows * (cols * dtype.itemsize + k * (8 + 2 * dtype.itemsize))
    params = {"rows": rows, "cols": cols, "k": k, "order": "best first" if is_sorted else "by index"}
    return Case("topk", "forward", params, dtype, floor, make)


def _by_index(s: Tensor, k: int) -> Tensor:
    """Return the k largest of each row in the order of columns."""
    return s.gather(-1, torch.topk(s, k, sorted=False).indices.sort(-1).values)


def _cases() -> Iterator[Case]:
    for rows, cols, k in MANY_ROWS:
        for dtype in (torch.float32, torch.bfloat16):
            for is_sorted in (True, False) if k == 2048 else (True,):
                yield _of_many_rows(rows, cols, k, dtype, is_sorted)
    for stage in ("forward", "backward"):
        for rows, cols, k in CELLS:
            yield _case(rows, cols, k, stage)
        for rows, cols in CPU_CELLS:
            yield _case(rows, cols, cols // 16, stage, "cpu")


CASES = list(_cases())

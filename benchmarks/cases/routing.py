"""Benchmark cases of score, gather and scatter_add; those of modules are in `fused.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.case import Case, Impl, staged
from onepass.ops.routing import definition
from onepass.ops.routing.op import gather, scatter_add, score

# batch, n, dim, k: in bf16 the chosen rows of a batch are 64 MB in the first three, 8 MB in the last
CELLS = ((8, 65536, 1024, 4096), (8, 131072, 512, 8192), (2, 65536, 4096, 4096), (2, 32768, 1024, 2048))
# small enough for a CPU
CPU_CELL = (2, 8192, 512, 512)
DTYPES = (torch.bfloat16, torch.float32)


def _choice(batch: int, n: int, k: int, device: str) -> Tensor:
    return torch.rand(batch, n, device=device).argsort(-1)[:, :k].contiguous()


def _flat(indices: Tensor, n: int) -> Tensor:
    return (indices + torch.arange(len(indices), device=indices.device)[:, None] * n).view(-1)


def _rows_case(
    op: str, batch: int, n: int, dim: int, k: int, dtype: torch.dtype, stage: str, device: str = "cuda"
) -> Case:
    def make() -> Mapping[str, Impl]:
        x, indices = torch.randn(batch, n, dim, device=device, dtype=dtype), _choice(batch, n, k, device)
        rows, flat = x.view(-1, dim), _flat(indices, n)
        if op == "gather":
            return {
                "onepass": lambda: gather(x, indices),
                "index_select": lambda: rows.index_select(0, flat).view(batch, k, dim),
            }
        update, gates = torch.randn(batch, k, dim, device=device, dtype=dtype), torch.rand(batch, k, device=device)

        def composed() -> Tensor:
            return rows.index_add_(0, flat, (update * gates[..., None]).to(dtype).view(-1, dim))

        if op == "gather, gated add":
            return {
                "onepass": lambda: scatter_add(rows, gather(x, indices), gates, indices, inplace=True),
                "index_select, index_add_": lambda: rows.index_add_(
                    0, flat, (rows.index_select(0, flat) * gates.view(-1, 1)).to(dtype)
                ),
            }
        if stage == "forward":
            return {
                "onepass": lambda: scatter_add(rows, update, gates, indices, inplace=True),
                "index_add_": composed,
            }
        impls = {
            "onepass": lambda: scatter_add(x, update, gates, indices),
            "index_add": lambda: rows.index_add(0, flat, (update * gates[..., None]).to(dtype).view(-1, dim)).view_as(
                x
            ),
        }
        return staged(stage, impls, (update, gates))

    moved = {"gather": 2, "gated add": 3, "gather, gated add": 5}[op]
    params = {"batch": batch, "n": n, "dim": dim, "k": k}
    # an in-place addition changes y with every call, so results can't be compared
    check = 0.0 if op == "gather" else 2e-2 if stage == "backward" else None
    return Case(op, stage, params, dtype, moved * batch * k * dim * dtype.itemsize, make, check, device)


def _score_case(batch: int, n: int, dim: int, dtype: torch.dtype, stage: str, device: str = "cuda") -> Case:
    def make() -> Mapping[str, Impl]:
        x, weight = torch.randn(batch, n, dim, device=device, dtype=dtype), torch.randn(dim, device=device)
        compiled = torch.compile(definition.score, dynamic=False)
        impls: dict[str, Callable[[], Tensor]] = {
            "onepass": lambda: score(x, weight),
            "torch": lambda: definition.score(x, weight),
            "torch.compile": lambda: compiled(x, weight),
        }
        return staged(stage, impls, (x, weight))

    floor = batch * n * dim * dtype.itemsize * (1 if stage == "forward" else 2)
    return Case("score", stage, {"batch": batch, "n": n, "dim": dim}, dtype, floor, make, 2e-2, device)


def _cases() -> Iterator[Case]:
    scored = ((2, 32768, 1024), (2, 32768, 512), (2, 65536, 4096))
    for device, cells, shapes in (("cuda", CELLS, scored), ("cpu", (CPU_CELL,), (CPU_CELL[:3],))):
        for dtype in DTYPES:
            for cell in cells:
                for op in ("gather", "gated add", "gather, gated add"):
                    yield _rows_case(op, *cell, dtype, "forward", device)
                yield _rows_case("gated add", *cell, dtype, "backward", device)
            for batch, n, dim in shapes:
                for stage in ("forward", "backward"):
                    yield _score_case(batch, n, dim, dtype, stage, device)


CASES = list(_cases())

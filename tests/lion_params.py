"""Parameters, gradients and steps that the tests of Lion share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.launch import uses_triton
from onepass.ops.lion.definition import Row
from onepass.ops.lion.table import Columns, Plan, Scalars, pack_rows
from onepass.ops.lion.torch_path import update_

SHAPES = [(3, 4), (5,), (0,), (), (130, 300)]
# tiles and their neighbours, many tiles, and an odd number of them
GPU_SHAPES = [(3, 4), (5,), (0,), (), (1023,), (1024,), (1025,), (130, 300), (1 << 20,), (999_999,)]
# no 16-bit numbers are an exact tie with these
BETAS = (0.9137, 0.99)


def make_params(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, device: str = "cpu") -> list[Tensor]:
    return [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]


def clones(params: list[Tensor], dtype: torch.dtype | None = None, device: str | None = None) -> list[Tensor]:
    return [p.detach().to(device or p.device, dtype or p.dtype, copy=True).requires_grad_() for p in params]


def set_grads(*lists: list[Tensor], scale: float = 1.0) -> None:
    for group in zip(*lists, strict=True):
        g = torch.randn(group[0].shape, device=group[0].device)
        for p in group:
            p.grad = (g.to(group[0].dtype) * scale).to(p.device, p.dtype, copy=True)


def run(n: int, *pairs: tuple[torch.optim.Optimizer, list[Tensor]], scale: float = 1.0) -> None:
    for _ in range(n):
        set_grads(*(params for _, params in pairs), scale=scale)
        for optimizer, _ in pairs:
            optimizer.step()


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def assert_same_states(a: torch.optim.Optimizer, ps: list[Tensor], b: torch.optim.Optimizer, qs: list[Tensor]) -> None:
    for p, q in zip(ps, qs, strict=True):
        assert a.state[p].keys() == b.state[q].keys()
        for key, value in a.state[p].items():
            assert b.state[q][key].dtype == value.dtype
            assert torch.equal(b.state[q][key], value)


def update_lists_(
    params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], extras: list[Tensor], groups: list[int],
    rows: list[Row],
) -> None:  # fmt: skip
    """Update dense tensors of any dtype mix as a step does: in one launch on a GPU, else on the torch path."""
    if not uses_triton(params[0]):
        for i, k in enumerate(groups):
            update_([params[i]], [grads[i]], [momenta[i]], extras[i : i + 1], rows[k])
        return
    nothing, decay = [None] * len(params), any(row.cautious_decay for row in rows)
    plan = Plan(Columns(params, grads, momenta, extras or nothing, nothing), groups, [False] * len(params), decay)
    plan.refresh(grads)
    plan.step(pack_rows(rows), Scalars())

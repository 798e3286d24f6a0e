"""The layer of examples/sparse_attention.py: what it computes, what it sees, and what trains its indexer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import onepass
from examples import sparse_attention as EXAMPLE

SPARSE = ("window", "untrained", "distil", "gates", "both")


WIDTH, HEADS, DIM = 8, 2, 16


def layer(arm: str, k: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return EXAMPLE.SparseAttention(DIM, HEADS, k, arm).double()


def tokens(n: int, batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(batch, n, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rotated(x: Tensor) -> Tensor:
    """Heads (b, n, h, d), each divided by its root mean square and rotated as pairs (i, i + d/2)."""
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    half = x.shape[-1] // 2
    speeds = 10000.0 ** -(torch.arange(half) / half).float()
    angles = (torch.arange(x.shape[1], dtype=torch.float32)[:, None] * speeds)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def definition(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, distillation loss, full attention's weights (b, q, k) and the choice, from masks and sorting."""
    n, k = x.shape[1], module.k
    q, key, value = (x @ module.qkv.weight.T).split((HEADS * WIDTH, WIDTH, WIDTH), -1)
    q, key = rotated(q.unflatten(-1, (HEADS, WIDTH))), rotated(key[:, :, None])[:, :, 0]
    logits = torch.einsum("bthd,bjd->bhtj", q, key) / math.sqrt(WIDTH)
    seen = torch.arange(n) <= torch.arange(n)[:, None]
    full = logits.masked_fill(~seen, -torch.inf).softmax(-1).mean(1).detach()

    heads, width = EXAMPLE.INDEX_HEADS, EXAMPLE.INDEX_WIDTH
    i_q, i_k, w = module.indexer(x.detach()).split((heads * width, width, heads), -1)
    i_q, i_k = rotated(i_q.unflatten(-1, (heads, width))), rotated(i_k[:, :, None])[:, :, 0]
    scores = sum(
        w[:, :, None, h] * torch.einsum("btd,bjd->btj", i_q[:, :, h], i_k).clamp(min=0) for h in range(heads)
    ) / math.sqrt(heads * width)
    if module.arm == "window":
        chosen = seen & (torch.arange(n) > torch.arange(n)[:, None] - k).expand(len(x), -1, -1)
    else:
        order = scores.masked_fill(~seen, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :k], True) & seen
    gates = torch.ones_like(full)
    if module.arm in ("gates", "both"):
        soft = onepass.soft_topk(scores, k, eps=0.3, kind="sigmoid", mask=seen)
        gates = 1 + soft - soft.detach()
    weights = (logits + gates.log()[:, None]).masked_fill(~chosen[:, None], -torch.inf).softmax(-1)
    y = torch.einsum("bhtj,bjd->bthd", weights, value).flatten(2) @ module.out.weight.T
    divergence = torch.zeros((), dtype=x.dtype)
    if module.arm in ("distil", "both"):
        guess = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        ratio = (full.where(seen, 1) / guess.where(seen, 1)).log()
        divergence = (full * ratio).sum(-1).mean()
    return y, divergence, full, chosen


def gradients(of: Tensor, module: Any, x: Tensor) -> list[Tensor]:
    given = (x, *module.parameters())
    found = torch.autograd.grad(of, given, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(t) if grad is None else grad for t, grad in zip(given, found, strict=True)]


def close(found: Any, expected: Any) -> None:
    # full attention's weights are fp32 in the layer, and so are the cosines
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("arm", SPARSE)
@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 24), k=st.integers(1, 26), batch=st.integers(0, 3), seed=st.integers(0, 9))
def test_the_layer_is_its_definition(arm: str, n: int, k: int, batch: int, seed: int) -> None:
    x, module = tokens(n, batch, seed).requires_grad_(), layer(arm, k, seed)
    y, loss, _ = module(x)
    expected, divergence, _, _ = definition(module, x)
    close(y, expected)
    probe = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))
    close(gradients((y * probe).sum(), module, x), gradients((expected * probe).sum(), module, x))
    if batch and arm in ("distil", "both"):
        close(loss, divergence)
        close(gradients(loss, module, x), gradients(divergence, module, x))

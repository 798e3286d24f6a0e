"""Torch's ways of calling, in every way in which torch calls: as the same call on moved or flattened tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from harness import Module, outputs
from onepass.core.launch import INTERPRET

MASK, PER_ROW, W = torch.rand(5, 6) > 0.2, 0.1 + torch.rand(3, 6).double(), torch.randn(5, 6).double()
RAGGED = {"lengths": torch.tensor([[5, 4, 3, 2, 1, 0]]), "start": torch.tensor(0), "sorted": False}


def _norm(x: Tensor, norm: Callable[..., Any], **options: Any) -> Any:
    flat = [t.flatten(-2) for t in (x, W)]
    return [t.view(x.shape) for t in norm(flat[0], flat[1], residual=flat[0], **options)]


def _quantized(x: Tensor, *shape: Any) -> tuple[Tensor, ...]:
    (values, scales), s = onepass.rms_norm(x, *shape, residual=x, quantize="row")
    return values, scales, s


# (a call of x (3, 5, 6), the same of a last dimension)
CALLS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "topk": (
        lambda x: onepass.topk(x, 2, 1, False, True, eps=PER_ROW, mask=MASK),
        lambda x: [t.mT for t in onepass.topk(x.mT, 2, largest=False, eps=PER_ROW, mask=MASK.mT)],
    ),
    "topk, ranges": (
        lambda x: onepass.topk(x, 5, -2, ties="last", **RAGGED),
        lambda x: [t.mT for t in onepass.topk(x.mT, 5, ties="last", **RAGGED)],
    ),
    "soft_topk": (
        lambda x: onepass.soft_topk(x, PER_ROW + 1, dim=-2, mask=MASK),
        lambda x: onepass.soft_topk(x.mT, PER_ROW + 1, mask=MASK.mT).mT,
    ),
    "layer_norm": (
        lambda x: onepass.layer_norm(x, (5, 6), W, W, 0.1, residual=x),
        lambda x: _norm(x, onepass.layer_norm, bias=W.flatten(), eps=0.1),
    ),
    "rms_norm": (
        lambda x: onepass.rms_norm(x, [5, 6], W, offset=1.0, residual=x),
        lambda x: _norm(x, onepass.rms_norm, offset=1.0),
    ),
    "an int": (lambda x: onepass.layer_norm(x, 6, W[0], None, 0.1), lambda x: onepass.layer_norm(x, W[0], eps=0.1)),
    "8 bits": (
        lambda x: _quantized(x, (5, 6)),
        lambda x: [t if t.shape[-1] == 1 else t.view(x.shape) for t in _quantized(x.flatten(-2))],
    ),
}


WAYS: dict[str, Callable[[Callable[[Tensor], Any], Tensor], Any]] = {
    "eager": lambda call, x: call(x),
    "compile": lambda call, x: torch.compile(call, fullgraph=True, backend="aot_eager")(x),
    "export": lambda call, x: torch.export.export(Module(call), (x,)).module()(x),
    "vmap": lambda call, x: torch.vmap(call)(torch.stack([x, x])),
}


@pytest.mark.skipif(INTERPRET, reason="float64 never reaches a kernel")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_call(name: str, way: str) -> None:
    if (name, way) == ("8 bits", "vmap") and torch.__version__ < "2.13":
        pytest.skip("docs/norms.md: it needs torch 2.13")
    x = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    call, plain = CALLS[name]
    found, expected = outputs(WAYS[way](call, x)), outputs(plain(x))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a[1] if way == "vmap" else a, b)
    if way != "export":
        grads = (torch.autograd.grad(sum(t.sum() for t in ts if t.requires_grad), x) for ts in (found, expected))
        torch.testing.assert_close(next(grads)[0], next(grads)[0] * (2 if way == "vmap" else 1))


def test_a_single_number() -> None:
    s = torch.tensor(-3.0, requires_grad=True)
    top = onepass.topk(s, 1, dim=0)
    assert [t.tolist() for t in top] == [-3.0, 0, 1.0]
    assert torch.autograd.grad(top.values, s)[0] == 1
    assert onepass.soft_topk(s, 0.25, mask=torch.tensor(True)) == 0.25
    assert torch.vmap(lambda one: onepass.topk(one, 1).indices)(torch.ones(3)).tolist() == [0, 0, 0]

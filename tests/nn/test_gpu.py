"""Attention and routed layers on CUDA: float64's values, the same bits every time, no wait for the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nn.layers import first, tokens
from onepass.nn import CausalRouter, RoutedFeedForward, Router
from onepass.nn.local_attention import neighbours
from onepass.ops.span_attention.definition import reference, rotate
from onepass.ops.span_attention.op import rotary_attention, span_attention

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# relative to the largest value: rounding of inputs, of the probabilities and of the result
ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def _worst(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(((a.double() - e).abs().max() / e.abs().max()).item() for a, e in pairs)


def _mask(n: int) -> Tensor:
    mask = torch.rand(2, n, device="cuda") < 0.8
    mask[1, n // 2 :] = False
    return mask


@pytest.mark.parametrize(
    ("dtype", "width"),
    [*((dtype, 64) for dtype in DTYPES), *((torch.bfloat16, width) for width in (16, 40, 128)), (torch.float32, 40)],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_local_windows_of_several_tiles(dtype: torch.dtype, width: int, causal: bool, masked: bool) -> None:
    n = 700
    qkv = torch.randn(2, n, 3, 2, width, device="cuda").to(dtype).requires_grad_()
    first, last = neighbours(n, 100, causal, qkv.device)
    mask = _mask(n) if masked else None
    y = rotary_attention(qkv, first, last, mask=mask)
    dy = torch.randn_like(y)
    ours = y, *torch.autograd.grad(y, qkv, dy)
    exact = qkv.detach().double().requires_grad_()
    z = reference(*map(rotate, exact[:, :, :2].unbind(2)), exact[:, :, 2], first, last, mask=mask)
    assert _worst(ours, (z, *torch.autograd.grad(z, exact, dy.double()))) < ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefixes_of_different_rows(dtype: torch.dtype) -> None:
    """The shape of causal routing: each query sees the first few of one list of keys."""
    q, k, v = (torch.randn(2, n, 3, 64, device="cuda").to(dtype).requires_grad_() for n in (300, 530, 530))
    last = torch.randint(0, 531, (2, 300), device="cuda").sort(-1).values
    y = span_attention(q, k, v, torch.zeros_like(last), last)
    dy = torch.randn_like(y)
    ours = y, *torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
    again = torch.autograd.grad(y, (q, k, v), dy)
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], again, strict=True))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    z = reference(*exact, torch.zeros_like(last), last)
    assert _worst(ours, (z, *torch.autograd.grad(z, exact, dy.double()))) < ERROR[dtype]


@pytest.mark.parametrize("router", [Router, CausalRouter])
def test_no_synchronisation_with_the_host(router: type[Router]) -> None:
    layer = RoutedFeedForward(96, 1 / 16, router=router(96)).cuda()
    x, mask = tokens(3, 300, 96).cuda(), first(300, 10, 0, 300).cuda()
    layer(x, mask).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, mask).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

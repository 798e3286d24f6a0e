"""Attention and routed layers on CUDA: float64's values, the same bits every time, no wait for the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness import waiting_is_an_error
from nn.layers import first, tokens
from onepass.nn import CausalRouter, RoutedFeedForward, Router
from onepass.nn.local_attention import neighbours
from onepass.ops.span_attention.definition import reference
from onepass.ops.span_attention.op import span_attention

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
@pytest.mark.parametrize("spans", ["windows", "masked windows", "causal windows", "masked causal windows", "prefixes"])
def test_attention_over_several_tiles(dtype: torch.dtype, width: int, spans: str) -> None:
    """Prefixes have the shape of causal routing: each query sees the first few of one list of keys."""
    n, m = (300, 530) if spans == "prefixes" else (700, 700)
    q, k, v = (torch.randn(2, size, 3, width, device="cuda").to(dtype).requires_grad_() for size in (n, m, m))
    last = torch.randint(0, m + 1, (2, n), device="cuda").sort(-1).values
    first, mask = torch.zeros_like(last), _mask(m) if "masked" in spans else None
    if spans != "prefixes":
        first, last = neighbours(n, 100, "causal" in spans, q.device)
    y = span_attention(q, k, v, first, last, mask=mask)
    dy = torch.randn_like(y)
    ours = y, *torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
    assert all(map(torch.equal, ours[1:], torch.autograd.grad(y, (q, k, v), dy)))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    z = reference(*exact, first, last, mask=mask)
    assert _worst(ours, (z, *torch.autograd.grad(z, exact, dy.double()))) < ERROR[dtype]


@pytest.mark.parametrize("router", [Router, CausalRouter])
def test_no_synchronisation_with_the_host(router: type[Router]) -> None:
    layer = RoutedFeedForward(96, 1 / 16, router=router(96)).cuda()
    x, mask = tokens(3, 300, 96).cuda(), first(300, 10, 0, 300).cuda()
    layer(x, mask).sum().backward()
    with waiting_is_an_error():
        layer(x, mask).sum().backward()

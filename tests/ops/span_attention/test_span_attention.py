"""Several tiles of each kind; a query's result depends on no other query; angles against 50 decimal digits."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from nn.layers import tokens
from onepass.nn.local_attention import neighbours
from onepass.ops.span_attention.definition import reference
from onepass.ops.span_attention.op import forward, rotary, span_attention


def _windows(n: int, window: int, causal: bool) -> tuple[Tensor, Tensor]:
    i = torch.arange(n)
    start = i // window * window
    return start - window, i + 1 if causal else start + 2 * window


def _prefixes(n: int, m: int) -> tuple[Tensor, Tensor]:
    last = torch.randint(0, m + 1, (n,), generator=torch.Generator().manual_seed(2)).sort().values
    return torch.zeros_like(last), last


@pytest.mark.parametrize(("n", "m", "spans"), [
    pytest.param(300, 300, _windows(300, 64, True), id="causal windows"),
    pytest.param(300, 300, _windows(300, 128, False), id="windows of whole tiles"),
    pytest.param(200, 333, _prefixes(200, 333), id="prefixes"),
    pytest.param(130, 257, (torch.arange(130), torch.full((130,), 400)), id="beyond the end"),
])  # fmt: skip
def test_tiles_seen_whole_in_part_and_not_at_all(n: int, m: int, spans: tuple[Tensor, Tensor]) -> None:
    q, k, v = (tokens(1, rows, 1, 16, seed=rows).requires_grad_() for rows in (n, m, m + 1))
    v = v[:, :m]
    y = span_attention(q, k, v, *spans)
    dy = tokens(*y.shape, seed=3)
    ours = torch.autograd.grad(y, (q, k, v), dy)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    z = reference(*exact, *spans)
    torch.testing.assert_close(y.double(), z, rtol=1e-5, atol=1e-5)
    for ours_, theirs in zip(ours, torch.autograd.grad(z, exact, dy.double()), strict=True):
        torch.testing.assert_close(ours_.double(), theirs, rtol=2e-5, atol=2e-5)


# relative to the largest value: rounding of inputs, of the probabilities and of the result
ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def _worst(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(((a.double() - e).abs().max() / e.abs().max()).item() for a, e in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "width"),
    [*((dtype, 64) for dtype in ERROR), *((torch.bfloat16, width) for width in (16, 40, 128)), (torch.float32, 40)],
)
@pytest.mark.parametrize("spans", ["windows", "masked windows", "causal windows", "masked causal windows", "prefixes"])
def test_tiles_on_a_gpu(dtype: torch.dtype, width: int, spans: str) -> None:
    """Prefixes have the shape of causal routing: each query sees the first few of one list of keys."""
    n, m = (300, 530) if spans == "prefixes" else (700, 700)
    q, k, v = (torch.randn(2, size, 3, width, device="cuda").to(dtype).requires_grad_() for size in (n, m, m))
    last = torch.randint(0, m + 1, (2, n), device="cuda").sort(-1).values
    first, mask = torch.zeros_like(last), None
    if "masked" in spans:
        mask = torch.rand(2, m, device="cuda") < 0.8
        mask[1, m // 2 :] = False
    if spans != "prefixes":
        first, last = neighbours(n, 100, "causal" in spans, q.device)
    y = span_attention(q, k, v, first, last, mask=mask)
    dy = torch.randn_like(y)
    ours = y, *torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
    assert all(map(torch.equal, ours[1:], torch.autograd.grad(y, (q, k, v), dy)))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    z = reference(*exact, first, last, mask=mask)
    assert _worst(ours, (z, *torch.autograd.grad(z, exact, dy.double()))) < ERROR[dtype]


def _stepped(t: Tensor) -> Tensor:
    return torch.stack((t, t - 9), -1).flatten(-2)[..., ::2]


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "first shared": (lambda t: t[0], lambda t: t),
    "last shared": (lambda t: t, lambda t: t[0]),
    "one number": (lambda t: t[0, 0].expand(6), lambda t: t[1, 5].expand(6)),
    "one number for the batch": (lambda t: t[0, 0].expand(2, 6), lambda t: t),
    "one row": (lambda t: t[0].expand(2, 6), lambda t: t),
    "transposed": (lambda t: t.mT.contiguous().mT, lambda t: t),
    "stepped": (_stepped, _stepped),
    "stepped row": (lambda t: _stepped(t[0]), lambda t: _stepped(t[1])),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_runs_of_any_layout(name: str, dtype: torch.dtype) -> None:
    """Kernels read first and last by address, with one stride for both."""
    i = torch.arange(12, dtype=dtype).view(2, 6)
    first, last = (layout(t) for layout, t in zip(LAYOUTS[name], (i // 4, i // 3 + 2), strict=True))
    q, k, v, dy = (tokens(2, 6, 1, 16, seed=s) for s in range(4))
    ours, exact = ([t.to(d).requires_grad_() for t in (q, k, v)] for d in (torch.float32, torch.float64))
    y = span_attention(*ours, first, last)
    z = reference(*exact, first.expand(2, 6).contiguous(), last.expand(2, 6).contiguous())
    torch.testing.assert_close(y.double(), z, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(z, exact, dy.double())
    for a, e in zip(torch.autograd.grad(y, ours, dy), grads, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=2e-5, atol=2e-5)


def test_what_other_queries_see_changes_no_bit() -> None:
    """A later query that sees more keys adds tiles to the loop: of exact zeros for the earlier ones."""
    q, k, v = tokens(1, 100, 1, 16), tokens(1, 400, 1, 16, seed=2), tokens(1, 400, 1, 16, seed=3)
    first, last = torch.zeros(100, dtype=torch.int64), torch.arange(100)
    before = span_attention(q, k, v, first, last)
    last[60:] = 390
    assert torch.equal(span_attention(q, k, v, first, last)[:, :60], before[:, :60])


@pytest.mark.parametrize("value", [1e30, torch.inf, torch.nan])
def test_masked_keys_are_not_read(value: float) -> None:
    q, k, v = tokens(2, 20, 1, 16), tokens(2, 40, 1, 16, seed=2), tokens(2, 40, 1, 16, seed=3)
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(4)) < 0.6
    spans = torch.zeros(20, dtype=torch.int64), torch.full((20,), 40)
    before = span_attention(q, k, v, *spans, mask=mask)
    k[~mask], v[~mask] = value, value
    assert torch.equal(span_attention(q, k, v, *spans, mask=mask), before)


def test_large_scores_stay_in_range() -> None:
    q, k, v = (300 * tokens(1, 20, 1, 16, seed=s) for s in (1, 2, 3))
    spans = torch.zeros(20, dtype=torch.int64), torch.full((20,), 20)
    expected = reference(q.double(), k.double(), v.double(), *spans)
    torch.testing.assert_close(span_attention(q, k, v, *spans).double(), expected, rtol=1e-4, atol=1e-2)


def test_autocast_of_a_caller_rounds_nothing() -> None:
    """`forward` is called inside autograd nodes as well, where nobody has turned autocast off."""
    q, k, v = (tokens(2, 20, 1, 16, seed=s) for s in (1, 2, 3))
    spans = torch.zeros(1, 20, dtype=torch.int32), torch.full((1, 20), 20, dtype=torch.int32)
    expected = forward(q, k, v, *spans, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, forward(q, k, v, *spans, None), expected))


PI = Decimal("3.14159265358979323846264338327950288419716939937510")


@pytest.mark.parametrize("position", [3, 2**20, 10**8, -(10**8), 10**9])
def test_angles(position: int, device: str) -> None:
    width = 64
    with localcontext() as context:
        context.prec = 50
        speeds = [(Decimal(10_000).ln() * Decimal(-2 * c) / width).exp() for c in range(width // 2)]
        angles = torch.tensor([float(position * speed % (2 * PI)) for speed in speeds], dtype=torch.float64)
    x = torch.zeros(1, 1, 1, width, device=device)
    x[..., : width // 2] = 1
    y = rotary(x, torch.tensor([position], device=device))[0, 0, 0].cpu()
    # in fp64 the angle rounds with its size, a few times; in fp32 less than a turn rounds twice, its cosine a few times
    limit = 4 * abs(position) * torch.finfo(torch.float64).eps + 2**-23 * (4 + 3)
    assert (y.double() - torch.cat((angles.cos(), angles.sin()))).abs().max() <= limit

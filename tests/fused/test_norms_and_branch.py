"""fork: the same as norm, score and gather put together; what stands between the products of a feed-forward."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from onepass.core.launch import INTERPRET
from onepass.fused import branch
from onepass.fused.fork import Fork, fork
from onepass.fused.norms import norm_backward_into, norm_forward, norm_partials
from onepass.ops.routing import reference

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)

EPS = 1e-5


def _limits(device: str) -> tuple[torch.dtype, float]:
    """The kernels compute in fp32; what torch computes is compared in float64."""
    return (torch.float32, 2e-5) if device == "cuda" or INTERPRET else (torch.float64, 1e-12)


def _norm(x: Tensor, weight: Tensor | None) -> Tensor:
    n = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return n if weight is None else n * weight


def _close(ours: list[Tensor | None], theirs: list[Tensor | None], limit: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
            torch.testing.assert_close(a.detach().double(), b.detach().double(), rtol=limit, atol=limit * scale)


def _grads(outs: list[Tensor], inputs: list[Tensor], upstream: list[Tensor]) -> list[Tensor | None]:
    pairs = [(o, g.to(o)) for o, g in zip(outs, upstream, strict=True)]
    return list(torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True))


def _fork(x: Tensor, weight: Tensor | None, vectors: Tensor, ks: tuple[int, ...], dtype: torch.dtype) -> Fork:
    return fork(x, weight, vectors, eps=EPS, score_eps=1e-6, dtype=dtype, ks=ks)


@pytest.mark.parametrize("dim", [7, 64, 200, 1024, 1500, 2500] if not INTERPRET else [7, 200, 2500])
@pytest.mark.parametrize("vectors", ["one", "three"])
@pytest.mark.parametrize("with_weight", [True, False])
def test_fork_is_norm_score_and_gather(device: str, dim: int, vectors: str, with_weight: bool) -> None:
    dtype, limit = _limits(device)
    x = torch.randn(2, 9, dim, dtype=dtype, device=device, requires_grad=True)
    weight = torch.rand(dim, dtype=dtype, device=device, requires_grad=True) if with_weight else None
    shape = (dim,) if vectors == "one" else (3, dim)
    v = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    indices = torch.tensor([[3, -1, 0, 8], [5, 4, 1, -1]], device=device)
    others = torch.tensor([[0], [5]], device=device)
    f = _fork(x, weight, v, (4, 1), dtype)
    f.choice.indices = indices, others
    # a slot's gradient is that of the gathered tokens
    chosen, more = (torch.randn(2, k, dim, dtype=dtype, device=device) for k in (4, 1))
    ds = torch.randn_like(f.scores)
    ds[..., ::3] = 0
    upstream = [torch.randn_like(f.normed), ds, chosen, more]
    inputs = [t for t in (x, weight, v) if t is not None]
    ours = _grads([f.normed, f.scores, *f.slots], inputs, upstream)
    wide = {t: t.detach().double().requires_grad_() for t in inputs}
    x64, v64, w64 = wide[x], wide[v], wide[weight] if weight is not None else None
    outs = [_norm(x64, w64), reference.score(x64, v64), *(reference.gather(x64, i) for i in f.choice.indices)]
    _close([f.normed, f.scores], outs[:2], limit)
    _close(ours, _grads(outs, [*wide.values()], upstream), limit)


def test_the_slot_holds_no_memory(device: str) -> None:
    x, v = torch.randn(2, 40, 64, device=device), torch.randn(64, device=device)
    (slot,) = _fork(x, None, v, (20,), x.dtype).slots
    assert slot.shape == (2, 20, 64)
    assert slot.untyped_storage().nbytes() <= 8


@pytest.mark.parametrize("used", list(itertools.product([False, True], repeat=3))[1:])
def test_fork_takes_the_gradients_that_there_are(device: str, used: tuple[bool, bool, bool]) -> None:
    dtype, limit = _limits(device)
    x, v = (torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in ((2, 9, 32), (32,)))
    indices = torch.tensor([[3, 0], [5, -1]], device=device)
    f = _fork(x, None, v, (2,), dtype)
    f.choice.indices = (indices,)
    x64, v64 = x.detach().double().requires_grad_(), v.detach().double().requires_grad_()
    ours = [f.normed, f.scores, *f.slots]
    theirs = [_norm(x64, None), reference.score(x64, v64), reference.gather(x64, indices)]
    upstream = [torch.randn(o.shape, dtype=dtype, device=device) for o in theirs]
    ours, theirs, upstream = ([o for o, u in zip(t, used, strict=True) if u] for t in (ours, theirs, upstream))
    a, b = _grads(ours, [x, v], upstream), _grads(theirs, [x64, v64], upstream)
    # a gradient that autograd calls unused is one of zeros here
    _close([t if e is not None else None for t, e in zip(a, b, strict=True)], b, limit)


@pytest.mark.parametrize("masked", [False, True])
def test_the_probe_compares_lengths(device: str, masked: bool) -> None:
    """The length of each third dy, less the mean over the real ones of its sequence."""
    dtype, limit = _limits(device)
    mask = torch.ones(2, 10, dtype=torch.bool, device=device)
    mask[0, 6:] = False
    dy = torch.randn(2, 10, 32, dtype=dtype, device=device)
    explore_grad = branch.explore_gradient(dy, mask if masked else None, 3, -0.6)
    real = (mask if masked else torch.ones_like(mask))[:, ::3]
    lengths = dy[:, ::3].double().norm(dim=-1) * real
    expected = -0.6 * (lengths - lengths.sum(-1, keepdim=True) / real.sum(-1, keepdim=True)) * real
    _close([explore_grad], [expected], limit)


def test_what_the_probe_finds_teaches_the_vectors_alone(device: str) -> None:
    dtype, limit = _limits(device)
    x, v = (torch.randn(s, dtype=dtype, device=device) for s in ((2, 10, 32), (32,)))
    normed, scores, stats = norm_forward(x, None, None, v, EPS, 1e-6, dtype)
    dn, ds = torch.randn_like(normed), torch.randn_like(scores)
    explore_grad = torch.randn(2, 4, dtype=dtype, device=device)
    partials = norm_partials(x, 20, None, v)
    dx = norm_backward_into(partials, dn, x, None, None, v, stats, scores, ds, True, explore_grad, 3)
    x64, v64 = x.double().requires_grad_(), v.double().requires_grad_()
    outs = [_norm(x64, None), reference.score(x64, v64)]
    theirs = _grads(outs, [x64, v64], [dn, ds])
    (taught,) = torch.autograd.grad(reference.score(x64, v64)[:, ::3], v64, explore_grad.double())
    assert theirs[1] is not None
    _close([dx, partials.sum(0)[32:]], [theirs[0], theirs[1] + taught], limit)


@pytest.mark.parametrize("dim", [32, 2100])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_masked_tokens_are_zeros_whatever_they_hold(device: str, dim: int, value: float) -> None:
    """Their x, and the gradients that come in for them, even NaN."""
    dtype, limit = _limits(device)
    x, w = torch.randn(2, 9, dim, dtype=dtype, device=device), torch.rand(dim, dtype=dtype, device=device)
    v = torch.randn(2, dim, dtype=dtype, device=device)
    mask = torch.tensor([[True, False, True, True, True, False, True, True, False], [False] * 9], device=device)
    x[~mask] = value
    normed, scores, stats = norm_forward(x, None, w, v, EPS, 1e-6, dtype, mask)
    dn, ds = torch.randn_like(normed), torch.randn(2, 2, 9, dtype=dtype, device=device)
    dn[~mask], ds.mT[~mask] = value, value
    partials = norm_partials(x, 18, w, v)
    dx = norm_backward_into(partials, dn, x, None, w, v, stats, scores, ds, True, mask=mask)
    x64, w64, v64 = (t.double().requires_grad_() for t in (x, w, v))
    real = x64.masked_fill(~mask[..., None], 0)
    outs = [_norm(real, w64), reference.score(real, v64)]
    upstream = [dn.masked_fill(~mask[..., None], 0), ds.masked_fill(~mask[:, None], 0)]
    grads = _grads(outs, [x64, w64, v64], upstream)
    assert grads[1] is not None
    assert grads[2] is not None
    _close([normed, scores], outs, limit)
    _close([dx, partials.sum(0)], [grads[0], torch.cat((grads[1], grads[2].flatten()))], limit)


@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_cast_together(device: str, bias: bool) -> None:
    dtype = torch.float16
    shapes = [(40, 24), (40,), (24, 40), (24,), (96, 24), (96,), (24, 96), (24,)]
    weights = tuple(torch.randn(s, device=device) if bias or len(s) == 2 else None for s in shapes)
    for cast, w in zip(branch.cast(weights, dtype), weights, strict=True):
        assert (cast is None) == (w is None)
        if cast is not None and w is not None:
            assert torch.equal(cast, w.to(dtype))

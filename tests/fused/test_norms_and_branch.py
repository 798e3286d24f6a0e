"""What stands between the matrix products of routed layers: norms with scores, sums, casts, gates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass.core.launch import INTERPRET
from onepass.fused import branch, norms
from onepass.fused.choice import Choice, choose_keys
from onepass.ops.routing import definition

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)

EPS = 1e-5


def _limits(device: str) -> tuple[torch.dtype, float]:
    """The kernels compute in fp32; what torch computes is compared in float64."""
    return (torch.float32, 2e-5) if device == "cuda" or INTERPRET else (torch.float64, 1e-12)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _scores(x: Tensor, vectors: Tensor) -> Tensor:
    """The score's definition, with the routes first."""
    scores = definition.score(x, vectors)
    return scores if vectors.dim() == 1 else scores.transpose(0, 1)


def _close(ours: list[Tensor | None], theirs: list[Tensor | None], limit: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
            torch.testing.assert_close(a.detach().double(), b.detach().double(), rtol=limit, atol=limit * scale)


def _grads(outs: list[Tensor], inputs: list[Tensor], upstream: list[Tensor]) -> list[Tensor | None]:
    pairs = [(o, g.to(o)) for o, g in zip(outs, upstream, strict=True)]
    return list(torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True))


@pytest.mark.parametrize("dim", [7, 64, 200, 1024, 1500, 2500] if not INTERPRET else [7, 200, 2500])
@pytest.mark.parametrize("vectors", ["one", "three"])
@pytest.mark.parametrize("given", ["", "weight", "weight mask", "explored"])
def test_norm_and_scores(device: str, dim: int, vectors: str, given: str) -> None:
    """Of all tokens, with partials of the weight's and the vectors' gradients, and columns to spare.

    Masked tokens are zeros whatever they hold, and so are the gradients that come in for them. Explored tokens, each
    third, teach the first vector alone.
    """
    dtype, limit = _limits(device)
    x = torch.randn(2, 9, dim, dtype=dtype, device=device)
    weight = torch.rand(dim, dtype=dtype, device=device) if "weight" in given else None
    v = torch.randn((dim,) if vectors == "one" else (3, dim), dtype=dtype, device=device)
    real = torch.ones(2, 9, dtype=torch.bool, device=device)
    if "mask" in given:
        real[0, [1, 5, 8]], real[1], x[0, 1], x[0, 5], x[1] = False, False, torch.nan, torch.inf, torch.nan
    mask = real if "mask" in given else None
    way = norms.way(x, weight, v)
    normed, scores, stats = way.forward(x, None, mask, weight, v, EPS, 1e-6, dtype)
    dn, ds = torch.randn_like(normed), torch.randn_like(scores)
    ds[..., ::3] = 0
    dn[~real], ds[..., ~real] = torch.nan, torch.inf
    explored = torch.randn(2, 3, dtype=dtype, device=device) if given == "explored" else None
    partials = x.new_empty(way.programs(x, 18), dim + v.numel() + 5)
    (dx,) = way.backward(dn, x, None, mask, weight, v, stats, scores, ds, explored, 3, True, partials, None)
    x64, v64 = (t.double().requires_grad_() for t in (x, v))
    w64, seen = (x64.new_ones(dim) if weight is None else weight.double()), x64.masked_fill(~real[..., None], 0)
    outs = [_norm(seen, w64.requires_grad_()), _scores(seen, v64)]
    upstream = [dn.masked_fill(~real[..., None], 0), ds.masked_fill(~real, 0)]
    of_x, of_w, of_v = _grads(outs, [x64, w64, v64], upstream)
    assert of_w is not None
    assert of_v is not None
    if explored is not None:
        pushed = definition.score(x64, v64.view(-1, dim)[0])[:, ::3]
        of_v = of_v + torch.autograd.grad(pushed, v64, explored.double())[0]
    found = partials[:, :-5].sum(0)
    _close([normed, scores, dx, found], [*outs, of_x, torch.cat((of_w, of_v.flatten()))], limit)


def test_norm_of_chosen_tokens(device: str) -> None:
    """Indices that name no token give zeros and no gradient; the partials may be some columns of a wider buffer."""
    dtype, limit = _limits(device)
    x, w = torch.randn(2, 9, 64, dtype=dtype, device=device), torch.rand(64, dtype=dtype, device=device)
    indices = torch.tensor([[3, -1, 0, 8], [5, 4, 1, -1]], device=device)
    way = norms.way(x, w, None)
    normed, scores, stats = way.forward(x, indices, None, w, None, EPS, 0.0, dtype)
    assert scores is None
    dn = torch.randn_like(normed)
    partials = x.new_empty(way.programs(x, 18), 128)
    (dx,) = way.backward(dn, x, indices, None, w, None, stats, None, None, None, 1, True, partials[:, 64:], None)
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    out = _norm(definition.gather(x64, indices), w64)
    (dw,) = torch.autograd.grad(out, w64, dn.double(), retain_graph=True)
    chosen = definition.gather(x64, indices).detach().requires_grad_()
    (rows,) = torch.autograd.grad(_norm(chosen, w64), chosen, dn.double())
    _close([normed, partials[:, 64:].sum(0)], [out, dw], limit)
    _close([dx * (indices >= 0)[..., None]], [rows * (indices >= 0)[..., None]], limit)


@pytest.mark.parametrize("masked", [False, True])
def test_the_probe_compares_lengths(device: str, masked: bool) -> None:
    """The length of each third dy, less the mean over the real ones of its sequence."""
    dtype, limit = _limits(device)
    mask = torch.ones(2, 10, dtype=torch.bool, device=device)
    mask[0, 6:] = False
    dy = torch.randn(2, 10, 32, dtype=dtype, device=device)
    explore_grad = branch.steps(dy).explore_gradient(dy, mask if masked else None, 3, -0.6)
    real = (mask if masked else torch.ones_like(mask))[:, ::3]
    lengths = dy[:, ::3].double().norm(dim=-1) * real
    expected = -0.6 * (lengths - lengths.sum(-1, keepdim=True) / real.sum(-1, keepdim=True)) * real
    _close([explore_grad], [expected], limit)


@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_cast_together(device: str, bias: bool) -> None:
    dtype = torch.float16
    shapes = [(40, 24), (40,), (24, 40), (24,), (96, 24), (96,), (24, 96), (24,)]
    weights = tuple(torch.randn(s, device=device) if bias or len(s) == 2 else None for s in shapes)
    for cast, w in zip(branch.cast(weights, dtype), weights, strict=True):
        assert (cast is None) == (w is None)
        if cast is not None and w is not None:
            assert torch.equal(cast, w.to(dtype))


@pytest.mark.parametrize("heads", [(1, 6), (2, 16), (8, 64)])
def test_gated_values(device: str, heads: tuple[int, int]) -> None:
    """Values are half of a packed projection; backward overwrites the gradient of the gated ones."""
    dtype, limit = _limits(device)
    kv, dkv = (torch.randn(2, 5, 2, *heads, dtype=dtype, device=device) for _ in range(2))
    gates = torch.rand(2, 5, dtype=dtype, device=device)
    v, dv = kv.select(2, 1), dkv.select(2, 1)
    expected = v.double() * gates.double()[..., None, None]
    of_gates, of_values = (dv.double() * v.double()).sum((2, 3)), dv.double() * gates.double()[..., None, None]
    keys, steps = dkv.select(2, 0).clone(), branch.steps(v)
    _close([steps.gate(v, gates), steps.gate_backward(dv, v, gates)], [expected, of_gates], limit)
    _close([dv], [of_values], limit)
    assert torch.equal(dkv.select(2, 0), keys)


@pytest.mark.parametrize("n", [12, 14])
def test_keys_of_each_window(device: str, n: int) -> None:
    """Of each window of four its two best; a query sees those of the windows before its own, a missing one all."""
    scores = torch.randn(2, n, device=device)
    mask = torch.ones(2, n, dtype=torch.bool, device=device)
    mask[0, 1:4] = False
    at_q = torch.tensor([[0, 5, 11], [4, -1, -1]], device=device)
    gates, indices, _, within, seen = choose_keys(scores, mask, Choice(2, 0.1, 0, False), at_q, 4)
    windows = -(-n // 4)
    assert indices.shape == (2, 2 * windows)
    assert gates.shape == (2 * windows, 2)
    assert within is not None
    assert seen is not None
    for row in range(2):
        for window in range(windows):
            real = [i for i in range(4 * window, min(n, 4 * window + 4)) if mask[row, i]]
            best = sorted(real, key=lambda i: -float(scores[row, i]))[:2]
            assert indices[row, 2 * window : 2 * window + 2].tolist() == best + [-1] * (2 - len(best))
    assert seen[0].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert seen[1].tolist() == [[0, 2, 4], [2, 2 * windows, 2 * windows]]


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_rows_and_the_rounded_copy(device: str, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 40, device=device)
    partials = branch.new_partials(x, rows, 50)
    assert partials is not None
    partials.zero_()
    (copy,) = branch.steps(x).column_sums(x, partials, 7, None if dtype == x.dtype else dtype)
    copy = x if copy is None else copy
    if INTERPRET and dtype == torch.bfloat16:
        # Triton's interpreter cuts digits off where GPUs round
        torch.testing.assert_close(copy.float(), x, rtol=2**-7, atol=0)
    else:
        assert torch.equal(copy, x.to(dtype))
    sums = branch.steps(x).total(partials)
    expected = torch.zeros(50, dtype=torch.float64, device=device)
    expected[7:47] = copy.double().sum(0)
    # each sum of n terms of size 1 is off by less than n·2⁻²⁴ times the sum of their sizes
    bound = rows * 2.0**-24 * float(copy.double().abs().sum(0).max())
    torch.testing.assert_close(sums.double(), expected, rtol=0, atol=bound)

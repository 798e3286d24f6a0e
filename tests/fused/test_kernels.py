"""Kernels of routed layers and of decoding: norms and counts alone, layers and steps against their modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from nn.layers import outputs
from onepass.core.launch import INTERPRET
from onepass.fused import decoding, norms
from onepass.fused.choice import row_counts
from onepass.nn import RoutedAttention, RoutedBlock, RoutedFeedForward, Router, TransformerBlock
from onepass.ops.causal_choice.definition import fraction
from onepass.ops.routing import definition as routing

WHERE = [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("share", [1 / 16, 0.1, 0.5, 0.575, 1.0])
@pytest.mark.parametrize("n", [1, 7, 1024, 2500])
def test_counts(device: str, share: float, n: int) -> None:
    from onepass.fused import kernels

    mask = torch.rand(5, 2 * n, generator=torch.Generator().manual_seed(1))[:, ::2] < 0.6
    mask[0], mask[1] = True, False
    mask = mask.to(device)
    assert torch.equal(kernels.counts(mask, fraction(share)).long(), row_counts(share, mask).clamp_min(1))


LAYERS: dict[str, Callable[[], Any]] = {
    "soft": lambda: RoutedFeedForward(32, 0.2, router=Router(32, gate="soft")),
    "a count, no bias": lambda: RoutedFeedForward(32, 5, bias=False, router=Router(32, gate="straight_through")),
    "straight through": lambda: RoutedFeedForward(32, 0.3, router=Router(32, gate="straight_through")),
    "attention": lambda: RoutedAttention(32, 0.2, 0.3, heads=1, dim_head=6, window=8),
    "causal attention": lambda: RoutedAttention(32, 0.2, 0.5, heads=8, dim_head=64, window=4, causal=True),
}


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("name", LAYERS)
def test_a_whole_layer(device: str, name: str, half: bool) -> None:
    """By kernels, in fp32 or added in it to half-precise branches, beside float64: outputs, choices and gradients."""
    torch.manual_seed(3)
    here = LAYERS[name]().to(device)
    there, x = copy.deepcopy(here).cpu().double(), torch.randn(3, 40, 32)
    mask = torch.arange(40) < torch.tensor([[40]] * 3 if "count" in name else [[40], [13], [0]])
    found: list[tuple[list[Tensor], list[Tensor]]] = []
    for layer, tokens, real in ((here, x.to(device), mask.to(device)), (there, x.double(), mask)):
        tokens.requires_grad_()
        y, chosen = layer.fused(tokens, real, torch.float16 if half and layer is here else tokens.dtype, half)
        grads = torch.autograd.grad(y.square().sum(), [tokens, *layer.parameters()])
        choices = outputs(chosen)
        numbers = [y, *(choice.gates for choice in choices), *grads]
        found.append(([choice.indices.cpu() for choice in choices], [t.detach().cpu().double() for t in numbers]))
    (indices, ours), (expected, exact) = found
    assert all(map(torch.equal, indices, expected))
    for a, b in zip(ours, exact, strict=True):
        most = 2e-2 * max(1.0, float(b.abs().max())) if half else 1e-4
        torch.testing.assert_close(a, b, rtol=1e-4, atol=most)


def test_shapes_without_memory(device: str, causal: bool) -> None:
    """FakeTensors take no kernel, under Triton's interpreter neither."""
    outs = []
    for mode in (FakeTensorMode(), torch.device("cpu")):
        with mode, torch.device(device if isinstance(mode, FakeTensorMode) else "cpu"):
            block = RoutedBlock(32, 1 / 8, heads=2, dim_head=16, window=16, causal=causal).eval()
            outs.append(tree_leaves(block(torch.randn(2, 73, 32), return_routing=True)))
    assert {t.device.type for t in outs[0]} == {device}
    found, expected = ([(t.shape, t.stride(), t.dtype) for t in some] for some in outs)
    assert found == expected


# the first has heads and widths that fill no tile
SIZES: list[dict[str, Any]] = [
    {"dim": 24, "k": 0.5, "heads": 3, "light_heads": 4, "dim_head": 6, "window": 8, "bias": False},
    {"dim": 64, "k": 1 / 4, "heads": 2, "dim_head": 32, "window": 16},
]


@torch.no_grad()
@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize(("size", "rows"), [(SIZES[0], 3), (SIZES[1], 1)], ids=["odd", "even"])
def test_a_step(device: str, size: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After prompts whose windows end at different times; a window is given within the steps."""
    torch.manual_seed(rows)
    block = RoutedBlock(**size, causal=True).to(device).eval()
    nn.init.normal_(block.attention.null)
    x = torch.randn(rows, 26, size["dim"], device=device)
    mask = torch.arange(20, device=device) < torch.tensor([20, 7, 13][:rows], device=device)[:, None]
    found, calls, attention = [], [], decoding.attention

    def counted(*args: Any) -> torch.Tensor:
        calls.append(len(found))
        return attention(*args)

    for kernels in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "attention", counted)
            if not kernels:
                patch.setattr(decoding, "fits", lambda x: False)
            cache = block.new_cache(rows, 64)
            block(x[:, :20], mask, cache=cache)
            steps = torch.cat([block(x[:, i : i + 1], cache=cache) for i in range(20, 26)], 1)
        found.append({"steps": steps, **cache.state_dict()})
    assert calls == [0] * 6
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("window", [8, None])
def test_a_step_of_a_transformer_block(device: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads that fill no tile; all tokens have their keys in two parts, and steps cross from one to the other."""
    block = TransformerBlock(24, heads=3, dim_head=6, window=window, causal=True).to(device).eval()
    nn.init.uniform_(block.attention.q_weight, 0.5, 1.5)
    nn.init.uniform_(block.attention.k_weight, 0.5, 1.5)
    x, found = torch.randn(2, 516, 24, device=device), []
    for kernels in (True, False):
        with monkeypatch.context() as patch:
            if not kernels:
                patch.setattr(decoding, "fits", lambda x: False)
            cache = block.new_cache(2, 600)
            block(x[:, :508], cache=cache)
            steps = torch.cat([block(x[:, i : i + 1], cache=cache) for i in range(508, 516)], 1)
        found.append({"steps": steps, **cache.state_dict()})
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(steps, block(x)[:, 508:], rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("device", WHERE)
def test_a_token_that_comes_again_ties_with_itself(device: str) -> None:
    """Of two tokens in turns, the scores are the thresholds: a last bit would choose another query.

    At this width the kernels of the full forward add up in another order. The feed-forward takes all tokens: its
    scores follow attention, which repeats itself after a window to rounding, not to the last bit.
    """
    torch.manual_seed(3)
    block = RoutedBlock(320, 1.0, k_q=1 / 4, k_kv=1 / 2, heads=2, dim_head=8, window=8, heavy_mult=0.5, causal=True)
    block = block.to(device).eval()
    x = torch.randn(1, 2, 320).repeat(1, 12, 1).to(device)
    cache = block.new_cache(1, 24)
    block(x[:, :13], cache=cache)
    steps = torch.cat([block(x[:, i : i + 1], cache=cache) for i in range(13, 24)], 1)
    assert len(cache.attention.queries.scores.unique()) == 3  # two, and none in the columns that are not used
    torch.testing.assert_close(steps, block(x)[:, 13:], rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_many_keys(dtype: torch.dtype, routed: bool) -> None:
    """Every token chosen, so that no choice hangs on rounding; far keys in several parts; beside float64."""
    block: Any = TransformerBlock(256, causal=True)
    if routed:
        block = RoutedBlock(256, 1.0, heads=4, dim_head=64, window=128, causal=True)
    block = block.to("cuda", dtype).eval()
    x = torch.randn(2, 2100, 256, device="cuda", dtype=dtype)
    cache = block.new_cache(2, 2100)
    block(x[:, :2040], cache=cache)
    steps = torch.cat([block(x[:, i : i + 1], cache=cache) for i in range(2040, 2100)], 1)
    expected = block.double()(x.double())[:, 2040:]
    assert (steps.double() - expected).norm() / expected.norm() < (0.01 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("dim", [7, 200, 2500] if INTERPRET else [7, 64, 200, 1024, 1500, 2500])
@pytest.mark.parametrize("vectors", ["one", "three"])
@pytest.mark.parametrize("given", ["", "weight", "weight mask", "explored"])
def test_norm_and_scores(device: str, dim: int, vectors: str, given: str) -> None:
    """Of all tokens, with partials of the weight's and the vectors' gradients, and columns to spare.

    Masked tokens are zeros whatever they hold, and so are the gradients that come in for them. Explored tokens, each
    third, teach the first vector alone. Kernels compute in fp32; what torch computes is compared in float64.
    """
    kernels = device == "cuda" or INTERPRET
    dtype, limit = (torch.float32, 2e-5) if kernels else (torch.float64, 1e-12)
    x = torch.randn(2, 9, dim, dtype=dtype, device=device)
    weight = torch.rand(dim, dtype=dtype, device=device) if "weight" in given else None
    v = torch.randn((dim,) if vectors == "one" else (3, dim), dtype=dtype, device=device)
    real = torch.ones(2, 9, dtype=torch.bool, device=device)
    if "mask" in given:
        real[0, [1, 5, 8]], real[1], x[0, 1], x[0, 5], x[1] = False, False, torch.nan, torch.inf, torch.nan
    mask = real if "mask" in given else None
    way = norms.way(x, weight, v)
    normed, scores, stats = way.forward(x, None, mask, weight, v, 1e-5, 1e-6, dtype)
    dn, ds = torch.randn_like(normed), torch.randn_like(scores)
    ds[..., ::3] = 0
    dn[~real], ds[..., ~real] = torch.nan, torch.inf
    explored = torch.randn(2, 3, dtype=dtype, device=device) if given == "explored" else None
    partials = x.new_empty(way.programs(x, 18), dim + v.numel() + 5)
    (dx,) = way.backward(dn, x, None, mask, weight, v, stats, scores, ds, explored, 3, True, partials, None)
    x64, v64 = (t.double().requires_grad_() for t in (x, v))
    w64 = (x64.new_ones(dim) if weight is None else weight.double()).requires_grad_()
    seen = x64.masked_fill(~real[..., None], 0)
    y64, s64 = seen * (seen.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w64, routing.score(seen, v64)
    s64 = s64 if vectors == "one" else s64.transpose(0, 1)  # the routes first
    upstream = dn.double().masked_fill(~real[..., None], 0), ds.double().masked_fill(~real, 0)
    of_x, of_w, of_v = torch.autograd.grad([y64, s64], [x64, w64, v64], upstream)
    if explored is not None:
        pushed = routing.score(x64, v64.view(-1, dim)[0])[:, ::3]
        of_v = of_v + torch.autograd.grad(pushed, v64, explored.double())[0]
    found, expected = [normed, scores, dx, partials[:, :-5].sum(0)], [y64, s64, of_x, torch.cat((of_w, of_v.flatten()))]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=limit, atol=limit * max(1.0, float(b.detach().abs().max())))

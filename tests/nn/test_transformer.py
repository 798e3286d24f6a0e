"""`TransformerBlock` against its definition in float64; `test_contracts.py` has what every layer owes PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nn.layers import attend, holes, rms, tokens, turned
from onepass.nn import Experts, TransformerBlock, graphed
from onepass.nn.transformer import Sequences

DIM, N = 32, 40
shapes = pytest.mark.parametrize(("window", "causal"), [(None, False), (None, True), (8, False), (8, True), (1, True)])


def block(window: int | None = 8, causal: bool = False, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(2)
    made = TransformerBlock(DIM, **{"dim_head": 16, **options}, window=window, causal=causal, dtype=dtype)
    for weight in (made.attention.q_weight, made.attention.k_weight, made.attention.norm.weight):
        nn.init.uniform_(weight, 0.5, 1.5)
    return made


def defined(made: TransformerBlock, x: Tensor, mask: Tensor) -> Tensor:
    """One sequence (n, dim), with full matrices; masked tokens count as zeros."""
    part, at = made.attention, torch.arange(len(x))
    x = x * mask[:, None]
    q, k, v = part.qkv(rms(x, part.norm.weight)).view(len(x), 3, part.heads, -1).unbind(1)
    q, k = (
        turned(t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w, at)
        for t, w in ((q, part.q_weight), (k, part.k_weight))
    )
    window = len(x) if part.window is None else part.window
    seen = ((at // window)[:, None] - at // window).abs() <= 1
    seen = (seen.tril() if part.causal else seen) & mask
    h = x + part.out(attend(q, k, v, seen))
    part, u = made.feed_forward, rms(h * mask[:, None], made.feed_forward.norm.weight)
    if not isinstance(part, Experts):
        up = made.feed_forward.up(rms(h, part.norm.weight))
        return h + part.down(up * (1 + torch.erf(up / math.sqrt(2))) / 2)
    scores = (u @ part.router.weight.T).sigmoid()
    chosen = (scores.topk(part.top_k).values[:, -1:] <= scores) * mask[:, None]
    weights = scores * chosen / (scores * chosen).sum(-1, keepdim=True).clamp_min(1e-30)
    up = torch.einsum("nd,edh->neh", u, part.up)
    up = up / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return h + torch.einsum("ne,neh,ehd->nd", weights, up, part.down)


def results(y: Tensor, x: Tensor, made: nn.Module) -> list[Tensor]:
    up = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, [x, *made.parameters()], up)]


@shapes
@pytest.mark.parametrize("options", [{"hidden_dim": 24}, {"heads": 3}, {"num_experts": 5, "hidden_dim": 8}])
def test_values_and_gradients_are_those_of_the_definition(
    window: int | None, causal: bool, masked: bool, options: dict[str, Any]
) -> None:
    made, x = block(window, causal, **options), tokens(3, N, DIM, dtype=torch.float64).requires_grad_()
    mask = holes(N) if masked else torch.ones(3, N, dtype=torch.bool)
    expected = torch.stack([defined(made, row, real) for row, real in zip(x, mask, strict=True)])
    y, routing = made(x, mask if masked else None, return_routing=True)
    assert (routing is not None) == ("num_experts" in options)
    torch.testing.assert_close(results(y, x, made), results(expected, x, made), rtol=1e-9, atol=1e-9)


def test_bounds_of_whole_packed_sequences_are_those_given() -> None:
    packed = Sequences(*torch.zeros(3, 9, dtype=torch.int32))
    assert block(None).attention.spans(9, packed.begin, packed) == packed[1:], "the same tensors"


@pytest.mark.gpu
@shapes
def test_a_graph_repeats_forward_and_backward(window: int | None, causal: bool) -> None:
    made, x = block(window, causal, torch.float32).cuda(), tokens(2, 300, DIM).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        run = graphed(made, x)
        for seed in (3, 4):
            x = tokens(2, 300, DIM, seed=seed).cuda()
            grads = [torch.autograd.grad(way(x).square().sum(), list(made.parameters())) for way in (run, made)]
            torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-2)

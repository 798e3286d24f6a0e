"""Faults 5, 6 and 8 of the public routing library by name.

Masked tokens are selected, gradients have the wrong sign for negative scores, the default router gets no gradient.
2, 5 and 7 of a block are in `test_block.py`; 1 (cross-attention) and 3 (several routes read other sequences) would
fail `test_every_layer.py`, 4 (later tokens count) `test_causal.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass.nn import Router

DIM = 16


def _tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("gate", ["soft", "straight_through"])
@pytest.mark.parametrize("routes", [1, 2])
def test_fault_5_masked_tokens_are_never_selected(gate: str, routes: int) -> None:
    router = Router(DIM, routes, gate=gate)
    x = _tokens(6, 40, DIM)
    # the tokens that would be chosen first are the masked ones
    best = router(x, 8).indices.view(6, -1)
    mask = torch.ones(6, 40, dtype=torch.bool).scatter(1, best, False)
    out = router(x, 8, mask)
    chosen = out.indices.view(6, -1)
    assert (chosen >= 0).all()
    assert mask.gather(1, chosen).all()


@pytest.mark.parametrize("gate", ["soft", "straight_through"])
@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
def test_fault_6_a_higher_score_opens_the_gate_whatever_its_sign(gate: str, shift: float) -> None:
    """Also when all scores are negative, pushing one up opens its own gate and no other."""
    router = Router(DIM, gate=gate).double()
    direction = router.weight.detach()[0] / router.weight.detach().norm()
    x = _tokens(1, 20, DIM).double()
    x = x + shift * direction
    out = router(x, 6)
    if shift:
        assert (out.scores.sign() == torch.tensor(shift).sign()).all()
    for j in range(6):
        (d,) = torch.autograd.grad(out.gates[0, j], out.scores, retain_graph=True)
        own = d[0, out.indices[0, j]].item()
        assert own >= 0
        # what one gate gains the others lose: no gate grows with another token's score
        assert (torch.cat([d[0, : out.indices[0, j]], d[0, out.indices[0, j] + 1 :]]) <= 1e-12).all()
    (total,) = torch.autograd.grad(out.gates.sum(), out.scores)
    assert total.abs().max() > 0


def test_fault_6_the_router_learns_to_open_a_gate_that_helps_from_negative_scores() -> None:
    """A step along the gradient for "more of token i" raises the score of token i, also when it is negative."""
    router = Router(DIM)
    x = _tokens(1, 40, DIM)
    with torch.no_grad():
        x -= 3 * router.weight / router.weight.norm()
    out = router(x, 8)
    assert (out.scores < 0).all()
    barely = int(out.indices[0, -1])
    (step,) = torch.autograd.grad(out.gates[0, -1], router.weight)
    with torch.no_grad():
        router.weight += 0.1 * step
    after = router(x, 8)
    margin = (out.scores[0, barely] - out.scores[0].mean(), after.scores[0, barely] - after.scores[0].mean())
    assert margin[1] > margin[0]


@pytest.mark.parametrize("gate", ["soft", "straight_through"])
def test_fault_8_the_default_router_gets_a_gradient_from_the_first_step(gate: str) -> None:
    """The published default's is exactly 0 at this size: every selected gate is saturated."""
    for seed in range(3):
        torch.manual_seed(seed)
        router = Router(512, gate=gate)
        x = torch.randn(2, 4096, 512)
        out = router(x, 256)
        # a random preference for some of the chosen tokens, as a loss has it at the start
        upstream = torch.randn(2, 256)
        (d_scores,) = torch.autograd.grad(out.gates, out.scores, upstream, retain_graph=True)
        (grad,) = torch.autograd.grad(out.gates, router.weight, upstream)
        assert grad.norm() > 0.1
        # a good part of the chosen tokens takes part, not a lucky few
        assert (d_scores.gather(1, out.indices) != 0).float().mean() > 0.25

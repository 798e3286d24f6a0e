"""The choice by the past: the definition against lists, long rows against the definition; what must not matter."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from nn.layers import tokens
from onepass.core.launch import INTERPRET
from onepass.ops.causal_choice.definition import reference
from onepass.ops.causal_choice.op import causal_choice

EPS = 0.3


def _mask(*shape: int) -> Tensor:
    """Row 0 is whole, the last one has no token."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[0], mask[-1] = True, False
    return mask


@pytest.mark.skipif(INTERPRET, reason="no kernel runs")
@pytest.mark.parametrize("density", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("k", [1, 5, 16, 64, 0.05, 0.3, 1.0])
@pytest.mark.parametrize(
    ("n", "block", "memory"), [(61, 8, 16), (64, 8, 64), (45, 8, 8), (40, 1, 7), (5, 8, 8), (8, 8, 8), (1, 4, 4)]
)
def test_rank_and_budget_by_lists(n: int, block: int, memory: int, k: int | float, density: float) -> None:
    """Token by token: rank and budget count the real tokens so far. A number k is a share, and a limit."""
    k = k if isinstance(k, float) else min(k, n)
    scores, mask = tokens(4, n), torch.rand(4, n, generator=torch.Generator().manual_seed(8)) < density
    indices, _ = causal_choice(scores, k, block=block, memory=memory, mask=mask if density < 1 else None)
    share = Fraction(k).limit_denominator(1 << 20) if isinstance(k, float) else Fraction(k, n)
    for b, row in enumerate(scores.tolist()):
        taken: list[int] = []
        for i in range(n):
            start = i // block * block
            past = range(max(0, start - memory), start) if start else range(i)
            known = sorted((row[j] for j in past if mask[b, j]), reverse=True)
            rank = math.floor(len(known) * share)
            above = rank >= len(known) or row[i] > known[rank]
            budget = math.ceil((int(mask[b, :start].sum()) + block) * share)
            if mask[b, i] and above and len(taken) < (budget if isinstance(k, float) else min(k, budget)):
                taken.append(i)
        assert [int(i) for i in indices[b] if i >= 0] == taken


@pytest.mark.parametrize("n", [9, 61] if INTERPRET else [1, 7, 8, 9, 24, 40, 61])
def test_a_share_knows_no_length(n: int, device: str) -> None:
    """What a prefix chooses is what the whole chooses there, and padding at the end changes nothing."""
    scores, sizes = tokens(3, 80).to(device), {"eps": EPS, "block": 8, "memory": 16}
    whole, prefix = causal_choice(scores, 0.21, **sizes), causal_choice(scores[:, :n], 0.21, **sizes)
    mask = (torch.arange(80, device=device) < n).expand(3, 80)
    padded = causal_choice(scores, 0.21, mask=mask, **sizes)
    for b in range(3):
        count = int((prefix.indices[b] >= 0).sum())
        assert count == int(((whole.indices[b] >= 0) & (whole.indices[b] < n)).sum())
        for other in (whole, padded):
            assert torch.equal(prefix.indices[b, :count], other.indices[b, :count])
            assert torch.equal(prefix.gates[b, :count], other.gates[b, :count])
        assert not (padded.indices[b, count:] >= 0).any()


def _gradient(choice: tuple[Tensor, Tensor], scores: Tensor) -> Tensor:
    gates = choice[1]
    return torch.autograd.grad((gates * tokens(*gates.shape, seed=2).to(gates)).sum(), scores)[0]


def _compare(scores: Tensor, k: int | float, block: int, memory: int, mask: Tensor | None) -> None:
    """What the kernels do with these scores, against the definition in fp64 of the same scores."""
    sizes = {"eps": EPS, "block": block, "memory": memory}
    mine, wide = scores.clone().requires_grad_(), scores.double().requires_grad_()
    actual, expected = causal_choice(mine, k, mask=mask, **sizes), reference(wide, k, mask=mask, **sizes)
    assert torch.equal(actual.indices, expected[0])
    torch.testing.assert_close(actual.gates.double(), expected[1], rtol=0, atol=1e-6)
    grad = _gradient(expected, wide)
    torch.testing.assert_close(
        _gradient(actual, mine).double(), grad, rtol=0, atol=1e-6 * max(1.0, float(grad.abs().max()))
    )


@pytest.mark.interpret
def test_walks_in_several_steps_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more blocks than one step of a walk takes, at a length that the interpreter can bear."""
    from onepass.ops.causal_choice import kernels

    monkeypatch.setattr(kernels, "STEP", 4)
    monkeypatch.setattr(kernels, "TILE", 8)
    _compare(tokens(1, 60), 25, 4, 8, None)
    _compare(tokens(3, 60), 0.4, 4, 8, _mask(3, 60))
    _compare(tokens(2, 12), 5, 1, 7, None)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "n", "k", "block", "memory", "masked"), [
    (2, 12, 5, 1, 7, True), (2, 8192, 512, 128, 2048, False), (3, 8190, 512, 128, 2048, True),
    (2, 65536, 4096, 128, 2048, True),
    (2, 4000, 3999, 64, 8192, False), (2, 5000, 700, 1024, 1024, True), (2, 20000, 300, 8, 64, False),
    (1, 1 << 20, 1 << 16, 128, 2048, False), (3, 8190, 1 / 16, 128, 2048, True), (2, 5000, 700, 2048, 2048, True),
    (2, 20000, 900, 512, 1 << 14, False),  # as the one before, of sizes that no kernel takes
])  # fmt: skip
def test_kernels_on_gpu(batch: int, n: int, k: int | float, block: int, memory: int, masked: bool) -> None:
    mask = _mask(batch, n).cuda() if masked else None
    _compare(tokens(batch, n).cuda(), k, block, memory, mask)
    # scores that tie, and have zeros of both signs
    _compare((tokens(batch, n) * 2).round().cuda() * 0.5, k, block, memory, mask)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_scores_that_are_no_numbers(device: str, value: float) -> None:
    """They end, and choose what the definition chooses."""
    scores = tokens(2, 40)
    scores[0, ::3] = value
    scores[1] = value
    sizes = {"eps": EPS, "block": 8, "memory": 16}
    mine = scores.to(device).requires_grad_()
    actual = causal_choice(mine, 10, **sizes)
    expected = reference(scores.double(), 10, **sizes)
    assert torch.equal(actual.indices.cpu(), expected[0])
    torch.testing.assert_close(actual.gates.detach().cpu().double(), expected[1], rtol=0, atol=1e-6)
    assert _gradient(actual, mine).isfinite().all() or not math.isfinite(value)


def test_an_infinite_score_concerns_the_gradient_of_later_blocks_alone(device: str) -> None:
    """The mean that the gates of its own block follow is of the blocks before."""
    scores, sizes = tokens(1, 24, seed=3), {"eps": EPS, "block": 4, "memory": 8}
    scores[0, 5] = math.inf
    mine, wide = scores.to(device).requires_grad_(), scores.double().requires_grad_()
    actual, expected = (_gradient(causal_choice(s, 12, **sizes), s) for s in (mine, wide))
    assert expected[0, :4].any()
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=1e-5)


def test_what_lies_in_masked_tokens_is_not_read(device: str) -> None:
    mask = _mask(3, 40).to(device)
    found = []
    for filler in (0.0, math.nan):
        scores = tokens(3, 40).to(device).masked_fill(~mask, filler).requires_grad_()
        choice = causal_choice(scores, 10, block=8, memory=16, mask=mask)
        found.append((*choice, _gradient(choice, scores)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert not found[0][2][~mask].any()


def test_a_threshold_of_nan_is_one_of_infinity() -> None:
    """Nothing exceeds it, and the scores that met it keep their numbers for gradients."""
    scores = torch.randn(1, 64)
    scores[0, 10] = math.nan
    scores.requires_grad_()
    chosen = causal_choice(scores, 4, block=8, memory=16)
    (ds,) = torch.autograd.grad(chosen.gates.sum(), scores)
    assert (chosen.indices < 64).all()
    assert ds.isnan().nonzero().tolist() == [[0, 10]]

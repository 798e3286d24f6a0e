"""topk(ties="last"): among equal scores the higher index, with every other option, beside Python's sort."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import onepass
from onepass.core.launch import INTERPRET

N = 24
START, LENGTHS = torch.tensor([0, 5, 20]), torch.tensor([24, 9, 2], dtype=torch.int32)


def scores(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of few different scores, with NaN and both infinities."""
    s = torch.randint(-2, 3, (3, N), generator=torch.Generator().manual_seed(0)).to(dtype)
    s[0, ::7], s[1, 3::4], s[2, 1] = math.nan, -math.inf, math.inf
    return s


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRET else [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("k", [0, 1, 6, 30])
def test_beside_a_sort(k: int, dtype: torch.dtype) -> None:
    s, mask = scores(dtype), torch.rand(3, N, generator=torch.Generator().manual_seed(1)) > 0.3
    bools = (True, False)
    for largest, is_sorted, ranged, masked, start in itertools.product(bools, bools, bools, bools, bools):
        given: dict[str, Any] = {"mask": mask} if masked else {}
        if ranged:
            given |= {"start": START} if start else {"lengths": LENGTHS}
            given |= {"lengths": LENGTHS} if masked else {}
        top = onepass.topk(s, k, ties="last", largest=largest, sorted=is_sorted, pad=True, **given)
        for row in range(3):
            first = START[row].item() if "start" in given else 0
            last = first + LENGTHS[row].item() if "lengths" in given else N
            signed = [x if largest else -x for x in s[row].tolist()]
            order = [j for j in range(first, last) if signed[j] != -math.inf and (not masked or mask[row, j])]
            best = sorted(order, key=lambda j: (math.isnan(signed[j]), 0 if signed[j] != signed[j] else signed[j], j))
            chosen = best[::-1][:k] if is_sorted else sorted(best[::-1][:k])
            assert top.indices[row].tolist() == chosen + [-1] * (k - len(chosen))
            missing = [-math.inf if largest else math.inf] * (k - len(chosen))
            values = torch.tensor([*s[row, chosen].tolist(), *missing], dtype=dtype)
            torch.testing.assert_close(top.values[row], values, rtol=0, atol=0, equal_nan=True)
            assert (top.gates[row] != 0).sum() == len(chosen)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_gradients_out_vmap_and_compile(is_sorted: bool) -> None:
    s = scores().nan_to_num(1.0, -3.0, 3.0).requires_grad_()

    def call(s: torch.Tensor) -> Any:
        return tuple(onepass.topk(s, 6, ties="last", sorted=is_sorted, lengths=LENGTHS, index_dtype=torch.int32))

    values, indices, gates = call(s)
    (values * torch.arange(18.0).view(3, 6) + gates * 2).sum().backward()
    flipped = s.detach().flip(-1).requires_grad_()
    first = onepass.topk(flipped, 6, lengths=LENGTHS, start=N - LENGTHS)
    weight = torch.zeros(3, N + 1).scatter(1, indices.long() % (N + 1), torch.arange(18.0).view(3, 6))[:, :N].flip(-1)
    weight = weight.gather(1, first.indices.clamp(min=0))
    (first.values * weight * (first.indices >= 0)).nan_to_num(0.0, 0.0, 0.0).sum().backward(retain_graph=True)
    (first.gates * 2).sum().backward()
    torch.testing.assert_close(s.grad, flipped.grad.flip(-1))
    with torch.no_grad():
        out = torch.empty(3, 6), torch.empty(3, 6, dtype=torch.int32)
        onepass.topk(s, 6, ties="last", sorted=is_sorted, lengths=LENGTHS, index_dtype=torch.int32, out=out)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(s)
        mapped = torch.vmap(lambda s: tuple(onepass.topk(s, 6, ties="last", sorted=is_sorted)))(s)
        for a, b in ((out[0], values), (out[1], indices), (compiled[1], indices)):
            assert torch.equal(a, b)
        assert torch.equal(mapped[1], onepass.topk(s, 6, ties="last", sorted=is_sorted).indices)


@pytest.mark.parametrize("ties", ["first", "last"])
def test_windows_that_begin_far_before_their_row(ties: str) -> None:
    """Ranges that the host doesn't see are cut to the row: here the 40 scores up to each of 8."""
    place = torch.arange(8)

    def select(s: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return onepass.topk(s, 8, start=start, lengths=torch.tensor(40), ties=ties, sorted=False).indices

    assert torch.equal(torch.vmap(select)(torch.randn(8, 8), place - 39) >= 0, place <= place[:, None])


@pytest.mark.parametrize("ties", ["first", "last"])
def test_no_start_is_too_far_before_its_row(ties: str) -> None:
    start = torch.tensor([-(1 << 63), -(1 << 62) - 5, -(1 << 62), -1])
    most = torch.tensor([1 << 62, 1 << 62, 1 << 62, 3])

    def select(s: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return onepass.topk(s, 4, **dict(zip(("start", "lengths"), given, strict=False)), ties=ties).indices

    assert (torch.vmap(select)(torch.randn(4, 4), start) >= 0).all()
    assert (torch.vmap(select)(torch.randn(4, 4), start, most) >= 0).sum(-1).tolist() == [0, 0, 0, 2]

"""`RoutedBlock`: attention and feed-forward on the residual stream; faults of the public library by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nn.layers import first, outputs, tokens, watched
from onepass.nn import RoutedBlock

DIM, WINDOW = 12, 8


def _block(causal: bool = False, k: float = 1 / 4, **kwargs: Any) -> RoutedBlock:
    torch.manual_seed(2)
    return RoutedBlock(DIM, k, heads=2, dim_head=6, window=WINDOW, causal=causal, **kwargs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_each_half_is_added_to_the_residual_stream(causal: bool, masked: bool, autocast: bool) -> None:
    """Inside the halves' nodes; a hook on a half sees its own output."""
    block, x = _block(causal), tokens(40, 3, DIM).transpose(0, 1).requires_grad_()
    mask = first(40, 40, 20, 0) if masked else None
    found, seen, limit = [], [], 2e-2 if autocast else 1e-5
    for hooked in (False, True):
        if hooked:
            for half in (block.attention, block.feed_forward):
                half.register_forward_hook(lambda _, __, y: seen.append(y))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, routing = block(x, mask, return_routing=True)
        loss = (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() + routing.attention.q.gates.sum()
        found.append([y, *torch.autograd.grad(loss, [x, *block.parameters()])])
    (h, attention), (f, feed_forward) = seen
    assert torch.equal(y, x + h + f)
    for a, b in zip(outputs(routing), outputs((attention, feed_forward)), strict=True):
        assert torch.equal(a.indices, b.indices)
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        scale = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit * max(scale, 1e-3))


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"k": 1 / 16}, (1 / 16, 1 / 16, 1 / 8)),
        ({"k": 0.75}, (0.75, 0.75, 1.0)),
        ({"k": 6}, (6, 6, 12)),
        ({"k": 6, "k_q": 3, "k_kv": 5}, (6, 3, 5)),
        ({"k": 0.5, "k_q": 3}, (0.5, 3, 1.0)),
    ],
)
def test_how_many_each_half_chooses(kwargs: dict[str, Any], expected: tuple[float, ...]) -> None:
    block = _block(**kwargs)
    assert (block.feed_forward.k, block.attention.k_q, block.attention.k_kv) == expected


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("n", [16, 20, 3])
def test_fault_2_of_the_public_library_block_wise_routing_raises_index_error(n: int, hooked: bool) -> None:
    """Keys of each window are its own. Others of its eight are in `test_router.py`, which says where the rest is."""
    layer, x, mask = _block(True).attention, tokens(3, n, DIM), first(n, n, n // 2, 0)
    if hooked:
        watched(layer)
    kv = layer(x, mask, return_routing=True)[1].kv
    at, gates = (t.view(3, -(-n // WINDOW), -1) for t in (kv.indices, kv.gates))
    for window, start in enumerate(range(0, n, WINDOW)):
        alone = layer.router_kv(x[:, start : start + WINDOW], layer.quota(n), mask[:, start : start + WINDOW])
        there, chosen = alone.indices >= 0, at[:, window] >= 0
        assert torch.equal(at[:, window][chosen], alone.indices[there] + start)
        torch.testing.assert_close(gates[:, window][chosen], alone.gates[there])

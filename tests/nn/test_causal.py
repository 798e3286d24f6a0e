"""The rules that choose without looking ahead; that nothing later counts is in `test_contracts.py`."""

from __future__ import annotations

import pytest
import torch

from nn.layers import tokens
from onepass.nn import CausalRouter, RoutedAttention, RoutedBlock, Router
from onepass.nn.causal import choose_per_block

DIM, WINDOW = 16, 8


def test_a_later_window_reads_what_earlier_ones_chose() -> None:
    """Causality is not bought by looking at nothing: far tokens do reach later ones."""
    torch.manual_seed(3)
    layer = RoutedAttention(DIM, 1 / 4, 1 / 4, heads=2, dim_head=8, window=WINDOW, causal=True).double()
    x = tokens(1, 10 * WINDOW, DIM).double().requires_grad_()
    y, routing = layer(x, return_routing=True)
    last = int(routing.q.indices.max())
    assert last >= 3 * WINDOW
    (grad,) = torch.autograd.grad(y[0, last].sum(), x)
    far = grad[0, : (last // WINDOW - 1) * WINDOW].abs().sum(-1)
    chosen = routing.kv.indices[0]
    assert (far[chosen[chosen < len(far)]] > 0).all()


class TestCausalRouter:
    @pytest.mark.parametrize("shift", [0, 3])
    def test_the_share_is_kept_on_a_long_sequence(self, shift: int) -> None:
        """The threshold follows: no score level is special."""
        router = CausalRouter(64)
        direction = router.weight.detach()[0] / router.weight.detach()[0].norm()
        out = router(tokens(2, 8192, 64) - shift * direction, 512)
        assert not shift or (out.scores < 0).float().mean() > 0.9
        assert ((out.indices >= 0).sum(-1) >= 0.9 * 512).all()

    def test_every_chosen_gate_has_a_gradient(self) -> None:
        router = CausalRouter(64).double()
        out = router(tokens(2, 1024, 64).double(), 64)
        found = out.indices >= 0
        assert (out.gates[found] > 0.5).all()
        (grad,) = torch.autograd.grad(out.gates.sum(), out.scores)
        chosen = grad.gather(1, out.indices.clamp_min(0))
        # a token without a past has no threshold: its gate is 1
        assert (chosen[found & (out.indices > 0)] > 0).all()

    @pytest.mark.parametrize(("window", "memory"), [(1, 2048), (48, 2016), (128, 2048), (2048, 2048), (3000, 3000)])
    def test_a_layer_remembers_whole_windows(self, window: int, memory: int) -> None:
        block = RoutedBlock(16, 1 / 4, heads=2, dim_head=8, window=window, causal=True)
        assert block.feed_forward.router.memory == memory
        assert block.attention.router_q.memory == memory
        assert block(torch.randn(1, 100, 16)).isfinite().all()


def test_choice_per_block_is_each_blocks_own() -> None:
    router, x = Router(DIM), tokens(2, 21, DIM)
    out = choose_per_block(router, x, 3, 8, None)
    assert out.indices.shape == (2, 9)
    for b in range(2):
        for block in range(3):
            alone = router(x[b : b + 1, block * 8 : (block + 1) * 8], 3)
            own = out.indices[b, block * 3 : block * 3 + 3]
            assert torch.equal(own, alone.indices[0] + block * 8)
            torch.testing.assert_close(out.gates[b, block * 3 : block * 3 + 3], alone.gates[0])

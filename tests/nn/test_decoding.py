"""One token after another: the choices of the full forward, its outputs to rounding, whatever the length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from onepass.nn import CausalRouter, RoutedBlock, Router, decoding
from onepass.nn.block import BlockRouting
from onepass.nn.decoding import BlockCache

DIM, WINDOW = 16, 8


def _block(k: float = 1 / 4, *, seed: int = 0, memory: int = 2 * WINDOW, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(seed)
    block = RoutedBlock(DIM, k, heads=2, dim_head=8, window=WINDOW, causal=True)
    nn.init.normal_(block.attention.null)
    # thresholds forget as soon as a sequence of a test allows
    block.attention.router_q = CausalRouter(DIM, block=WINDOW, memory=memory)
    block.feed_forward.router = CausalRouter(DIM, block=WINDOW // 2, memory=memory)
    return block.to(dtype).eval()


def _tokens(batch: int, n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, n, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _gates(routing: Any, n: int) -> Tensor:
    """Gates (batch, n) of all tokens, 0 for those that are not chosen."""
    dense = routing.gates.new_zeros(len(routing.gates), n + 1)
    return dense.scatter_(1, routing.indices % (n + 1), routing.gates)[:, :n]


def _stepped(block: RoutedBlock, x: Tensor, cache: BlockCache) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, gates of queries, gates of the feed-forward."""
    found = []
    for i in range(x.shape[1]):
        y = block.step(x[:, i], cache)
        found.append((y, cache.attention.queries.gates, cache.feed_forward.gates))
    y, q, f = (torch.stack(part, 1) for part in zip(*found, strict=True))
    return y, q, f


def _same_keys(cache: BlockCache, routing: BlockRouting, n: int) -> None:
    """The remembered keys are those of the windows that are whole."""
    chosen, attention = routing.attention.kv.indices, cache.attention
    quota = chosen.shape[1] // -(-n // WINDOW)
    assert attention.count == n // WINDOW * quota
    assert torch.equal(attention.at[:, : attention.count], chosen[:, : attention.count])


def _compare(block: Any, x: Tensor, tolerance: float, prefilled: int = 0) -> None:
    n, batch = x.shape[1], len(x)
    cache = block.new_cache(batch)
    expected, routing = block(x, return_routing=True)
    parts = []
    if prefilled:
        parts.append(block.prefill(x[:, :prefilled], cache))
        assert cache.position == prefilled
    if prefilled < n:
        y, q, f = _stepped(block, x[:, prefilled:], cache)
        parts.append(y)
        for gates, output in ((q, routing.attention.q), (f, routing.feed_forward)):
            of_all = _gates(output, n)[:, prefilled:]
            assert torch.equal(gates > 0, of_all > 0)
            torch.testing.assert_close(gates, of_all, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=tolerance, atol=tolerance)
    assert cache.position == n
    _same_keys(cache, routing, n)


@settings(max_examples=60, deadline=None)
@given(
    k=st.sampled_from((1 / 16, 0.1, 0.25, 0.5, 1.0)),
    batch=st.integers(1, 3),
    n=st.integers(1, 70),
    memory=st.sampled_from((WINDOW, 2 * WINDOW, 8 * WINDOW)),
    wide=st.booleans(),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_steps_equal_the_full_forward(
    k: float, batch: int, n: int, memory: int, wide: bool, seed: int, data: st.DataObject
) -> None:
    dtype = torch.float64 if wide else torch.float32
    block = _block(k, seed=seed, memory=memory, dtype=dtype)
    tolerance = 1e-10 if wide else 1e-4
    _compare(block, _tokens(batch, n, seed, dtype), tolerance, data.draw(st.integers(0, n), label="prefilled"))


@pytest.mark.parametrize("n", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 5 * WINDOW, 5 * WINDOW + 3])
@pytest.mark.parametrize("prefilled", [0, 1, WINDOW, 2 * WINDOW + 1])
def test_edges_of_windows(n: int, prefilled: int) -> None:
    _compare(_block(), _tokens(2, n, 3), 1e-10, min(n, prefilled))


def test_default_routers_and_a_longer_sequence() -> None:
    torch.manual_seed(1)
    block = RoutedBlock(DIM, 1 / 16, heads=2, dim_head=8, window=32, causal=True).double().eval()
    x = _tokens(1, 700, 4)
    cache = block.new_cache(1)
    steps = torch.stack([block.step(x[:, i], cache) for i in range(700)], 1)
    torch.testing.assert_close(steps, block(x), rtol=1e-10, atol=1e-10)


def test_a_cache_does_not_grow_with_every_token() -> None:
    """Of the past it keeps two windows, and a share of the rest."""
    block, sizes = _block(1 / 16, memory=WINDOW), []
    x = _tokens(1, 2048, 5)
    for n in (1024, 2048):
        cache = block.new_cache(1)
        block.prefill(x[:, :n], cache)
        assert cache.attention.count == n // WINDOW
        sizes.append(cache.nbytes)
    dense = 1024 * 2 * DIM * 8
    # one key of a window of 8, with its position; memory is set aside in powers of two
    assert sizes[1] - sizes[0] <= dense / 8 + 1024 // WINDOW * 8


def test_heavy_branches_on_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does: rows that are not chosen run along and add 0."""
    monkeypatch.setattr(decoding, "chosen_rows", lambda gates: slice(None))
    _compare(_block(), _tokens(3, 45, 7), 1e-10)


def test_no_step_plans_for_its_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's attention does, for milliseconds."""
    seen = []
    attention = F.scaled_dot_product_attention

    def recorded(*tensors: Tensor) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*tensors)

    monkeypatch.setattr("onepass.nn.decoding.F.scaled_dot_product_attention", recorded)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    block = _block()
    block.step(_tokens(2, 1, 0)[:, 0], block.new_cache(2))
    assert seen
    assert not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_no_gradient_is_kept() -> None:
    block, x = _block(), _tokens(2, 3, 6).requires_grad_()
    assert not block.step(x[:, 0], block.new_cache(2)).requires_grad


def test_an_empty_prompt_and_no_sequence() -> None:
    block = _block()
    cache = block.new_cache(2)
    assert block.prefill(_tokens(2, 0, 1), cache).shape == (2, 0, DIM)
    assert cache.position == 0
    assert block.step(_tokens(2, 1, 1)[:, 0], cache).shape == (2, DIM)
    assert block.step(_tokens(0, 1, 1)[:, 0], block.new_cache(0)).shape == (0, DIM)


def _whole_number() -> Any:
    return RoutedBlock(DIM, 4, heads=2, dim_head=8, window=WINDOW, causal=True)


def _other_router() -> Any:
    block = _block()
    block.feed_forward.router = Router(DIM)
    return block


@pytest.mark.parametrize(
    ("run", "error", "match"),
    [
        (lambda: _whole_number().new_cache(1), TypeError, "RoutedAttention: decoding needs k_q as a share.*the int 4"),
        (
            lambda: RoutedBlock(DIM, 0.25, heads=2, dim_head=8).new_cache(1),
            ValueError,
            "RoutedBlock: decoding needs causal=True",
        ),
        (lambda: _other_router().new_cache(1), TypeError, "needs a CausalRouter as router, got Router"),
        (lambda: _block().new_cache(1.0), TypeError, "batch must be an int, got float"),
        (lambda: _block().new_cache(-1), ValueError, "batch must be ≥ 0, got -1"),
        (
            lambda: _block().step(torch.ones(3, DIM).double(), _block().new_cache(2)),
            ValueError,
            r"RoutedAttention: step takes x as \(batch, dim\) = \(2, 16\), got \(3, 16\)",
        ),
    ],
)
def test_what_is_refused(run: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        run()


def test_a_used_cache_takes_no_prompt() -> None:
    block = _block()
    cache = block.new_cache(1)
    block.step(_tokens(1, 1, 1)[:, 0], cache)
    with pytest.raises(ValueError, match="prefill needs a new cache, got one of 1 tokens"):
        block.prefill(_tokens(1, 4, 1), cache)


@pytest.mark.gpu
@pytest.mark.parametrize("prefilled", [0, 300])
def test_steps_on_gpu(prefilled: int) -> None:
    """The kernels' forward and the steps choose alike in fp32; a tie within rounding would be a different sequence."""
    torch.manual_seed(2)
    block = RoutedBlock(256, 1 / 16, heads=4, dim_head=64, window=64, causal=True).cuda().eval()
    x = torch.randn(2, 512, 256, device="cuda")
    with torch.no_grad():
        expected, routing = block(x, return_routing=True)
    cache = block.new_cache(2)
    parts = [block.prefill(x[:, :prefilled], cache)] if prefilled else []
    y, q, f = _stepped(block, x[:, prefilled:], cache)
    for gates, output in ((q, routing.attention.q), (f, routing.feed_forward)):
        assert torch.equal(gates > 0, _gates(output, 512)[:, prefilled:] > 0)
    torch.testing.assert_close(torch.cat([*parts, y], 1), expected, rtol=2e-3, atol=2e-3)

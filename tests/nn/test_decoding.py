"""One token after another: the choices of the full forward, its outputs to rounding, whatever the length."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nn.layers import first, tokens
from onepass.nn import CausalRouter, RoutedBlock, Router, TransformerBlock
from onepass.nn.cache import BlockCache

DIM, WINDOW = 16, 8


def _block(k: float = 1 / 4, *, seed: int = 0, memory: int = 16, dtype: Any = torch.float64, router: Any = None) -> Any:
    torch.manual_seed(seed)
    block = RoutedBlock(DIM, k, heads=2, dim_head=8, window=WINDOW, causal=True)
    nn.init.normal_(block.attention.null)
    # thresholds forget as soon as a sequence of a test allows
    block.attention.router_q = CausalRouter(DIM, block=WINDOW, memory=memory)
    block.feed_forward.router = router or CausalRouter(DIM, block=WINDOW // 2, memory=memory)
    return block.to(dtype).eval()


def _tokens(batch: int, n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return tokens(batch, n, DIM, seed=seed, dtype=torch.float64).to(dtype)


@torch.no_grad()
def _stepped(block: Any, x: Tensor, cache: BlockCache) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, gates of queries, gates of the feed-forward."""
    found = []
    for i in range(x.shape[1]):
        y, routing = block(x[:, i : i + 1], cache=cache, return_routing=True)
        found.append((y, routing.attention.q.gates, routing.feed_forward.gates))
    y, q, f = (torch.cat(part, 1) for part in zip(*found, strict=True))
    return y, q, f


def _compare(block: Any, x: Tensor, tolerance: float, prefilled: int = 0) -> None:
    n, batch = x.shape[1], len(x)
    cache = block.new_cache(batch)
    expected, routing = block(x, return_routing=True)
    parts = []
    if prefilled:
        parts.append(block(x[:, :prefilled], cache=cache))
        assert not parts[0].requires_grad
        assert cache.position == prefilled
    if prefilled < n:
        y, q, f = _stepped(block, x[:, prefilled:], cache)
        parts.append(y)
        for gates, output in ((q, routing.attention.q), (f, routing.feed_forward)):
            # of all tokens, 0 for those that are not chosen
            of_all = gates.new_zeros(batch, n + 1).scatter_(1, output.indices % (n + 1), output.gates)[:, prefilled:n]
            assert torch.equal(gates > 0, of_all > 0)
            torch.testing.assert_close(gates, of_all, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=tolerance, atol=tolerance)
    assert cache.position == n


@settings(max_examples=60, deadline=None)
@given(
    k=st.sampled_from((1 / 16, 0.1, 0.25, 0.5, 1.0)), batch=st.integers(1, 3), n=st.integers(1, 70), data=st.data(),
    memory=st.sampled_from((WINDOW, 2 * WINDOW, 8 * WINDOW)), wide=st.booleans(), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_steps_equal_the_full_forward(
    k: float, batch: int, n: int, memory: int, wide: bool, seed: int, data: st.DataObject
) -> None:
    dtype = torch.float64 if wide else torch.float32
    block = _block(k, seed=seed, memory=memory, dtype=dtype)
    tolerance = 1e-10 if wide else 1e-4
    _compare(block, _tokens(batch, n, seed, dtype), tolerance, data.draw(st.integers(0, n), label="prefilled"))


def test_a_prompt_of_which_one_query_is_chosen_is_no_step() -> None:
    block = _block(1 / 16)
    block.attention.light.register_forward_hook(lambda module, inputs, y: None)
    _compare(block, _tokens(2, 20, 5), 1e-10, WINDOW + 4)


def _doubled(module: nn.Module, inputs: Any, out: Any) -> Any:
    return (out[0] * 2, out[1]) if isinstance(out, tuple) else out * 2


def _doubled_input(module: nn.Module, inputs: Any) -> Any:
    return (inputs[0] * 2, *inputs[1:])


@pytest.mark.parametrize("hook", [_doubled, _doubled_input])
def test_hooks_run_in_steps(hook: Any) -> None:
    """Of every module inside: a step and a prompt run what the full forward runs."""
    x = _tokens(2, 40, 8)
    for name, _ in _block().named_modules():
        block = _block()
        module = block.get_submodule(name)
        if hook is _doubled and not isinstance(module, Router):
            module.register_forward_hook(hook)
        else:
            module.register_forward_pre_hook(_doubled_input)
        cache = block.new_cache(2)
        y = torch.cat([block(x[:, :20], cache=cache), _stepped(block, x[:, 20:], cache)[0]], 1)
        torch.testing.assert_close(y, block(x), rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", ["", "attention", "attention.light", "attention.heavy", "feed_forward"])
def test_a_forward_of_ones_own_is_refused(name: str) -> None:
    block, x = _block(), _tokens(1, 1, 0)
    cache, module = block.new_cache(1), block.get_submodule(name)
    forward = module.forward
    module.forward = forward
    with pytest.raises(TypeError, match=f"decoding needs {name or 'itself'} to be a .*overridden"):
        # a step would run the block's own forward
        block(x, cache=cache) if name else block.new_cache(1)


def test_a_cache_is_copied_saved_moved_and_read_by_a_compiled_block() -> None:
    block, x = _block(), _tokens(2, 30, 9)
    torch._dynamo.reset()  # what it has compiled before leaves it a program of nothing
    block(x[:, :13], cache=(cache := block.new_cache(2, 64)))
    twin, moved, loaded = copy.deepcopy(cache), copy.deepcopy(cache).to("cpu"), block.new_cache(2, 64)
    loaded.load_state_dict(cache.state_dict())
    compiled = torch.compile(block, backend=lambda *_: pytest.fail("a step's program holds how many tokens there are"))
    calls = (block, moved), (block, loaded), (block, twin), (compiled, copy.deepcopy(cache))
    with block.feed_forward.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        block(x[:, 13:14], cache=loaded)
    with pytest.raises(ValueError, match="a step raised halfway, and some of its choices are counted: make a new"):
        block(x[:, 13:14], cache=loaded)
    loaded.load_state_dict(cache.state_dict())
    expected = _stepped(block, x[:, 13:], cache)[0]
    for call, other in calls:
        assert other.position == 13
        assert torch.equal(_stepped(call, x[:, 13:], other)[0], expected)


def test_no_sequence_reaches_another() -> None:
    block, x = _block(), _tokens(3, 30, 10)
    outputs = []
    for _ in range(2):
        cache = block.new_cache(3)
        outputs.append(torch.cat([block(x[:, :9], cache=cache), _stepped(block, x[:, 9:], cache)[0]], 1))
        x[1] = float("nan")
    assert torch.equal(outputs[0][::2], outputs[1][::2])


@pytest.mark.parametrize(
    ("run", "error", "match"),
    [(lambda: _block(4).new_cache(1), TypeError, "RoutedBlock: decoding needs k_q as a share.*the int 4"),
     (lambda: RoutedBlock(DIM, 0.25).new_cache(1), ValueError, "RoutedBlock: decoding needs causal=True"),
     (lambda: TransformerBlock(DIM, dim_head=8).new_cache(1), ValueError, "TransformerBlock: decoding needs causal"),
     (lambda: _block(router=Router(DIM)).new_cache(1), TypeError,
      "needs feed_forward.router to be a CausalRouter, got Router"),
     (lambda: _block().new_cache(1.0), TypeError, "batch must be an int, got float"),
     (lambda: _block().new_cache(0), ValueError, "batch must be ≥ 1, got 0"),
     (lambda: _block().new_cache(1, 0), ValueError, "max_tokens must be ≥ 1, got 0")],
)  # fmt: skip
def test_blocks_that_cannot_decode(run: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        run()


# tokens read before, the next ones, and how many of each sequence are real
REFUSED: list[tuple[int, Tensor, list[int] | None, type[Exception], str]] = [
    (0, _tokens(3, 4, 1), None, ValueError, "the cache holds 2 sequences, got 3"),
    (0, _tokens(2, 65, 1), None, ValueError, "the cache holds max_tokens = 64 tokens, got token 65"),
    (64, _tokens(2, 1, 1), None, ValueError, "max_tokens = 64 tokens, got token 65"),
    (0, _tokens(2, 4, 1), [2, 0], ValueError, "mask must be True at its first tokens, at least one"),
    (0, _tokens(2, 4, 1), [4, 4, 4], ValueError, r"mask must be \(batch, n\) = \(2, 4\)"),
    (4, _tokens(2, 4, 1), [2, 5], ValueError, "a prompt needs a new cache, got one of 4 tokens"),
    (7, torch.randn(2, 1, DIM), None, TypeError, "x is torch.float32 and the weights are torch.float64"),
    (7, _tokens(2, 1, 1)[..., 1:], None, ValueError, r"x must be \(batch, n, 16\)"),
]


@pytest.mark.parametrize(("before", "x", "lengths", "error", "match"), REFUSED)
def test_a_refused_call_leaves_its_cache(
    before: int, x: Tensor, lengths: list[int] | None, error: type[Exception], match: str, watched: bool
) -> None:
    block = _block()
    if watched:
        block.attention.light.out.register_forward_hook(lambda *_: None)
    cache = block.new_cache(2, 64)
    block(_tokens(2, before, 0), cache=cache)  # an empty prompt is none
    state, counts = copy.deepcopy(cache.state_dict()), list(cache.clock.counts)
    with pytest.raises(error, match=match):
        block(x, None if lengths is None else first(x.shape[1], *lengths), cache=cache)
    assert counts == cache.clock.counts
    for name, t in cache.state_dict().items():
        assert torch.equal(t, state[name]), name

"""`contrib.colt5`'s modules: the original's weights, arguments, outputs and gradients, in float64."""

from __future__ import annotations

import doctest
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contrib import colt5 as ours

theirs = pytest.importorskip("colt5_attention")
blocks = pytest.importorskip("colt5_attention.transformer_block")

pytestmark = pytest.mark.slow
MODULES = [name for name in ours.__all__ if name.startswith(("Conditional", "Coordinate"))]
# at most k gates are 1, so that the original's choice among them is no lottery
FEW: dict[str, Any] = {"eps": 0.5, "n_iters": 30, "fetch_k_ratio": 1.0}
WIDE: dict[str, Any] = {"eps": 8.0, "eps_init": 8.0}
COSINE: dict[str, Any] = {"eps": 4.0, "cosine_sim_routing": True}
KWARGS = [FEW, WIDE, COSINE]
ATTENTION: dict[str, Any] = {
    "num_heavy_tokens_q": 5, "num_heavy_tokens_kv": 6, "light_dim_head": 4, "light_heads": 2, "light_window_size": 8,
    "heavy_dim_head": 6, "heavy_heads": 4,
}  # fmt: skip
VIT: dict[str, Any] = {
    "image_size": (16, 24), "patch_size": (2, 3), "num_classes": 5, "dim": 12, "depth": 2,
    "attn_num_heavy_tokens_q": 3, "attn_num_heavy_tokens_kv": 5, "attn_heavy_dim_head": 4, "attn_heavy_heads": 2,
    "attn_light_dim_head": 4, "attn_light_heads": 2, "attn_light_window_size": 4, "ff_num_heavy_tokens": 7,
    "ff_heavy_mult": 2, "ff_light_mult": 0.5, "flash_attn": False, "router_kwargs": WIDE,
}  # fmt: skip


def pair(name: str, *args: Any, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """Both modules in float64, ours with the weights of theirs."""
    torch.manual_seed(11)
    a, b = (getattr(package, name)(*args, **kwargs).double() for package in (ours, theirs))
    with torch.no_grad():
        for p in b.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    a.load_state_dict(b.state_dict())
    for module in b.modules():
        # the original rounds frequencies to float32
        if type(module).__name__ == "RotaryEmbedding":
            n = 2 * len(module.inv_freq)
            module.inv_freq = 10000.0 ** -(torch.arange(0, n, 2, dtype=torch.float64) / n)
    return a, b


def same(a: nn.Module, b: nn.Module, *inputs: Tensor, real: Tensor | None = None, **kwargs: Any) -> None:
    """Outputs at real tokens, and their gradients for inputs and weights."""
    found = []
    for module in (a, b):
        given = [t.clone().requires_grad_() for t in inputs]
        y = module(*given, **kwargs)
        y = y if real is None else y[real]
        dy = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape)
        names, weights = zip(*module.named_parameters(), strict=True)
        wanted = torch.autograd.grad(y, [*given, *weights], dy, allow_unused=True)
        zero = [torch.zeros_like(w) if g is None else g for w, g in zip([*given, *weights], wanted, strict=True)]
        found.append((y.detach(), dict(zip([*range(len(given)), *names], zero, strict=True))))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=1e-9)
    assert set(found[0][1]) == set(found[1][1])
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def tokens(batch: int = 2, n: int = 24, dim: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(batch, n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def padding(batch: int = 2, n: int = 24) -> Tensor:
    """Rows with their own number of real tokens, each more than any module here chooses."""
    return torch.arange(n) < torch.tensor([n - 4, n - 9])[:batch, None]


@pytest.mark.parametrize("name", MODULES)
def test_signatures_are_the_originals(name: str) -> None:
    for method in ("__init__", "forward"):
        a, b = (inspect.signature(getattr(getattr(p, name), method)).parameters for p in (ours, theirs))
        assert list(a) == list(b)
        for key, parameter in b.items():
            # {} and None both mean: none
            assert a[key].kind == parameter.kind, key
            assert (a[key].default or None) == (parameter.default or None), key


def test_every_module_of_the_original_is_here() -> None:
    exported = {n for n, v in vars(theirs).items() if inspect.isclass(v)}
    assert exported == set(MODULES)
    assert len(exported) == 8


@pytest.mark.parametrize("module", [ours.attention, ours.models, ours.router])
def test_examples_of_docstrings(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried > 0


@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("hard", [False, True])
def test_router(kwargs: dict[str, Any], masked: bool, hard: bool) -> None:
    a, b = pair("CoordinateDescentRouter", 16, straight_through=hard, **kwargs)
    x, mask = tokens(), padding() if masked else None
    one, other = (r(x, num_tokens=5, mask=mask) for r in (a, b))
    order = one.indices.argsort(-1), other.indices.argsort(-1)
    for mine, their in ((one.indices, other.indices), (one.scores, other.scores), (one.routed_mask, other.routed_mask)):
        if their is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine.gather(1, order[0]), their.gather(1, order[1]), rtol=1e-9, atol=1e-9)
    assert torch.equal(one.routed_tokens, x[torch.arange(2)[:, None], one.indices])
    assert one._fields == other._fields


def test_router_with_nothing_to_choose() -> None:
    for kwargs in ({}, {"num_routing_tokens": 3}):
        a, b = pair("CoordinateDescentRouter", 16, **kwargs)
        for keep in (False, True):
            one, other = (r(tokens(), num_tokens=24, mask=padding(), keep_one_route_dim=keep) for r in (a, b))
            assert one.indices is other.indices is None
            for mine, their in zip(one[1:], other[1:], strict=True):
                assert torch.equal(mine, their)


def test_router_with_tokens_of_the_call_and_with_random_ones() -> None:
    a, b = pair("CoordinateDescentRouter", 16, learned_routing_tokens=True, **FEW)
    x, given = tokens(), tokens(n=1, seed=3)[:, 0]
    one, other = (r(x, num_tokens=5, routing_tokens=given).indices.sort(-1)[0] for r in (a, b))
    assert torch.equal(one, other)
    found = []
    for router in (a, b):
        torch.manual_seed(5)
        found.append(router(x, num_tokens=5, routing_tokens=given, mask=padding(), random_route=True))
    assert torch.equal(found[0].indices, found[1].indices)
    assert found[0].scores.tolist() == [[1.0] * 5] * 2
    with pytest.raises(ValueError, match="routing_tokens must be given with learned_routing_tokens=True"):
        a(x, num_tokens=5)
    with pytest.raises(ValueError, match=r"routing_tokens must be \(batch, num_routing_tokens, dim\) = \(2, 1, 16\)"):
        a(x, num_tokens=5, routing_tokens=given[:1])


def test_route_back() -> None:
    a, b = pair("CoordinateDescentRouter", 16)
    x, rows, at = tokens(), tokens(n=3, seed=2), torch.tensor([[4, 0, 9], [23, 1, 2]])
    assert torch.equal(a.route_back(x, rows, at), b.route_back(x.clone(), rows, at))
    assert torch.equal(a.route_back(x, rows, torch.full_like(at, -1)), x)


@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_feed_forward(kwargs: dict[str, Any], masked: bool) -> None:
    a, b = pair("ConditionalRoutedFeedForward", 16, num_heavy_tokens=5, router_kwargs=kwargs)
    same(a, b, tokens(), mask=padding() if masked else None)
    same(a, b, tokens(), num_heavy_tokens=24)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"rotary_emb": True},
    {"multiply_keys_by_score": True, "multiply_queries_by_score": True, "router_straight_through": False},
    {"use_null_q_tokens": False},
]


@pytest.mark.parametrize("options", [*OPTIONS, {"has_light_attn": False}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_attention(options: dict[str, Any], masked: bool) -> None:
    a, b = pair("ConditionalRoutedAttention", 16, **ATTENTION, router_kwargs=WIDE, **options)
    mask = padding() if masked else None
    same(a, b, tokens(), mask=mask, real=mask)
    same(a, b, tokens(), mask=mask, real=mask, num_heavy_tokens_q=24, num_heavy_tokens_kv=30)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("n", [24, 29, 9])
def test_autoregressive_attention(options: dict[str, Any], n: int) -> None:
    a, b = pair("ConditionalRoutedAutoregressiveAttention", 16, **ATTENTION, router_kwargs=WIDE, **options)
    # the last window has fewer real queries than are chosen: the original gives them gates and cuts them off
    same(a, b, tokens(n=n))
    same(a, b, tokens(n=n), num_heavy_tokens_q=8, num_heavy_tokens_kv=64)


def test_autoregressive_windows_of_their_own() -> None:
    a, b = pair("ConditionalRoutedAutoregressiveAttention", 16, **ATTENTION, heavy_window_size=6, router_kwargs=WIDE)
    same(a, b, tokens(n=25))


@pytest.fixture
def _defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original's cross-attention reads a name that it never defines."""
    monkeypatch.setattr(blocks, "should_route_queries", True, raising=False)


@pytest.mark.usefixtures("_defined")
@pytest.mark.parametrize("masked", [False, True])
def test_cross_attention(masked: bool) -> None:
    sizes = {"num_tokens_q": 5, "num_tokens_kv": 6, "dim_head": 6, "heads": 4}
    a, b = pair("ConditionalRoutedCrossAttention", 16, **sizes, router_kwargs=WIDE)
    mask = padding() if masked else None
    same(a, b, tokens(), tokens(n=30, seed=1), mask=mask, real=mask)
    same(a, b, tokens(), tokens(seed=1), num_tokens_kv=24, context_mask=mask)


def test_cross_attention_of_all_queries() -> None:
    a, _ = pair("ConditionalRoutedCrossAttention", 16, num_tokens_q=24, num_tokens_kv=6, dim_head=6, heads=4)
    with pytest.raises(NameError, match="should_route_queries"):
        _(tokens(), tokens(n=30))
    # a query that others join gets the same
    x, context = tokens(), tokens(n=30, seed=1)
    torch.testing.assert_close(a(x, context)[:, :7], a(x[:, :7], context), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("masked", [False, True])
def test_block(masked: bool) -> None:
    a, b = pair(
        "ConditionalRoutedTransformerBlock", 16, num_heavy_attn_tokens_q=5, num_heavy_attn_tokens_kv=6,
        num_heavy_ff_tokens=4, light_dim_head=4, light_heads=2, light_window_size=8, heavy_dim_head=6, heavy_heads=4,
        router_kwargs=WIDE,
    )  # fmt: skip
    mask = padding() if masked else None
    same(a, b, tokens(), mask=mask, real=mask)
    same(a, b, tokens(), num_heavy_attn_tokens_q=3, num_heavy_attn_tokens_kv=4, num_heavy_ff_tokens=2)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("options", [o for o in OPTIONS if "rotary_emb" not in o], ids=str)
def test_image_attention(first: bool, options: dict[str, Any]) -> None:
    sizes = {**ATTENTION, "light_window_size": 4}
    a, b = pair("ConditionalRoutedImageAttention", 16, **sizes, channel_first=first, router_kwargs=WIDE, **options)
    x = tokens(n=96).view(2, 8, 12, 16)
    same(a, b, x.movedim(-1, 1) if first else x)


def test_image_attention_of_all_pixels() -> None:
    a, b = pair("ConditionalRoutedImageAttention", 16, **{**ATTENTION, "light_window_size": 4}, router_kwargs=WIDE)
    x = tokens(n=96).view(2, 8, 12, 16)
    with pytest.raises((RuntimeError, IndexError)):
        b(x, num_heavy_tokens_q=16)
    heavy = a(x, num_heavy_tokens_q=16)
    one = a(x[:1, :4, :4], num_heavy_tokens_q=16)
    torch.testing.assert_close(heavy[:1, :4, :4], one, rtol=1e-10, atol=1e-10)


def test_vit() -> None:
    a, b = pair("ConditionalRoutedViT", **VIT)
    images = torch.randn(2, 3, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    same(a, b, images)


@pytest.mark.parametrize("name", ["ConditionalRoutedAttention", "ConditionalRoutedAutoregressiveAttention"])
@pytest.mark.parametrize("rotary", [False, True])
def test_routes_of_one_sequence(name: str, rotary: bool) -> None:
    """One row: with several, the original takes another sequence's tokens (below)."""
    a, b = pair(name, 16, **ATTENTION, num_routed_kv=2, rotary_emb=rotary, router_kwargs=WIDE)
    same(a, b, tokens(1, 16))
    same(a, b, tokens(1, 16), num_heavy_tokens_kv=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_autocast(dtype: torch.dtype) -> None:
    """Nothing is chosen, so that rounding changes no choice."""
    sizes: dict[str, Any] = {**ATTENTION, "num_heavy_tokens_q": 24, "num_heavy_tokens_kv": 24}
    for name, options in (
        ("ConditionalRoutedFeedForward", {"num_heavy_tokens": 24}),
        ("ConditionalRoutedAttention", {**sizes, "rotary_emb": True}),
        ("ConditionalRoutedAutoregressiveAttention", {**sizes, "num_heavy_tokens_kv": 64}),
    ):
        layer, _ = pair(name, 16, **options)
        expected = layer(tokens())
        # a dozen roundings of numbers of this size
        bound = 12 * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item())
        with torch.autocast("cpu", dtype):
            y = layer.float()(tokens().float())
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=bound)
        y = layer.to(dtype)(tokens().to(dtype))
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=bound)


def test_compiles_whole() -> None:
    a, _ = pair("ConditionalRoutedTransformerBlock", 16, num_heavy_attn_tokens_q=5, num_heavy_attn_tokens_kv=6,
                num_heavy_ff_tokens=4, light_window_size=8)  # fmt: skip
    x = tokens()
    torch.testing.assert_close(torch.compile(a, backend="eager", fullgraph=True)(x), a(x), rtol=1e-10, atol=1e-10)


def test_rotation_needs_no_frequencies_in_float64() -> None:
    """Weights in bf16: the original rounds `inv_freq` too, and with it every position."""
    a, b = pair("ConditionalRoutedAttention", 16, **ATTENTION, rotary_emb=True, router_kwargs=WIDE)
    expected = a(tokens())
    for module in (a, b):
        module.rotary_emb.inv_freq = module.rotary_emb.inv_freq.bfloat16().double()
    assert torch.equal(a(tokens()), expected)
    assert not torch.allclose(b(tokens()), expected, rtol=1e-6, atol=1e-6)

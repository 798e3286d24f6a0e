"""`RoutedBlock`: attention and feed-forward on the residual stream; faults of the public library by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.nn import CausalRouter, RoutedBlock
from onepass.nn.causal import choose_per_block
from onepass.nn.router import Router

DIM, WINDOW = 12, 8


def _tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _block(causal: bool = False, k: float = 1 / 4, **kwargs: Any) -> RoutedBlock:
    torch.manual_seed(2)
    return RoutedBlock(DIM, k, heads=2, dim_head=6, window=WINDOW, causal=causal, **kwargs)


def _mask(n: int) -> Tensor:
    return torch.arange(n) < torch.tensor([[n], [n // 2], [0]])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_each_half_is_added_to_the_residual_stream(causal: bool, masked: bool) -> None:
    block, x = _block(causal).double(), _tokens(3, 20, DIM).double()
    mask = _mask(20) if masked else None
    y, routing = block(x, mask, return_routing=True)
    h, attention = block.attention(x, mask, return_routing=True)
    h = x + h
    f, feed_forward = block.feed_forward(h, mask, return_routing=True)
    torch.testing.assert_close(y, h + f)
    assert torch.equal(routing.attention.q.indices, attention.q.indices)
    assert torch.equal(routing.attention.kv.indices, attention.kv.indices)
    assert torch.equal(routing.feed_forward.indices, feed_forward.indices)


class TestK:
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
    def test_defaults(self, kwargs: dict[str, Any], expected: tuple[float, ...]) -> None:
        block = _block(**kwargs)
        assert (block.feed_forward.k, block.attention.k_q, block.attention.k_kv) == expected

    @pytest.mark.parametrize(("k", "error"), [(-1, ValueError), (1.5, ValueError), ("3", TypeError), (None, TypeError)])
    def test_other_values_are_refused(self, k: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="must be an int"):
            _block(k=k)


def test_a_causal_block_routes_queries_and_feed_forward_by_the_past() -> None:
    block = _block(True)
    assert isinstance(block.attention.router_q, CausalRouter)
    assert isinstance(block.feed_forward.router, CausalRouter)
    assert block.attention.light.causal


class TestResidual:
    """The layers add x inside their nodes; a hook on a layer sees the layer's own output."""

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("strided", [False, True])
    def test_the_block_adds_its_layers(self, causal: bool, masked: bool, autocast: bool, strided: bool) -> None:
        block, x = _block(causal), _tokens(3, 40, DIM)
        x = (x.transpose(0, 1).contiguous().transpose(0, 1) if strided else x).requires_grad_()
        mask = _mask(40) if masked else None
        found = []
        for hooked in (False, True):
            seen: list[Any] = []
            layers = block.attention, block.feed_forward
            hooks = (
                [m.register_forward_hook(lambda m, x, y, seen=seen: seen.append(y)) for m in layers] if hooked else []
            )
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y, routing = block(x, mask, return_routing=True)
            for hook in hooks:
                hook.remove()
            assert len(seen) == 2 * hooked
            loss = (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() + routing.attention.q.gates.sum()
            found.append([y, *torch.autograd.grad(loss, [x, *block.parameters()])])
        limit = 2e-2 if autocast else 1e-5
        for ours, theirs in zip(*found, strict=True):
            assert ours.dtype == theirs.dtype
            scale = float(theirs.detach().abs().max())
            torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit * max(scale, 1e-3))

    @pytest.mark.parametrize(
        ("x", "error", "message"),
        [
            ("abc", TypeError, "RoutedAttention: x must be a tensor, got str"),
            (torch.ones(2, DIM), ValueError, r"RoutedAttention: x must be \(batch, n, "),
            (torch.ones(2, 8, DIM + 1), ValueError, r"RoutedAttention: x must be \(batch, n, "),
            (torch.ones(2, 8, DIM, dtype=torch.int32), TypeError, "RoutedAttention: x must be float32"),
        ],
    )
    def test_wrong_tokens_are_refused_by_name(self, x: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            _block(False)(x)


class TestModesOfPyTorch:
    @pytest.mark.parametrize("name", ["attention", "feed_forward"])
    @pytest.mark.parametrize("part", ["", "light.norm", "heavy"])
    def test_parts_on_another_device_are_named(self, name: str, part: str) -> None:
        layer, x = _block().get_submodule(name), _tokens(3, 40, DIM)
        layer.get_submodule(part).to("meta")
        with pytest.raises(ValueError, match="weight is on meta but x is on cpu"):
            layer(x)


class TestFaultsOfThePublicLibrary:
    """Those of the eight that a block could have; `test_routing_faults.py` says where the others are."""

    @pytest.mark.parametrize("n", [16, 20, 3])
    def test_fault_2_block_wise_routing_raises_index_error(self, n: int) -> None:
        out = choose_per_block(Router(DIM), _tokens(3, n, DIM), 2, WINDOW, _mask(n))
        assert out.indices.shape == (3, 2 * -(-n // WINDOW))
        assert (out.indices < n).all()

    @pytest.mark.parametrize("causal", [False, True])
    def test_fault_5_masked_tokens_are_selected(self, causal: bool) -> None:
        mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(3)) < 0.3
        _, routing = _block(causal, k=1 / 2)(_tokens(3, 40, DIM), mask, return_routing=True)
        for choice in (*routing.attention, routing.feed_forward):
            assert mask.gather(1, choice.indices.clamp_min(0))[choice.indices >= 0].all()
            assert not choice.gates[choice.indices < 0].any()

    def test_fault_7_the_documented_configuration_crashes(self) -> None:
        """The README's block, with a mask, under autocast, and an image as tokens."""
        block = RoutedBlock(32, k=32, k_q=32, k_kv=64, heads=2, dim_head=16)
        mask = torch.ones(2, 512, dtype=torch.bool)
        mask[1, 300:] = False
        with torch.autocast("cpu", torch.bfloat16):
            y = block(_tokens(2, 512, 32), mask)
        y.sum().backward()
        image = _tokens(2, 32, 8, 8)
        assert block(image.flatten(2).mT).mT.reshape(image.shape).isfinite().all()


def test_dropout_is_on_what_a_layer_adds_while_training() -> None:
    block, x = _block(False, dropout=0.5), _tokens(3, 40, DIM)
    torch.manual_seed(0)
    h = x + torch.nn.functional.dropout(block.attention(x), 0.5)
    expected = h + torch.nn.functional.dropout(block.feed_forward(h), 0.5)
    torch.manual_seed(0)
    torch.testing.assert_close(block(x), expected)
    h = x + block.attention(x)
    torch.testing.assert_close(block.eval()(x), h + block.feed_forward(h))
    with pytest.raises(ValueError, match="dropout must be between 0 and 1"):
        _block(False, dropout=1.5)


def test_tokens_of_another_dtype_than_the_weights_are_named() -> None:
    with pytest.raises(TypeError, match=r"x is torch.bfloat16 and the weights are torch.float32; convert one"):
        _block(False)(_tokens(1, 8, DIM).bfloat16())


def test_an_int_k_of_one_is_one_token() -> None:
    with pytest.warns(UserWarning, match=r"write k=1\.0 for all of them"):
        _block(False, k=1)

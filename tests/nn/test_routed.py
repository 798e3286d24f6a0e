"""`Routed` and `RoutedFeedForward`: the sum of the two branches, at every edge, in every mode of PyTorch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onepass.nn import Routed, RoutedFeedForward, Router, RouterOutput

DIM = 16


def _tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _definition(layer: Routed, x: Tensor, routing: RouterOutput) -> Tensor:
    """One token at a time."""
    y = layer.light(x)
    rows = []
    for b in range(len(x)):
        indices, gates = routing.indices[b].reshape(-1), routing.gates[b].reshape(-1)
        for i in range(x.shape[1]):
            total = y[b, i]
            for j in (indices == i).nonzero()[:, 0]:
                total = total + gates[j] * layer.heavy(x[b : b + 1, i : i + 1])[0, 0]
            rows.append(total)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("routes", [1, 3])
@pytest.mark.parametrize("kind", ["feed-forward", "any modules"])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_are_those_of_the_definition(routes: int, kind: str, masked: bool) -> None:
    router = Router(DIM, routes, explore=0)
    layer: Routed = (
        RoutedFeedForward(DIM, 4, router=router)
        if kind == "feed-forward"
        else Routed(nn.Sequential(nn.Linear(DIM, DIM), nn.Sigmoid()), nn.Linear(DIM, DIM), router, 4)
    )
    layer = layer.double()
    x = _tokens(3, 11, DIM).double().requires_grad_()
    mask = None
    if masked:
        mask = torch.ones(3, 11, dtype=torch.bool)
        mask[0, 2:] = False  # fewer than k
        mask[1] = False  # none at all
    y, routing = layer(x, mask, return_routing=True)
    # a module of the user's sees padding as it is, a feed-forward sees zeros
    read = x if mask is None or kind == "any modules" else x * mask[..., None]
    expected = _definition(layer, read, routing)
    torch.testing.assert_close(y, expected)
    dy = _tokens(3, 11, DIM, seed=2).double()
    wanted = [x, *layer.parameters()]
    ours = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, wanted, dy))


class TestLightOutputIsNotTouched:
    """The heavy output is added in place where that is safe, and only there."""

    def test_a_light_branch_that_returns_its_input(self) -> None:
        x = _tokens(2, 9, DIM)
        before = x.clone()
        y = Routed(nn.Identity(), nn.Linear(DIM, DIM), Router(DIM), 3)(x)
        assert torch.equal(x, before)
        assert not torch.equal(y, before)

    def test_a_light_branch_that_keeps_its_output_for_backward(self) -> None:
        layer = Routed(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), nn.Linear(DIM, DIM), Router(DIM), 3)
        layer(_tokens(2, 9, DIM)).sum().backward()

    def test_a_light_branch_that_returns_a_buffer_of_its_own(self) -> None:
        class Constant(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("value", torch.zeros(2, 9, DIM))

            def forward(self, x: Tensor) -> Tensor:
                return self.value  # type: ignore[return-value]

        layer = Routed(Constant(), nn.Linear(DIM, DIM), Router(DIM), 3)
        layer(_tokens(2, 9, DIM))
        assert not layer.light.value.any()  # type: ignore[union-attr, operator]


class TestK:
    @pytest.mark.parametrize(
        ("k", "n", "chosen"),
        [
            (3, 10, 3),
            (30, 10, 10),
            (0.25, 10, 2),
            (0.26, 10, 3),
            (0.24, 10, 2),
            (0.01, 10, 1),
            (1.0, 10, 10),
            (1, 10, 1),
            (0, 10, 0),
            (0.5, 0, 0),
            (4, 0, 0),
        ],
    )
    def test_an_int_or_a_share_of_n(self, k: float, n: int, chosen: int) -> None:
        layer = RoutedFeedForward(DIM, k)
        y, routing = layer(torch.randn(2, n, DIM), return_routing=True)
        assert y.shape == (2, n, DIM)
        assert routing.indices.shape == (2, chosen)

    def test_none_chosen_is_the_light_branch(self) -> None:
        layer = RoutedFeedForward(DIM, 0)
        x = _tokens(2, 9, DIM)
        assert torch.equal(layer(x), layer.light(x))
        layer(x).sum().backward()

    def test_empty_batch(self) -> None:
        layer = RoutedFeedForward(DIM, 3)
        y = layer(torch.randn(0, 9, DIM))
        assert y.shape == (0, 9, DIM)
        y.sum().backward()

    @pytest.mark.parametrize(
        ("k", "error"), [(-1, ValueError), (0.0, ValueError), (1.5, ValueError), (True, TypeError), ("3", TypeError)]
    )
    def test_other_values_are_refused(self, k: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="RoutedFeedForward: k must be an int"):
            RoutedFeedForward(DIM, k)


class TestMask:
    @staticmethod
    def _light_alone(layer: RoutedFeedForward, x: Tensor, mask: Tensor, where: Tensor) -> None:
        """Y at `where` is the light output of zeros, and the heavy branch's weights play no part in it, to the bit."""
        y = layer(x, mask)
        torch.testing.assert_close(y[where], layer.light(torch.zeros_like(x[where])))
        other = copy.deepcopy(layer)
        for p in other.heavy.parameters():
            nn.init.normal_(p)
        z = other(x, mask)
        assert torch.equal(z[where], y[where])
        assert not torch.equal(z, y)

    def test_masked_tokens_get_the_light_output_alone(self) -> None:
        mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(3)) < 0.6
        self._light_alone(RoutedFeedForward(DIM, 4), _tokens(2, 12, DIM), mask, ~mask)

    def test_a_fully_masked_row_is_the_light_branch(self) -> None:
        layer, x = RoutedFeedForward(DIM, 4), _tokens(2, 12, DIM)
        mask = torch.ones(2, 12, dtype=torch.bool)
        mask[1] = False
        self._light_alone(layer, x, mask, ~mask)
        layer(x, mask).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())

    @pytest.mark.parametrize("value", [torch.inf, torch.nan, 3e38])
    def test_what_stands_in_padding_reaches_no_real_token(self, value: float) -> None:
        layer, x = RoutedFeedForward(DIM, 6), _tokens(2, 12, DIM)
        mask = torch.ones(2, 12, dtype=torch.bool)
        mask[0, 0] = False
        mask[0, 4:] = False  # three real tokens for k = 6
        expected = layer(x, mask)
        x[~mask] = value
        assert torch.equal(layer(x, mask)[mask], expected[mask])


class TestModesOfPyTorch:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_any_float_dtype(self, dtype: torch.dtype) -> None:
        layer = RoutedFeedForward(DIM, 4, dtype=dtype)
        x = _tokens(2, 20, DIM).to(dtype).requires_grad_()
        y = layer(x)
        assert y.dtype == dtype
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
    def test_autocast(self, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
        layer, x = RoutedFeedForward(DIM, 4), _tokens(2, 20, DIM).to(x_dtype).requires_grad_()
        expected, chosen = layer(x.detach().float(), return_routing=True)
        with torch.autocast("cpu", dtype):
            y, routing = layer(x, return_routing=True)
        assert y.dtype == dtype
        # the choice is made in fp32 whatever the branches compute in
        assert torch.equal(routing.indices, chosen.indices)
        torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.1)
        y.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
        assert layer.router.weight.grad.abs().max() > 0  # type: ignore[union-attr, operator]

    @pytest.mark.parametrize("layout", ["transposed", "channels first", "step", "expanded"])
    def test_any_strides(self, layout: str) -> None:
        layer = RoutedFeedForward(DIM, 4)
        x = {
            "transposed": _tokens(20, 2, DIM).transpose(0, 1),
            "channels first": _tokens(2, DIM, 4, 5).flatten(2).mT,
            "step": _tokens(2, 40, 2 * DIM)[:, ::2, ::2],
            "expanded": _tokens(1, 20, DIM).expand(2, 20, DIM),
        }[layout]
        torch.testing.assert_close(layer(x), layer(x.contiguous()))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_activation_checkpointing(self, reentrant: bool) -> None:
        layer, x = RoutedFeedForward(DIM, 4), _tokens(2, 20, DIM).requires_grad_()
        wanted = [x, *layer.parameters()]

        def grads(y: Tensor) -> list[Tensor]:
            for t in wanted:
                t.grad = None
            y.square().sum().backward()
            return [t.grad.clone() for t in wanted if t.grad is not None]

        plain, again = grads(layer(x)), grads(checkpoint(layer, x, use_reentrant=reentrant))
        assert len(plain) == len(again) == len(wanted)
        assert all(map(torch.equal, plain, again))

    @pytest.mark.slow
    def test_compile_in_one_graph(self) -> None:
        torch._dynamo.reset()
        layer = RoutedFeedForward(DIM, 0.2, router=Router(DIM, 2))
        compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager", dynamic=True)
        for n in (20, 31):
            x, mask = _tokens(2, n, DIM), torch.arange(n) < torch.tensor([[n], [n // 2]])
            y, z = layer(x, mask), compiled(x, mask)
            torch.testing.assert_close(z, y)
            wanted = [*layer.parameters()], [*compiled.parameters()]
            grads = [torch.autograd.grad(out.square().sum(), p) for out, p in zip((y, z), wanted, strict=True)]
            torch.testing.assert_close(*grads)

    def test_a_copy_of_the_module_routes_alike(self) -> None:
        layer, x = RoutedFeedForward(DIM, 4), _tokens(2, 20, DIM)
        other = RoutedFeedForward(DIM, 4)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x), other(x))

    def test_repetitions_are_bit_identical(self) -> None:
        layer, x = RoutedFeedForward(DIM, 8), _tokens(4, 200, DIM)

        def once() -> list[Tensor]:
            y = layer(x)
            return [y, *torch.autograd.grad(y.square().sum(), [*layer.parameters()])]

        first = once()
        for _ in range(5):
            assert all(map(torch.equal, first, once()))


class TestRouterArgument:
    def test_any_module_with_the_call_signature(self) -> None:
        class First(nn.Module):
            """The first k tokens."""

            def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
                indices = torch.arange(k).expand(len(x), k)
                return RouterOutput(indices, torch.ones(len(x), k), torch.zeros(x.shape[:2]))

        layer, x = RoutedFeedForward(DIM, 4, router=First()), _tokens(2, 9, DIM)
        y = layer(x)
        light = layer.light(x)
        torch.testing.assert_close(y[:, :4], light[:, :4] + layer.heavy(x[:, :4]))
        torch.testing.assert_close(y[:, 4:], light[:, 4:])

    def test_the_parameters_of_the_router_are_named_so(self) -> None:
        names = dict(RoutedFeedForward(DIM, 4).named_parameters())
        assert [n for n in names if "router" in n] == ["router.weight"]
        assert {n.split(".")[0] for n in names} == {"light", "heavy", "router"}

    def test_hidden_widths(self) -> None:
        layer = RoutedFeedForward(DIM, 4, light_mult=0.25, heavy_mult=3, bias=False)
        shapes = {n: tuple(p.shape) for n, p in layer.named_parameters()}
        assert shapes["light.up.weight"] == (4, DIM)
        assert shapes["heavy.up.weight"] == (48, DIM)
        assert not any(n.endswith("bias") for n in shapes)


class TestErrors:
    def test_a_branch_that_changes_the_shape(self) -> None:
        wide, same = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        with pytest.raises(ValueError, match=r"light branch must keep the shape \(2, 9, 16\), got \(2, 9, 32\)"):
            Routed(wide, same, Router(DIM), 3)(_tokens(2, 9, DIM))
        with pytest.raises(ValueError, match=r"heavy branch must keep the shape \(2, 3, 16\), got \(2, 3, 32\)"):
            Routed(same, wide, Router(DIM), 3)(_tokens(2, 9, DIM))

    def test_tokens_without_a_batch(self) -> None:
        with pytest.raises(ValueError, match=r"x must be \(batch, n, dim\), got \(9, 16\)"):
            RoutedFeedForward(DIM, 3)(_tokens(9, DIM))

    def test_what_is_no_tensor(self) -> None:
        for layer in (RoutedFeedForward(DIM, 3), Routed(nn.Identity(), nn.Linear(DIM, DIM), Router(DIM), 3)):
            with pytest.raises(TypeError, match=f"{type(layer).__name__}: x must be a tensor, got list"):
                layer([[0.0]])

    @pytest.mark.parametrize(
        ("mult", "error", "match"),
        [
            (0.01, ValueError, r"light_mult = 0\.01 of dim 16 leaves a hidden width of 0\.16; it must be"),
            (math.nan, ValueError, "light_mult = nan of dim 16 leaves a hidden width of nan"),
            (math.inf, ValueError, "light_mult = inf of dim 16 leaves a hidden width of inf"),
            ("2", TypeError, "light_mult must be a number, got str"),
        ],
    )
    def test_hidden_widths_that_are_none(self, mult: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=f"RoutedFeedForward: {match}"):
            RoutedFeedForward(DIM, 3, light_mult=mult)

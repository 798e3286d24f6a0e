"""What exploring teaches a router; that it finds the tokens: tests/research/test_planted.py."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.nn import RoutedFeedForward, Router
from onepass.nn.explore import explore

DIM = 32


def _exploring(layer: RoutedFeedForward, x: Tensor, dy: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the routing vector."""
    x = x.clone().requires_grad_()
    grads = torch.autograd.grad(layer(x, mask), [x, layer.router.weight], dy)
    return grads[0], grads[1]


def _layer_and_tokens() -> tuple[RoutedFeedForward, Tensor, Tensor]:
    layer = RoutedFeedForward(DIM, 8, router=Router(DIM)).double()
    return layer, torch.randn(3, 50, DIM).double(), torch.randn(3, 50, DIM).double()


def test_exploring_adds_what_its_formula_says_to_the_vector_alone(masked: bool) -> None:
    layer, x, dy = _layer_and_tokens()
    router = layer.router
    mask = torch.arange(50) < torch.tensor([[50], [23], [1]]) if masked else None
    if mask is not None:
        # what comes in for padding teaches nothing
        dy = dy.masked_fill(~mask[..., None], torch.nan)
    with_it = _exploring(layer, x, dy, mask)
    router.explore = 0.0
    without = _exploring(layer, x, dy, mask)
    router.explore = 0.1
    assert torch.equal(with_it[0], without[0])
    # every sixth token: 50 tokens, 8 chosen
    size = dy.nan_to_num().norm(dim=-1)[:, ::6]
    real = torch.ones_like(size) if mask is None else mask[:, ::6].double()
    push = -0.1 * 6 * real * (size - (size * real).sum(1, keepdim=True) / real.sum(1, keepdim=True))
    (expected,) = torch.autograd.grad((push * router.scores(x[:, ::6])).sum(), router.weight)
    torch.testing.assert_close(with_it[1] - without[1], expected)


def test_exploring_is_for_training_and_leaves_the_output_alone() -> None:
    layer, x, dy = _layer_and_tokens()
    training, trained = layer(x), _exploring(layer, x, dy)
    written = layer(x)
    written += 1
    torch.testing.assert_close(torch.autograd.grad(written, layer.router.weight, dy)[0], trained[1])
    layer.eval()
    assert torch.equal(training, layer(x))
    measured = _exploring(layer, x, dy)
    layer.router.explore = 0.0
    assert torch.equal(measured[1], _exploring(layer, x, dy)[1])
    assert not torch.equal(measured[1], trained[1])


def test_exploring_under_transforms_and_a_compiler() -> None:
    layer, x, dy = _layer_and_tokens()
    expected = _exploring(layer, x, dy)[1]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), layer.router.weight, dy)[0], expected)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor, dy: Tensor) -> Tensor:
        return (torch.func.functional_call(layer, parameters, (x,)) * dy).sum()

    torch.testing.assert_close(torch.func.grad(loss)(parameters, x, dy)["router.weight"], expected)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x[:, None], dy[:, None])
    torch.testing.assert_close(each["router.weight"].sum(0), expected)
    stacked = {name: p.detach()[None].requires_grad_() for name, p in parameters.items()}  # models beside each other
    y = torch.func.vmap(lambda weights: torch.func.functional_call(layer, weights, (x,)))(stacked)
    torch.testing.assert_close(torch.autograd.grad(y, stacked["router.weight"], dy[None])[0][0], expected)


def test_exploring_leaves_no_edge_to_the_tokens() -> None:
    """Compiled autograd can't add the None that it would carry."""
    router, x = Router(8), torch.randn(2, 20, 8, requires_grad=True)
    y = explore(torch.randn(2, 20, 8, requires_grad=True) * 1, x, router, 4)
    assert y.grad_fn is not None
    leaves = [getattr(node, "variable", None) for node, _ in y.grad_fn.next_functions]
    assert any(leaf is router.weight for leaf in leaves)
    assert not any(leaf is x for leaf in leaves)

"""What every layer owes PyTorch's modes; the formula and the edges of a layer are in its own tests.

`test_any_layer.py` has what stands in padding, `test_all_modules.py` devices, copies and files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nn.layers import holes, outputs, tokens
from onepass.nn import RoutedAttention, RoutedBlock, RoutedCrossAttention, RoutedFeedForward, Router, TransformerBlock

DIM, N = 32, 40
HEADS: dict[str, Any] = {"heads": 2, "dim_head": 16}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class OverItself(nn.Module):
    """Cross-attention whose memories are the tokens in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = RoutedCrossAttention(DIM, 1 / 4, 1 / 4, **HEADS)

    def forward(self, x: Tensor, mask: Tensor | None = None, return_routing: bool = False) -> Any:
        return self.layer(x, x.flip(1), mask, None if mask is None else mask.flip(1), return_routing=return_routing)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "feed-forward": lambda: RoutedFeedForward(DIM, 1 / 4),
    "three routes": lambda: RoutedFeedForward(DIM, 5, router=Router(DIM, 3)),
    "attention": lambda: RoutedAttention(DIM, 1 / 4, 1 / 4, window=8, **HEADS),
    "causal attention": lambda: RoutedAttention(DIM, 1 / 4, 1 / 4, window=8, causal=True, **HEADS),
    "cross-attention": OverItself,
    "block": lambda: RoutedBlock(DIM, 1 / 4, window=8, **HEADS),
    "causal block": lambda: RoutedBlock(DIM, 1 / 4, window=8, causal=True, **HEADS),
    "global block": lambda: TransformerBlock(DIM, **HEADS),
    "causal block of windows": lambda: TransformerBlock(DIM, window=8, causal=True, **HEADS),
    "block of experts": lambda: TransformerBlock(DIM, window=8, num_experts=4, hidden_dim=8, **HEADS),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
on_devices = pytest.mark.parametrize("device", DEVICES)


def _make(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(2)
    return LAYERS[name]().to(device, dtype)


def _x() -> Tensor:
    return tokens(3, N, DIM)


def _run(
    layer: nn.Module, x: Tensor, mask: Tensor | None = None, context: AbstractContextManager[Any] | None = None
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Output, choices, and the gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    with context or nullcontext():
        y, routing = layer(x, mask, return_routing=True)
    wanted = [x, *layer.parameters()]
    upstream = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    return (
        y.detach(),
        [r.indices for r in outputs(routing)],
        list(torch.autograd.grad(y, wanted, upstream, materialize_grads=True)),
    )


@on_devices
@every_layer
def test_other_sequences_count_for_nothing(name: str, device: str) -> None:
    layer, x = _make(name, device), _x().to(device)
    y, choices, (dx, *_) = _run(layer, x)
    x[1] = 30 * tokens(N, DIM, seed=9).to(device)
    z, others, (dz, *_) = _run(layer, x)
    for before, after in ((y, z), (dx, dz), *zip(choices, others, strict=True)):
        assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(y[1], z[1])


@on_devices
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@every_layer
def test_autocast(name: str, x_dtype: torch.dtype, device: str) -> None:
    layer, x = _make(name, device), _x().to(device, x_dtype)
    expected, choices, _ = _run(layer, x.float())
    y, ours, grads = _run(layer, x, context=torch.autocast(device, torch.bfloat16))
    assert y.dtype == (x_dtype if "block" in name else torch.bfloat16)
    if "block" not in name:  # whose feed-forward reads what attention has rounded
        assert all(map(torch.equal, ours, choices)), "a choice is made in fp32 whatever the branches compute in"
        torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.1)
    assert [g.dtype for g in grads] == [x_dtype] + [torch.float32] * (len(grads) - 1)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@every_layer
def test_any_dtype(name: str, dtype: torch.dtype) -> None:
    y, _, grads = _run(_make(name, dtype=dtype), _x().to(dtype), holes(N))
    assert {y.dtype, *(g.dtype for g in grads)} == {dtype}
    assert all(t.isfinite().all() for t in (y, *grads))


@pytest.mark.parametrize("layout", ["transposed", "channels first", "stepped", "expanded"])
@every_layer
def test_any_strides(name: str, layout: str) -> None:
    x = {
        "transposed": tokens(N, 3, DIM).transpose(0, 1),
        "channels first": tokens(3, DIM, 8, 5).flatten(2).mT,
        "stepped": tokens(3, 2 * N, 2 * DIM)[:, ::2, ::2],
        "expanded": tokens(1, N, DIM).expand(3, N, DIM),
    }[layout]
    layer = _make(name)
    torch.testing.assert_close(_run(layer, x), _run(layer, x.contiguous()))


@every_layer
def test_compiled_in_one_graph(name: str) -> None:
    """With a mask; without one `fused/test_operators.py` has them."""
    torch._dynamo.reset()
    layer, x, mask = _make(name).eval(), _x(), holes(N)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_run(compiled, x, mask), _run(layer, x, mask))


@on_devices
@pytest.mark.parametrize("reentrant", [False, True])
@every_layer
def test_checkpoint_repeats_bit_for_bit(name: str, reentrant: bool, device: str) -> None:
    layer, x = _make(name, device), _x().to(device).requires_grad_()

    def grads(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = run(x)
        for t in (x, *layer.parameters()):
            t.grad = None
        y.square().sum().backward()
        return [y.detach(), *(t.grad.clone() for t in (x, *layer.parameters()) if t.grad is not None)]

    plain = grads(layer)
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        again = grads(run)
        assert len(again) == len(plain)
        assert all(map(torch.equal, again, plain))


@pytest.mark.parametrize(("batch", "n"), [(0, 20), (2, 0), (2, 1)])
@every_layer
def test_empty_and_shortest(name: str, batch: int, n: int) -> None:
    layer = _make(name)
    y, _, grads = _run(layer, torch.randn(batch, n, DIM))
    assert y.shape == (batch, n, DIM)
    assert all(t.isfinite().all() for t in (y, *grads))
    if batch * n == 0:
        _gives_gradients_of_zero(layer, layer(torch.randn(batch, n, DIM)))


def _gives_gradients_of_zero(layer: nn.Module, y: Tensor) -> None:
    """None would be no gradient: DDP waits for one of every parameter on every process."""
    y.sum().backward()
    for where, p in layer.named_parameters():
        assert p.grad is not None, where
        assert not p.grad.any(), where


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("training", [False, True])
@every_layer
def test_packed_sequences_without_tokens(name: str, training: bool, watched: bool) -> None:
    layer = _make(name).train(training)
    if name == "cross-attention":
        y = layer.layer(torch.randn(2, 5, DIM), torch.randn(2, 0, DIM))
        y = torch.cat((y, layer.layer(torch.randn(2, 0, DIM), torch.randn(2, 5, DIM))), 1)[:, :0]
    else:
        if watched:
            [*layer.modules()][-1].register_forward_hook(lambda *_: None)
        y = layer(torch.randn(0, DIM), cu_seqlens=torch.zeros(3, dtype=torch.int32))
        assert y.shape == (0, DIM)
    _gives_gradients_of_zero(layer, y)


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "own forward", "subclass"])
@every_layer
def test_what_looks_at_any_module_is_called(name: str, kind: str) -> None:
    """No path beside the modules' forward passes by a hook, a forward of an instance, or one of a subclass."""
    layer, x = _make(name).eval(), _x()
    plain = layer(x)
    for where, _ in [*layer.named_modules()][1:]:
        if where == "feed_forward.router" and name == "block of experts":
            continue  # a part of the choice, which is one operator
        watched = copy.deepcopy(layer)
        part: Any = watched.get_submodule(where)
        calls: list[str] = []
        if kind == "hook":
            part.register_forward_hook(lambda *_, calls=calls: calls.append(""))
        elif kind == "pre-hook":
            part.register_forward_pre_hook(lambda *_, calls=calls: calls.append(""))
        else:
            place = part if kind == "own forward" else type("Other", (type(part),), {})
            own = part.forward if place is part else type(part).forward
            place.forward = lambda *args, own=own, calls=calls, **options: (calls.append(""), own(*args, **options))[1]
            part.__class__ = place if kind == "subclass" else type(part)
        torch.testing.assert_close(watched(x), plain, rtol=1e-4, atol=1e-5)
        assert calls, where


@every_layer
def test_every_parameter_gets_a_gradient_from_gates_alone(name: str) -> None:
    layer = _make(name).eval()  # no training mode: nothing is explored
    layer(tokens(2, 8 * N, DIM)).square().sum().backward()
    for where, p in layer.named_parameters():
        assert p.grad is not None, where
        assert p.grad.any(), where


@pytest.mark.parametrize("masked", [False, True])
@every_layer
def test_shapes_of_meta_tensors(name: str, masked: bool) -> None:
    layer, x = _make(name, "meta"), torch.empty(3, N, DIM, device="meta", requires_grad=True)
    y = layer(x, holes(N).to("meta") if masked else None)
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in (x, *layer.parameters()))


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@every_layer
def test_a_gpu_gives_what_a_cpu_gives(name: str, masked: bool) -> None:
    layer, x, mask = _make(name), _x(), holes(N) if masked else None
    expected = _run(layer, x, mask)
    found = _run(copy.deepcopy(layer).cuda(), x.cuda(), None if mask is None else mask.cuda())
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(ours.cpu(), theirs)
    for a, e in zip((found[0], *found[2]), (expected[0], *expected[2]), strict=True):
        torch.testing.assert_close(a.cpu(), e, rtol=1e-3, atol=1e-3 * max(1.0, float(e.abs().max())))

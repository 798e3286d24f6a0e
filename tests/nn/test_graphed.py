"""`graphed`: a block in CUDA graphs gives the bits of the block, and what a graph can't follow is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.nn import RoutedBlock, graphed
from onepass.nn.graphed import refuse_changed, settings
from onepass.optim import Lion

gpu = pytest.mark.gpu
DIM, N = 64, 128


def _block(causal: bool = False) -> RoutedBlock:
    torch.manual_seed(0)
    return RoutedBlock(DIM, 1 / 8, heads=2, dim_head=32, window=32, causal=causal).cuda()


def _x(seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, N, DIM, device="cuda", requires_grad=True)


def _mask(first: int, second: int) -> Tensor:
    return torch.arange(N, device="cuda") < torch.tensor([[first], [second]], device="cuda")


@gpu
def test_the_bits_of_the_block(causal: bool, masked: bool, autocast: bool) -> None:
    """Outputs and gradients, for tokens and masks that change, and summed over two passes."""
    eager = _block(causal)
    ours = copy.deepcopy(eager)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        run = graphed(ours, _x(), _mask(N, 40)) if masked else graphed(ours, _x())
        for seed in range(3):
            x, mask = _x(seed), (_mask(N - 30 * seed, 20 + seed),) if masked else ()
            found = []
            for call in (eager, run):
                x.grad = None
                y = call(x, *mask)
                (y.float() * torch.linspace(-1, 1, N, device="cuda")[:, None]).sum().backward()
                found.append((y.detach().clone(), x.grad))
            for a, e in zip(*found, strict=True):
                torch.testing.assert_close(a, e, rtol=0, atol=0)
    for a, e in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, e.grad, rtol=0, atol=0)


@gpu
def test_a_module_with_frozen_parameters() -> None:
    block, x = _block(), _x()
    block.attention.light.requires_grad_(False)
    run = graphed(block, x)
    run(x).sum().backward()
    assert block.attention.light.qkv.weight.grad is None
    assert block.attention.null.grad is not None


@gpu
def test_backward_after_another_call_is_refused() -> None:
    run = graphed(_block(), _x())
    first = run(_x())
    run(_x(1))
    with pytest.raises(RuntimeError, match="another call came between"):
        first.sum().backward()


@gpu
def test_training_with_lion_in_a_graph_of_the_whole_step() -> None:
    """The step of a capturable Lion is captured with the block's, as `make_graphed_callables` captures neither."""
    weights = []
    for captured in (False, True):
        block, x = _block(), _x()
        optimizer = Lion(block.parameters(), lr=1e-3, capturable=True)

        def step(block: nn.Module = block, x: Tensor = x, optimizer: Lion = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = block(x).float().square().mean()
            loss.backward()
            optimizer.step()

        stream: Any = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                step()
            for _ in range(5):
                graph.replay()
        else:
            with torch.cuda.stream(stream):
                for _ in range(5):
                    step()
        torch.cuda.synchronize()
        weights.append([p.detach().clone() for p in block.parameters()])
    for a, e in zip(*weights, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


@gpu
def test_what_a_graph_cannot_follow_is_refused() -> None:
    block, x, mask = _block(), _x(), _mask(N, 40)
    run, half = graphed(block, x, mask), torch.autocast("cuda", torch.bfloat16)
    router, null = block.feed_forward.router, block.attention.null
    for match, call in (
        (r"the shape of tensor 1 was \[2, 128\], is now \[2, 100\]", lambda: run(x, mask[:, :100])),
        ("the number of tensors was 2, is now 1", lambda: run(x)),
        ("the requires_grad of tensor 0 was True, is now False", lambda: run(x.detach(), mask)),
        (r"autocast was None, is now torch\.bfloat16", lambda: half(run)(x, mask)),
        ("is_grad_enabled", lambda: torch.no_grad()(run)(x, mask)),
        (r"feed_forward.router.explore was 0.1, is now 0.5", lambda: (setattr(router, "explore", 0.5), run(x, mask))),
        (r"training was True, is now False", lambda: (setattr(router, "explore", 0.1), block.eval(), run(x, mask))),
        (
            r"attention.null was replaced",
            lambda: (block.train(), setattr(null, "data", torch.zeros_like(null)), run(x, mask)),
        ),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def _twice(module: nn.Module, args: Any, y: Tensor) -> Tensor:
    return 2 * y


CHANGES: dict[str, tuple[Any, str]] = {
    "a count becomes a share": (lambda b: setattr(b.feed_forward, "k", 1.0), r"feed_forward.k was 1, is now 1\.0"),
    "eps": (lambda b: setattr(b.norm, "eps", None), "norm.eps was 1e-05, is now None"),
    "a hook": (lambda b: b.norm.register_forward_hook(_twice), r"norm._forward_hooks was None, is now \["),
    "a forward": (lambda b: setattr(b.norm, "forward", torch.relu), "norm.forward was None, is now <built-in"),
    "a class": (onepass.swap, "norm.__class__ was <class 'torch.*, is now <class 'onepass"),
    "a parameter": (lambda b: setattr(b.norm, "bias", nn.Parameter(torch.ones(4))), "norm.bias was replaced"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_a_module_is_seen(name: str) -> None:
    """By value and by type, hooks and classes too; what comes later and what is gone."""
    change, message = CHANGES[name]
    module = nn.Module()
    module.norm, module.feed_forward = nn.LayerNorm(4), RoutedBlock(DIM, 1).feed_forward
    cpu = torch.device("cpu")
    before = settings(module, cpu)
    refuse_changed(before, settings(module, cpu))
    change(module)
    with pytest.raises(ValueError, match=message):
        refuse_changed(before, settings(module, cpu))
    with pytest.raises(ValueError, match="since the capture"):
        refuse_changed(settings(module, cpu), before)


@pytest.mark.parametrize(("arguments", "warmup", "error", "message"), [
    ((torch.relu, torch.ones(2)), 3, TypeError, "module must be an nn.Module, got builtin_function_or_method"),
    ((nn.Identity(), 3), 3, TypeError, "argument 0 must be a tensor, got int"),
    ((nn.Identity(), torch.ones(2)), 3, ValueError, "tensor 0 must be on a CUDA device, got one on cpu"),
    ((nn.Identity(),), 3, ValueError, "give the sample arguments"),
    *(((nn.Identity(), torch.ones(2)), warmup, error, "graphed: warmup")
      for warmup, error in ((0, ValueError), (1.5, TypeError), (True, TypeError))),
])  # fmt: skip
def test_other_arguments(arguments: tuple[Any, ...], warmup: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        graphed(*arguments, warmup=warmup)


@gpu
def test_without_gradients_there_is_nothing_to_capture() -> None:
    with pytest.raises(ValueError, match="gradients"), torch.no_grad():
        graphed(_block(), _x())

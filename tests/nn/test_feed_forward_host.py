"""What one pass of `RoutedFeedForward` costs the host, counted: kernels are not run, what starts them is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onepass.core import launch as core
from onepass.core import replay
from onepass.core.launch import INTERPRET
from onepass.nn import RoutedFeedForward, feed_forward_node

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels are not run")


class _Host:
    """CPU tensors that take the way of CUDA tensors; counts launches, and how often a stretch ran as written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from onepass.ops.routing import branch, kernels_branch, kernels_cast, kernels_norm, kernels_probe, rows
        from onepass.ops.routing import kernels_triton as kernels_rows
        from onepass.ops.soft_topk import kernels_select, kernels_topk, kernels_triton, op, op_topk

        self.launches = 0
        self.written: Counter[str] = Counter()
        none = SimpleNamespace(calls=[])
        hooks = SimpleNamespace(launch_enter_hook=none, launch_exit_hook=none)

        def run(*args: Any) -> None:
            self.launches += 1

        entry = core.Compiled(run, (None,), lambda: None, lambda device: None, hooks, None)

        def launch(kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, **options: Any) -> None:
            if core._recording.recorder is not None:
                core._recording.recorder.launched(entry, grid, tensors, (*numbers, *constants))
            run()

        for module in (kernels_rows, kernels_branch, kernels_cast, kernels_norm, kernels_probe,
                       kernels_triton, kernels_select, kernels_topk):  # fmt: skip
            monkeypatch.setattr(module, "launch", launch)
        for module in (branch, rows, op, op_topk):
            monkeypatch.setattr(module, "uses_triton", lambda x: True)
        monkeypatch.setattr(replay, "_on_gpu", lambda x: True)
        for name in STRETCHES:
            monkeypatch.setattr(feed_forward_node, name, self._counted(name, getattr(feed_forward_node, name)))

    def _counted(self, name: str, stretch: Any) -> Callable[..., Any]:
        # what `replayed` wrapped, wrapped anew: with a memory of its own
        cells = [c.cell_contents for c in stretch.__closure__]
        function = next(c for c in cells if getattr(c, "__name__", "") in PLAIN)

        def written(*args: Any) -> Any:
            self.written[name] += 1
            return function(*args)

        return replay.replayed(written)


# stretches of kernels between the products, and the functions behind them
STRETCHES = (
    "_before_products", "_add_chosen", "_before_backward_products", "_gelu_backward", "_after_backward_products",
)  # fmt: skip
PLAIN = {*STRETCHES, "add_rows"}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> _Host:
    return _Host(monkeypatch)


def _pass(layer: RoutedFeedForward, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, mask)
    assert isinstance(y, torch.Tensor)
    torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    return y


@pytest.mark.parametrize("masked", [False, True])
def test_every_stretch_is_replayed(host: _Host, masked: bool) -> None:
    layer, x = RoutedFeedForward(32, 1 / 16), torch.randn(2, 64, 32, requires_grad=True)
    mask = torch.ones(2, 64, dtype=torch.bool) if masked else None
    for _ in range(5):
        _pass(layer, x, mask)
    assert host.written == dict.fromkeys(STRETCHES, 2)


def test_one_node_and_its_kernels(host: _Host) -> None:
    """7 launches forward: norm and scores, solve, select, sort, norm of the chosen, cast, addition; 11 backward."""
    layer, x = RoutedFeedForward(32, 1 / 16), torch.randn(2, 64, 32, requires_grad=True)
    for _ in range(3):
        y = _pass(layer, x, None)
    assert y.grad_fn is not None
    assert {type(node).__name__ for node, _ in y.grad_fn.next_functions if node is not None} == {"AccumulateGrad"}
    host.launches = 0
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert host.launches == 7
    torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    assert host.launches == 18


def test_what_torch_is_called_for(host: _Host) -> None:
    """Products, GELUs, sums of parts, and the views that these take; kernels get theirs without torch."""
    layer, x = RoutedFeedForward(32, 1 / 16), torch.randn(2, 64, 32, requires_grad=True)
    for _ in range(3):
        _pass(layer, x, None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        _pass(layer, x, None)
    ours = [
        e.name.removeprefix("aten::")
        for e in seen.events()
        if e.name.startswith("aten::") and (e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::"))
    ]
    found = Counter(ours)
    for own in ("ones_like", "to"):  # of this test: the gradient; of a CPU: products that give fp32 are cast
        del found[own]
    assert found == {
        "linear": 3, "addmm": 1, "mm": 8, "t": 5, "gelu": 2, "sum": 2, "split_with_sizes": 2, "view": 10,
    }  # fmt: skip

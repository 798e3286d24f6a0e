"""Which of our operators a compiled or exported program holds, and how many graphs serve all shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd


def operators(graph: Any) -> list[str]:
    """The names of our operators in an FX graph, in order."""
    return [str(node.target) for node in graph.nodes if "onepass" in str(node.target)]


def compiled(module: nn.Module, x: Tensor) -> tuple[Tensor, list[list[str]]]:
    """The compiled module's result, and the operators of its graphs: forward now, backward once it has run."""
    graphs: list[list[str]] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(operators(graph.graph))
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)  # type: ignore[no-untyped-call]
    return torch.compile(module, fullgraph=True, backend=backend)(x), graphs


def graphs_for(module: nn.Module, inputs: Iterable[Tensor]) -> int:
    """How many graphs `dynamic=True` makes for these inputs; each result equals eager's bit for bit."""
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for x in inputs:
        torch.testing.assert_close(run(x), module(x), rtol=0, atol=0)
    return graphs


def exported(module: nn.Module, x: Tensor, others: Iterable[Tensor]) -> list[str]:
    """The operators of the program exported with named batch and length; on others it equals eager bit for bit."""
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("n", min=16, max=4096)}
    program = torch.export.export(module, (x,), dynamic_shapes=(sizes,))
    for other in others:
        torch.testing.assert_close(program.module()(other), module(other), rtol=0, atol=0)
    return operators(program.graph)

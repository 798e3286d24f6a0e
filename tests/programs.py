"""Which of our operators a compiled or exported program holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd


def operators(graph: Any) -> list[str]:
    """The names of our operators in an FX graph, in order."""
    return [str(node.target) for node in graph.nodes if "onepass" in str(node.target)]


def compiled(call: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, list[list[str]]]:
    """The compiled call's result, and the operators of its graphs: forward now, backward once it has run."""
    graphs: list[list[str]] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(operators(graph.graph))
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)  # type: ignore[no-untyped-call]
    return torch.compile(call, fullgraph=True, backend=backend)(*args), graphs

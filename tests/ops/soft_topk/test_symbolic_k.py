"""A k that follows from a shape: one compiled and one exported program for every length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import onepass
from onepass.core.launch import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="compiled code calls the registered op")
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "soft_topk of a float": lambda x: onepass.soft_topk(x, x.shape[-1] / 4),
    "soft_topk of an int": lambda x: onepass.soft_topk(x, x.shape[-1] // 4),
    "coor_descent": lambda x: onepass.coor_descent(x, n_iters=5, k=x.shape[-1] // 4),
    "topk": lambda x: onepass.topk(x, x.shape[-1] // 4).values,
}


@pytest.mark.parametrize("name", CALLS)
def test_one_program_for_every_length(name: str) -> None:
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(CALLS[name], dynamic=True, fullgraph=True, backend=counter)
    for n in range(8, 40, 4):
        x = torch.randn(3, n)
        torch.testing.assert_close(compiled(x), CALLS[name](x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_an_exported_program_takes_other_lengths(name: str, strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return CALLS[name](x)

    shapes = {"x": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(Model(), (torch.randn(3, 12),), dynamic_shapes=shapes, strict=strict).module()
    x = torch.randn(2, 20)
    torch.testing.assert_close(program(x), CALLS[name](x))

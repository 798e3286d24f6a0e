"""vmap over rows that share their weights is one call of the op, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onepass import layer_norm, rms_norm, weighted_sum
from onepass.core.launch import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="torch.func reaches the registered op, which is tested eagerly")


class _Calls(TorchDispatchMode):
    """Names of the onepass ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "onepass":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted_sum": weighted_sum,
    "vectors": lambda x, w: weighted_sum(x, torch.stack([w, 2 * w])),
    "layer_norm": lambda x, w: layer_norm(x, w, w),
    "rms_norm": rms_norm,
    "stable": lambda x, w: layer_norm(x, w, stable=True),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(5, 2, 3, 8), (5, 8), (5, 0, 8)])
@pytest.mark.parametrize("dim", [0, 1])
def test_one_call_for_the_whole_batch(name: str, shape: tuple[int, ...], dim: int) -> None:
    call, batch, w = CALLS[name], torch.randn(shape), torch.randn(8)
    rows = batch.movedim(0, dim) if dim < len(shape) - 1 else batch
    dim = dim if dim < len(shape) - 1 else 0
    with _Calls() as calls:
        y = torch.vmap(call, in_dims=(dim, None))(rows, w)
    assert len(calls.names) == 1
    torch.testing.assert_close(y, torch.stack([call(x, w) for x in batch]))

    grad = torch.func.grad(lambda x: call(x, w).square().sum())
    with _Calls() as calls:
        dx = torch.vmap(grad, in_dims=dim)(rows)
    assert len(calls.names) == 2
    torch.testing.assert_close(dx, torch.stack([grad(x) for x in batch]))

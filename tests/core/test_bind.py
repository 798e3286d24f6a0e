"""What one set of formulas gives: batches in one call, refused tangents; and garbage around captures."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from harness import Calls
from onepass import layer_norm, rms_norm, weighted_sum
from onepass.core.garbage import collected, no_collection
from onepass.core.launch import INTERPRET
from onepass.ops.norm import op

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "layer_norm": layer_norm,
    "residual": lambda x: layer_norm(x, residual=x.new_ones(3, 8))[0],
    "rms_norm": lambda x: rms_norm(x, x.new_ones(8), offset=1.0),
    "weighted_sum": lambda x: weighted_sum(x, x.new_ones(8)),
}


def _dual(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, torch.ones_like(x)))


WAYS: dict[str, Callable[[Callable[[Tensor], Any], Tensor], Any]] = {
    "dual": _dual,
    "dual in a graph": lambda call, x: _dual(call, x.requires_grad_()),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "compiled jvp": lambda call, x: torch.compile(lambda t: torch.func.jvp(call, (t,), (t,)), backend="eager")(x),
}
REFUSED = "(norm|weighted_sum): forward-mode derivatives are not implemented"


@pytest.mark.parametrize("name", CALLS)
def test_what_carries_no_tangent_is_computed(name: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with forward_ad.dual_level():
        y = CALLS[name](x)
    torch.testing.assert_close(y, CALLS[name](x))
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x) for out in (y, CALLS[name](x))))


@pytest.mark.skipif(INTERPRET, reason="torch.func reaches the registered op, which is tested eagerly")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_tangents_are_refused(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # as torch's operations, which compiled norms are by default, they have derivatives of every kind
    monkeypatch.setattr(op, "COMPILED", "kernels")
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match=REFUSED):
        WAYS[way](CALLS[name], torch.randn(3, 8))


BATCHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted_sum": weighted_sum,
    "vectors": lambda x, w: weighted_sum(x, torch.stack([w, 2 * w])),
    "layer_norm": lambda x, w: layer_norm(x, w, w),
    "rms_norm": rms_norm,
    "stable": lambda x, w: layer_norm(x, w, stable=True),
}


@pytest.mark.skipif(INTERPRET, reason="torch.func reaches the registered op, which is tested eagerly")
@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("shape", [(5, 2, 3, 8), (5, 8), (5, 0, 8)])
@pytest.mark.parametrize("dim", [0, 1])
def test_one_call_for_the_whole_batch(name: str, shape: tuple[int, ...], dim: int) -> None:
    call, batch, w = BATCHED[name], torch.randn(shape), torch.randn(8)
    rows = batch.movedim(0, dim) if dim < len(shape) - 1 else batch
    dim = dim if dim < len(shape) - 1 else 0
    with Calls() as calls:
        y = torch.vmap(call, in_dims=(dim, None))(rows, w)
    assert len(calls.found) == 1
    torch.testing.assert_close(y, torch.stack([call(x, w) for x in batch]))

    grad = torch.func.grad(lambda x: call(x, w).square().sum())
    with Calls() as calls:
        dx = torch.vmap(grad, in_dims=dim)(rows)
    assert len(calls.found) == 2
    torch.testing.assert_close(dx, torch.stack([grad(x) for x in batch]))


class _Ring:
    def __init__(self) -> None:
        self.own = self


def test_rings_go_before_the_block_and_stay_during_it() -> None:
    before = weakref.ref(_Ring())
    with collected():
        assert before() is None
        during = weakref.ref(_Ring())
        # far more than start a collection
        _ = [[] for _ in range(100_000)]
        assert during() is not None
    gc.collect()
    assert during() is None


@pytest.mark.parametrize("block", [collected, no_collection])
def test_the_collector_is_afterwards_as_before(
    block: Callable[[], AbstractContextManager[None]], enabled: bool
) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), block():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()

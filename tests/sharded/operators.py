"""Every operator on DTensors against the same call on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Shard, distribute_module, distribute_tensor

import onepass
from harness import SPECS, build, largest_small, replace
from onepass.ops.norm import op as norm
from onepass.ops.norm.definition import NONE
from onepass.ops.routing.op import scatter_add, score
from onepass.ops.span_attention.op import span_attention
from onepass.ops.weighted_sum import op as weighted_sum
from sharded.compare import PLACES, Placements, R, case, compare, many, mesh, whole, wide
from sharded.modules import DIM, EVERY

SAMPLES = {f"{spec.name}, {name}": (spec, name) for spec in SPECS for name in largest_small(spec)}
# their results lie where their rows lie
BY_ROWS = ("layer_norm", "rms_norm", "weighted_sum", "soft_topk", "coor_descent", "topk")


@many("the contract", {"sample": list(SAMPLES), "place": [0, 1, 2, 3, "whole", "sum"], "alike": [False, True]})
def _(sample: str, place: int | str, alike: bool) -> None:
    """Samples with their first argument placed in every way, the others whole, or placed alike where that fits."""
    spec, name = SAMPLES[sample]
    given = build(spec, name, mesh().device_type, wide(1).dtype)
    x = given.args[0]
    p: Placements = [Shard(place)] if isinstance(place, int) else PLACES[place]
    tensors = {k: v for k, v in (*enumerate(given.args), *given.kwargs.items()) if isinstance(v, Tensor)}
    fit = [
        isinstance(place, int) and t.shape[place : place + 1] == x.shape[place : place + 1] for t in tensors.values()
    ]
    if (isinstance(place, int) and place >= x.dim()) or (alike and not any(fit[1:])):
        return
    if "groups" in given.kwargs and place == x.dim() - 1:
        return  # torch splits no columns that its shards cut

    def call(*ts: Tensor) -> Any:
        known = replace(given, dict(zip(tensors, ts, strict=True)))
        return spec.op(*known.args, **known.kwargs)

    rows = spec.name in BY_ROWS and isinstance(place, int) and place < x.dim() - 1
    out = p if rows and x.shape[place] >= mesh().size() else None
    placements = [p if t is x or (alike and f) else [R] for t, f in zip(tensors.values(), fit, strict=True)]
    compare(call, list(tensors.values()), placements, out=out)


@many("torch's ways of calling", {"place": [0, 1, 2]})
def _(place: int) -> None:
    p, x, w = [Shard(place)], wide(4, 6, 8), wide(6, 8)
    mask = (wide(4, 6, 8) > -1).to(mesh().device_type)

    def allowed(s: Tensor) -> Tensor:
        return distribute_tensor(mask, mesh(), p) if hasattr(s, "placements") else mask

    compare(lambda s: onepass.topk(s, 3, 1, mask=allowed(s)), [x], [p])
    compare(lambda s: onepass.soft_topk(s, 3, dim=0, mask=allowed(s)), [x], [p])
    compare(lambda x, w: onepass.layer_norm(x, (6, 8), w, w, 1e-3), [x, w], [p, [R]])
    # of the sum alone the weight has no gradient
    compare(lambda x, w: onepass.layer_norm(x, (6, 8), w, residual=x)[1], [x, w], [p, [R]])


@case("calls that differ in a flag alone are placed anew")
def _() -> None:
    x = distribute_tensor(wide(4, 6).to(mesh().device_type), mesh(), [Shard(0)])
    w = distribute_tensor(wide(6).to(mesh().device_type), mesh(), [R])
    for has_mean, stable in ((False, False), (True, False), (True, True), (False, False)):
        stats = norm.forward_op(x, None, None, w, None, 1e-5, 0.0, has_mean, stable, *NONE)[4]
        assert stats.shape == (1 + has_mean + stable, 4), stats.shape
    y = distribute_tensor(wide(4).to(mesh().device_type), mesh(), [Shard(0)])
    for need_x, need_w in ((True, True), (True, False), (False, True), (True, True)):
        dx, dw = weighted_sum.backward_op(y, x, w, None, need_x, need_w)
        assert (dx.shape, dw.shape) == ((4, 6) if need_x else (0,), (6,) if need_w else (0,))
        assert dw.placements == ((Partial(),) if need_w else (R,))


@case("weighted_sum: a sharded sum gives a partial result")
def _() -> None:
    compare(onepass.weighted_sum, [wide(5, 7), wide(7)], [[Shard(1)], [Shard(0)]], out=[Partial()])
    compare(onepass.weighted_sum, [wide(5, 7), wide(7)], [[Shard(1)], [R]], out=[Partial()])
    compare(onepass.weighted_sum, [wide(5, 7), wide(4, 7)], [[R], [Shard(0)]], out=[Shard(1)])


@many("scores sharded along the sequence", {"op": ["soft_topk", "coor_descent", "topk"], "n": [64, 65], "rows": [1, 4]})
def _(op: str, n: int, rows: int) -> None:
    calls: dict[str, Callable[[Tensor], Any]] = {
        "soft_topk": lambda s: onepass.soft_topk(s, 5.5),
        "coor_descent": lambda s: onepass.coor_descent(s, n_iters=5, k=5.5),
        "topk": lambda s: onepass.topk(s, 5),
    }
    compare(calls[op], [torch.randn(rows, n)], [[Shard(1)]], out=[R], exact=True)


@case("routing: scatter_add into rows, and features sharded")
def _() -> None:
    # distinct within a route, one missing
    indices = torch.argsort(torch.rand(4, 6))[:, :3]
    indices[:, 0] = -1
    tensors = wide(24, 5), wide(4, 3, 5), wide(4, 3), indices
    compare(scatter_add, tensors, [[R]] * 4)
    compare(scatter_add, tensors, [[Shard(0)], [Shard(0)], [Shard(0)], [Shard(0)]])
    compare(scatter_add, tensors, [[Shard(1)], [Shard(2)], [R], [R]], out=[Shard(1)])


# shapes of the arguments: those of x are placed as x is, the others are whole
X, W = (5, 6, 7), (7,)
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "layer_norm": (onepass.layer_norm, [X, W, W]),
    "stable layer_norm": (lambda x: onepass.layer_norm(x, stable=True), [X]),
    "rms_norm": (lambda x, r: onepass.rms_norm(x, residual=r), [X, X]),
    "weighted_sum": (onepass.weighted_sum, [X, W]),
    "soft_topk": (lambda s, k: onepass.soft_topk(s, k.abs() + 1), [X, (5, 1)]),
    "coor_descent": (lambda s: onepass.coor_descent(s, n_iters=4, k=3), [X]),
    "topk": (lambda s: onepass.topk(s, 3, sorted=False, ties="last"), [X]),
}
PAIRS = {
    "0 and 1": [Shard(0), Shard(1)], "1 and 0": [Shard(1), Shard(0)], "0 and 0": [Shard(0), Shard(0)],
    "0 and whole": [Shard(0), R], "whole and 1": [R, Shard(1)], "0 and last": [Shard(0), Shard(2)],
    "last and 1": [Shard(2), Shard(1)], "sum and whole": [Partial(), R],
}  # fmt: skip


@many("upstream gradients sharded otherwise", {"op": list(CALLS), "x": [0, 1], "up": [0, 1]})
def _(op: str, x: int, up: int) -> None:
    # torch may then move what the forward pass kept: it must be placed as it says
    call, shapes = CALLS[op]
    compare(call, [wide(*s) for s in shapes], [[Shard(x)] if s == X else [R] for s in shapes], upstream=[Shard(up)])


@many("meshes of two dimensions", {"op": list(CALLS), "place": list(PAIRS)})
def _(op: str, place: str) -> None:
    call, shapes = CALLS[op]
    on = mesh(2, dist.get_world_size() // 2)
    compare(call, [wide(*s) for s in shapes], [PAIRS[place] if s == X else [R, R] for s in shapes], on)


@many("upstream gradients sharded otherwise: attention, score", {"x": [0, 1, 2], "up": [0, 1, 2]})
def _(x: int, up: int) -> None:
    i = torch.arange(6)
    q, k, v = (wide(5, 6, 4, 8) for _ in range(3))
    compare(span_attention, [q, k, v, i - 2, i + 1], [[Shard(x)]] * 3 + [[R], [R]], upstream=[Shard(up)])
    if max(x, up) < 2:
        compare(score, [wide(5, 6, 7), wide(7)], [[Shard(x)], [R]], upstream=[Shard(up)])


@case("torch.compile")
def _() -> None:
    compare(onepass.rms_norm, [wide(4, 6), wide(6)], [[Shard(0)], [R]], out=[Shard(0)], compiled=True)
    compare(
        lambda x, w, r: onepass.layer_norm(x, w, residual=r),
        [wide(4, 3, 6), wide(6), wide(4, 3, 6)],
        [[Shard(1)], [R], [Shard(1)]],
        compiled=True,
    )
    compare(lambda s: onepass.coor_descent(s, n_iters=3, k=2), [wide(4, 6)], [[Shard(1)]], compiled=True)
    compare(lambda s: onepass.topk(s, 2), [wide(4, 6)], [[Shard(0)]], compiled=True)


@many("torch.compile leaves layers of DTensors to eager", {"layer": ["Routed", "RoutedBlock", "LocalAttention"]})
def _(layer: str) -> None:
    layer = distribute_module(EVERY[layer]().to(mesh().device_type), mesh())
    x = distribute_tensor(torch.randn(4, 20, DIM, device=mesh().device_type), mesh(), [Shard(0)])
    y, got = layer(x), torch.compile(layer, backend="aot_eager")(x)
    got.sum().backward()
    torch.testing.assert_close(whole(got.detach()), whole(y.detach()))


@case("a plain tensor beside a DTensor is refused by name")
def _() -> None:
    x = distribute_tensor(wide(4, 6).to(mesh().device_type), mesh(), [Shard(0)])
    with pytest.raises(RuntimeError, match=r"onepass\.norm"):
        onepass.rms_norm(x, wide(6).to(x.device))

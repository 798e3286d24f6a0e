"""Every operator on DTensors against the same call on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Shard, distribute_tensor

import onepass
from onepass.ops.causal_choice.op import causal_choice
from onepass.ops.norm import family as norm
from onepass.ops.norm.options import NONE
from onepass.ops.routing.op import gather, scatter_add, score
from onepass.ops.span_attention.op import span_attention
from onepass.ops.span_attention.op_rotary import rotary, rotary_attention
from onepass.ops.weighted_sum import op as weighted_sum
from sharded.compare import CASES, PLACES, Placements, R, case, compare, many, mesh, placed, whole, wide
from sharded.processes import main


@many(
    "norms",
    {"stable": [None, False, True], "residual": [False, True], "vectors": ["", "w", "wb"], "place": list(PLACES)},
)
def _(stable: bool | None, residual: bool, vectors: str, place: str) -> None:
    if stable is None and "b" in vectors:
        return
    weight = wide(6) if "w" in vectors else None
    bias = wide(6) if "b" in vectors else None

    def call(x: Tensor, r: Tensor | None, w: Tensor | None, b: Tensor | None) -> Any:
        if stable is None:
            return onepass.rms_norm(x, w, offset=0.5, residual=r)
        return onepass.layer_norm(x, w, b, stable=stable, residual=r)

    # uneven shards: 5 rows; with four processes also empty ones
    p = PLACES[place]
    out = {"0": p, "1": p, "last": [R], "whole": [R]}.get(place)
    args = wide(5, 6, 6), wide(5, 6, 6) if residual else None, weight, bias
    compare(call, args, [p, p, [R], [R]], out=out)


@many("norms: what needs a gradient", {"x": [True, False], "w": [True, False], "b": [True, False]})
def _(x: bool, w: bool, b: bool) -> None:
    tensors = wide(4, 6), wide(6), wide(6)
    a = [t.clone().to(mesh().device_type).requires_grad_(n) for t, n in zip(tensors, (x, w, b), strict=True)]
    s = [
        placed(t.detach(), mesh(), p).requires_grad_(t.requires_grad)
        for t, p in zip(a, ([Shard(0)], [R], [R]), strict=True)
    ]
    if not (x or w or b):
        return
    onepass.layer_norm(*a).square().sum().backward()
    onepass.layer_norm(*s).square().sum().backward()
    for e, g in zip(a, s, strict=True):
        assert (e.grad is None) == (g.grad is None)
        if e.grad is not None:
            most = 1e-5 if e.is_cuda else 1e-12
            torch.testing.assert_close(whole(g.grad), e.grad, rtol=most, atol=most)
    if w:
        assert s[1].grad.placements == (Partial(),)


@case("calls that differ in a flag alone are placed anew")
def _() -> None:
    x = distribute_tensor(wide(4, 6).to(mesh().device_type), mesh(), [Shard(0)])
    w = distribute_tensor(wide(6).to(mesh().device_type), mesh(), [R])
    for has_mean, stable in ((False, False), (True, False), (True, True), (False, False)):
        stats = norm.forward_op(x, None, None, w, None, 1e-5, 0.0, has_mean, stable, *NONE)[4]
        assert stats.shape == (1 + has_mean + stable, 4), stats.shape
    y = distribute_tensor(wide(4).to(mesh().device_type), mesh(), [Shard(0)])
    for need_x, need_w in ((True, True), (True, False), (False, True), (True, True)):
        dx, dw = weighted_sum.backward_op(y, x, w, need_x, need_w)
        assert (dx.shape, dw.shape) == ((4, 6) if need_x else (0,), (6,) if need_w else (0,))
        assert dw.placements == ((Partial(),) if need_w else (R,))


@many("what the forward pass keeps for backward is placed as it says", {"d": [0, 1]})
def _(d: int) -> None:
    x = wide(5, 6, 7).to(mesh().device_type)
    placed_x = distribute_tensor(x, mesh(), [Shard(d)])
    calls: list[Callable[[Tensor], Any]] = [
        lambda x: norm.forward_op(x, None, None, None, None, 1e-5, 0.0, True, True, *NONE),
        lambda x: norm.forward_op(x, x, None, None, None, 1e-5, 0.0, True, False, *NONE),
        lambda x: torch.ops.onepass.soft_topk(x, None, None, None, 2.5, 0.5, 0),
        lambda x: torch.ops.onepass.coor_descent(x, None, None, 2.5, 4, 0.5, 0.5, 1.0, True),
        lambda x: torch.ops.onepass.topk(x, None, None, None, None, 3, 0.5, 0, True, True, True, False),
    ]
    for call in calls:
        for e, g in zip(call(x), call(placed_x), strict=True):
            assert g.placements != (R,) or not e.numel()
            torch.testing.assert_close(g.full_tensor(), e)


@many("norms: weights of the rows' own, gates", {"shape": [(7,), (6, 7), (5, 1, 7)], "place": ["0", "1", "last"]})
def _(shape: tuple[int, ...], place: str) -> None:
    def call(x: Tensor, z: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return onepass.layer_norm(x, w, b, gate=z, offset=1.0)

    p = PLACES[place]
    out = [R] if place == "last" else p
    compare(call, [wide(5, 6, 7), wide(5, 6, 7), wide(*shape), wide(*shape)], [p, p, [R], [R]], out=out)


@many("qk_norm_rope", {"place": [0, 1, 2], "positions": [None, 1, 2]})
def _(place: int, positions: int | None) -> None:
    if place == 1 and positions is None:
        return
    angles = wide(8, 3)
    at = None if positions is None else torch.arange(24).view(4, 6).remainder(8)[slice(None) if positions == 2 else 0]

    def call(q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        tables = angles.cos().to(q.device), angles.sin().to(q.device), None if at is None else at.to(q.device)
        if hasattr(q, "placements"):
            tables = tuple(None if t is None else distribute_tensor(t, mesh(), [R]) for t in tables)
        return onepass.qk_norm_rope(q, k, w, None, cos=tables[0], sin=tables[1], positions=tables[2])

    p = [Shard(place)]
    compare(call, [wide(4, 6, 4, 8), wide(4, 6, 4, 8), wide(8)], [p, p, [R]], out=p)


@case("norms: the weight is redistributed, one row, no rows, fewer rows than processes")
def _() -> None:
    compare(onepass.rms_norm, [wide(4, 6), wide(6)], [[Shard(0)], [Shard(0)]])
    compare(onepass.rms_norm, [wide(6), wide(6)], [[Shard(0)], [R]], out=[R])
    compare(onepass.rms_norm, [wide(1, 6), wide(6)], [[Shard(0)], [R]])
    compare(onepass.rms_norm, [wide(0, 6), wide(6)], [[Shard(0)], [R]])
    compare(onepass.rms_norm, [wide(4, 1), wide(1)], [[Shard(0)], [R]])


@many("weighted_sum", {"vectors": [1, 3], "place": list(PLACES), "weight": ["whole", "0", "1"]})
def _(vectors: int, place: str, weight: str) -> None:
    if vectors == 1 and weight == "1":
        return
    w = wide(7) if vectors == 1 else wide(vectors, 7)
    compare(onepass.weighted_sum, [wide(5, 6, 7), w], [PLACES[place], PLACES[weight]])


@case("weighted_sum: a sharded sum gives a partial result")
def _() -> None:
    compare(onepass.weighted_sum, [wide(5, 7), wide(7)], [[Shard(1)], [Shard(0)]], out=[Partial()])
    compare(onepass.weighted_sum, [wide(5, 7), wide(7)], [[Shard(1)], [R]], out=[Partial()])
    compare(onepass.weighted_sum, [wide(5, 7), wide(4, 7)], [[R], [Shard(0)]], out=[Shard(1)])


BESIDE: dict[str, tuple[tuple[int, ...], dict[str, Placements]]] = {
    "()": ((), {"0": [R], "1": [R], "last": [R]}),
    "(6,)": ((6,), {"0": [R], "1": [Shard(0)], "last": [R]}),
    "(5,1)": ((5, 1), {"0": [Shard(0)], "1": [R], "last": [R]}),
    "(5,6)": ((5, 6), {"0": [Shard(0)], "1": [Shard(1)], "last": [R]}),
}


@many(
    "soft_topk",
    {"k": [None, *BESIDE], "eps": [None, "(5,6)"], "mask": [None, (6, 7), (5, 1, 7)], "place": ["0", "1"]},
)
def _(k: str | None, eps: str | None, mask: tuple[int, ...] | None, place: str) -> None:
    def vector(name: str | None) -> tuple[Tensor | None, Placements]:
        if name is None:
            return None, [R]
        shape, where = BESIDE[name]
        return torch.rand(shape, dtype=torch.float64) + 1.5, where[place]

    of_k, of_eps = vector(k), vector(eps)
    of_mask = None if mask is None else torch.rand(mask) < 0.8

    def call(s: Tensor, k: Tensor | None, eps: Tensor | None, mask: Tensor | None) -> Tensor:
        return onepass.soft_topk(s, 2.5 if k is None else k, eps=0.5 if eps is None else eps, mask=mask)

    places = [PLACES[place], of_k[1], of_eps[1], [R]]
    compare(call, [wide(5, 6, 7), of_k[0], of_eps[0], of_mask], places, out=PLACES[place])


@many("soft_topk: kinds", {"kind": ["capped_exp", "sigmoid", "laplace", "clamp"], "place": list(PLACES)})
def _(kind: str, place: str) -> None:
    def call(s: Tensor, k: Tensor) -> Tensor:
        return onepass.soft_topk(s, k, kind=kind)

    compare(call, [wide(5, 6, 9), torch.full((), 2.5, dtype=torch.float64)], [PLACES[place], [R]])


@many("coor_descent", {"k": [None, *BESIDE], "mask": [None, (7,), (5, 6, 7)], "place": ["0", "1"]})
def _(k: str | None, mask: tuple[int, ...] | None, place: str) -> None:
    shape, where = ((), {}) if k is None else BESIDE[k]
    of_k = None if k is None else torch.rand(shape, dtype=torch.float64) + 1.5

    def call(s: Tensor, k: Tensor | None, mask: Tensor | None) -> Tensor:
        return onepass.coor_descent(s, n_iters=6, k=2.5 if k is None else k, eps=0.5, mask=mask)

    of_mask = None if mask is None else torch.rand(mask) < 0.8
    compare(call, [wide(5, 6, 7), of_k, of_mask], [PLACES[place], where.get(place, [R]), [R]], out=PLACES[place])


@many("topk", {"eps": [None, "()", "(5,6)"], "mask": [None, (5, 6, 7)], "place": ["0", "1"], "k": [0, 4, 9]})
def _(eps: str | None, mask: tuple[int, ...] | None, place: str, k: int) -> None:
    shape, where = ((), {}) if eps is None else BESIDE[eps]
    of_eps = None if eps is None else torch.rand(shape, dtype=torch.float64) + 0.5

    def call(s: Tensor, eps: Tensor | None, mask: Tensor | None) -> Any:
        return onepass.topk(s, k, eps=0.5 if eps is None else eps, mask=mask, pad=True)

    of_mask = None if mask is None else torch.rand(mask) < 0.8
    places = [PLACES[place], where.get(place, [R]), [R]]
    compare(call, [wide(5, 6, 7), of_eps, of_mask], places, gradients=k > 0)


@many("scores sharded along the sequence", {"op": ["soft_topk", "coor_descent", "topk"], "n": [64, 65], "rows": [1, 4]})
def _(op: str, n: int, rows: int) -> None:
    calls: dict[str, Callable[[Tensor], Any]] = {
        "soft_topk": lambda s: onepass.soft_topk(s, 5.5),
        "coor_descent": lambda s: onepass.coor_descent(s, n_iters=5, k=5.5),
        "topk": lambda s: onepass.topk(s, 5),
    }
    compare(calls[op], [torch.randn(rows, n)], [[Shard(1)]], out=[R], exact=True)


@many("routing: score", {"weight": [(6,), (2, 6)], "place": list(PLACES)})
def _(weight: tuple[int, ...], place: str) -> None:
    compare(score, [wide(4, 5, 6), wide(*weight)], [PLACES[place], [R]])


def _indices(*shape: int) -> Tensor:
    # distinct within a route, one missing
    found = torch.argsort(torch.rand(*shape[:-1], 6))[..., : shape[-1]]
    found[..., 0] = -1
    return found


@many("routing: gather", {"shape": [(4, 3), (4, 2, 3)], "x": list(PLACES), "indices": ["whole", "0", "1"]})
def _(shape: tuple[int, ...], x: str, indices: str) -> None:
    compare(gather, [wide(4, 6, 5), _indices(*shape)], [PLACES[x], PLACES[indices]])


@many(
    "routing: scatter_add",
    {"shape": [(4, 3), (4, 2, 3)], "gates": [True, False], "y": ["0", "last", "whole"], "u": ["whole", "0"]},
)
def _(shape: tuple[int, ...], gates: bool, y: str, u: str) -> None:
    tensors = wide(4, 6, 5), wide(*shape, 5), wide(*shape) if gates else None, _indices(*shape)
    compare(scatter_add, tensors, [PLACES[y], PLACES[u], [R], [R]])


@case("routing: scatter_add into rows, and features sharded")
def _() -> None:
    tensors = wide(24, 5), wide(4, 3, 5), wide(4, 3), _indices(4, 3)
    compare(scatter_add, tensors, [[R]] * 4)
    compare(scatter_add, tensors, [[Shard(0)], [Shard(0)], [Shard(0)], [Shard(0)]])
    compare(scatter_add, tensors, [[Shard(1)], [Shard(2)], [R], [R]], out=[Shard(1)])


@many("span_attention", {"shared": [True, False], "mask": [True, False], "place": ["0", "1", "last", "whole"]})
def _(shared: bool, mask: bool, place: str) -> None:
    first = torch.arange(5) - 2
    first = first if shared else first.expand(4, 5).contiguous()
    q, k, v = (wide(4, 5, 2, 4) for _ in range(3))
    seen = torch.rand(4, 5) < 0.9 if mask else None

    def call(q: Tensor, k: Tensor, v: Tensor, first: Tensor, seen: Tensor | None) -> Tensor:
        return span_attention(q, k, v, first, first + 3, mask=seen)

    p = PLACES[place]
    compare(call, [q, k, v, first, seen], [p, p, p, [R], [R]])


@many("rotary", {"positions": [None, (5,), (4, 5)], "place": ["0", "1", "last", "whole"]})
def _(positions: tuple[int, ...] | None, place: str) -> None:
    p = None if positions is None else torch.randint(0, 100, positions)
    compare(rotary, [wide(4, 5, 2, 4), p], [PLACES[place], [R]])


@many("rotary_attention", {"place": ["0", "1", "whole"]})
def _(place: str) -> None:
    i = torch.arange(5)
    compare(
        rotary_attention, [wide(4, 5, 3, 2, 4), i - 2, i + 1],
        [PLACES[place], [R], [R]],
    )  # fmt: skip


@many("causal_choice", {"mask": [True, False], "place": ["0", "1", "whole"]})
def _(mask: bool, place: str) -> None:
    seen = torch.rand(4, 12) < 0.9 if mask else None

    def call(s: Tensor, m: Tensor | None) -> Any:
        return causal_choice(s, 4, block=4, memory=8, mask=m)

    compare(call, [wide(4, 12), seen], [PLACES[place], [R]])


OTHERS: dict[str, tuple[Callable[..., Any], int]] = {
    "layer_norm": (onepass.layer_norm, 1),
    "stable layer_norm": (lambda x: onepass.layer_norm(x, stable=True), 1),
    "rms_norm": (lambda x, r: onepass.rms_norm(x, residual=r), 2),
    "soft_topk": (lambda s: onepass.soft_topk(s, 3), 1),
    "coor_descent": (lambda s: onepass.coor_descent(s, n_iters=4, k=3), 1),
    "topk": (lambda s: onepass.topk(s, 3), 1),
}


@many("upstream gradients sharded otherwise", {"op": list(OTHERS), "x": [0, 1], "up": [0, 1], "n": [7, 64]})
def _(op: str, x: int, up: int, n: int) -> None:
    # torch may then move what the forward pass kept: it must be placed as it says
    call, inputs = OTHERS[op]
    if op == "layer_norm":
        compare(call, [wide(5, 6, n), wide(n)], [[Shard(x)], [R]], upstream=[Shard(up)])
    else:
        compare(call, [wide(5, 6, n)] * inputs, [[Shard(x)]] * inputs, upstream=[Shard(up)])


@many("upstream gradients sharded otherwise: attention, score", {"x": [0, 1, 2], "up": [0, 1, 2]})
def _(x: int, up: int) -> None:
    i = torch.arange(6)
    q, k, v = (wide(5, 6, 4, 8) for _ in range(3))
    places = [[Shard(x)]] * 3 + [[R], [R]]
    compare(span_attention, [q, k, v, i - 2, i + 1], places, upstream=[Shard(up)])
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
    compare(onepass.weighted_sum, [wide(4, 6), wide(6)], [[Shard(0)], [R]], compiled=True)
    compare(lambda s: onepass.soft_topk(s, 2), [wide(4, 6)], [[Shard(0)]], compiled=True)
    compare(lambda s: onepass.coor_descent(s, n_iters=3, k=2), [wide(4, 6)], [[Shard(1)]], compiled=True)
    compare(lambda s: onepass.topk(s, 2), [wide(4, 6)], [[Shard(0)]], compiled=True)


@case("a plain tensor beside a DTensor is refused by name")
def _() -> None:
    x = distribute_tensor(wide(4, 6).to(mesh().device_type), mesh(), [Shard(0)])
    with pytest.raises(RuntimeError, match=r"onepass\.norm"):
        onepass.rms_norm(x, wide(6).to(x.device))


PAIRS = {
    "0 and 1": [Shard(0), Shard(1)], "1 and 0": [Shard(1), Shard(0)], "0 and 0": [Shard(0), Shard(0)],
    "0 and whole": [Shard(0), R], "whole and 1": [R, Shard(1)], "0 and last": [Shard(0), Shard(2)],
    "last and 1": [Shard(2), Shard(1)], "sum and 0": [Partial(), Shard(0)],
}  # fmt: skip


@many("meshes of two dimensions", {"op": ["layer_norm", "weighted_sum", "soft_topk", "topk"], "place": list(PAIRS)})
def _(op: str, place: str) -> None:
    world = dist.get_world_size()
    on = mesh(2, world // 2)
    p = PAIRS[place]
    if isinstance(p[0], Partial):
        p = [Partial(), R]
    if op == "layer_norm":
        compare(onepass.layer_norm, [wide(5, 6, 7), wide(7), wide(7)], [p, [R, R], [R, R]], on)
    elif op == "weighted_sum":
        compare(onepass.weighted_sum, [wide(5, 6, 7), wide(7)], [p, [R, R]], on)
    elif op == "soft_topk":
        k = torch.rand(5, 1, dtype=torch.float64) + 1
        compare(onepass.soft_topk, [wide(5, 6, 7), k], [p, [R, R]], on)
    else:
        compare(lambda s: onepass.topk(s, 3), [wide(5, 6, 7)], [p], on)


if __name__ == "__main__":
    main(CASES)

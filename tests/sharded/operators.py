"""Every operator on DTensors against the same call on whole tensors: results, gradients, placements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from sharded.processes import main
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import onepass
from onepass.ops.causal_choice.op import causal_choice
from onepass.ops.routing.op import gather, scatter_add, score
from onepass.ops.span_attention.op import span_attention
from onepass.ops.span_attention.op_rotary import rotary, rotary_attention

CASES: dict[str, Callable[[], None]] = {}
R = Replicate()
Placements = Sequence[Placement]
_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh(*shape: int) -> DeviceMesh:
    """Return a mesh of this shape, by default of all processes in a row."""
    shape = shape or (dist.get_world_size(),)
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cuda" if dist.get_backend() == "nccl" else "cpu", shape)
    return _meshes[shape]


def _placed(t: Tensor, on: DeviceMesh, placements: Placements) -> DTensor:
    if any(isinstance(p, Partial) for p in placements):
        # the sum of all parts is t
        share = t / on.size()
        return DTensor.from_local(share, on, [p if isinstance(p, Partial) else R for p in placements], run_check=False)
    return distribute_tensor(t.detach().clone(), on, placements)


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def _results(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def compare(
    call: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    placements: Sequence[Placements | None],
    on: DeviceMesh | None = None,
    *,
    out: Placements | None = None,
    exact: bool = False,
    gradients: bool = True,
    compiled: bool = False,
) -> list[DTensor | None]:
    """Call on whole and on placed tensors; compare all results and gradients; return the placed inputs.

    Sums over shards are rounded in another order: fp64 inputs leave 1e-12 for that. `exact` demands equal bits.
    """
    on = on or mesh()
    device = on.device_type
    tensors = [None if t is None else t.to(device) for t in tensors]
    a = [t if t is None or not t.is_floating_point() else t.clone().requires_grad_(gradients) for t in tensors]
    b = [
        None if t is None or p is None else _placed(t, on, p).requires_grad_(gradients and t.is_floating_point())
        for t, p in zip(tensors, placements, strict=True)
    ]
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    expected, got = _results(call(*a)), _results(run(*b))
    if out is not None:
        assert tuple(got[0].placements) == tuple(out), f"placed as {got[0].placements}, not {out}"
    tight = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-12, "atol": 1e-12}
    for e, g in zip(expected, got, strict=True):
        assert isinstance(g, DTensor)
        torch.testing.assert_close(_whole(g.detach()), e.detach(), **tight, equal_nan=True)
    if not gradients:
        return b
    torch.manual_seed(1)
    up = [torch.randn_like(e) if e.requires_grad else None for e in expected]
    torch.autograd.backward([e for e in expected if e.requires_grad], [u for u in up if u is not None])
    parts = [(g, u) for g, u in zip(got, up, strict=True) if u is not None]
    torch.autograd.backward([g for g, _ in parts], [distribute_tensor(u, on, [R] * on.ndim) for _, u in parts])
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x is None or not x.requires_grad:
            continue
        assert (x.grad is None) == (y.grad is None), f"gradient of argument {i}: {x.grad} and {y.grad}"
        if x.grad is not None:
            assert y.grad.shape == x.grad.shape
            torch.testing.assert_close(_whole(y.grad), x.grad, **tight, msg=lambda m, i=i: f"gradient of {i}: {m}")
    return b


def case(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        assert name not in CASES
        CASES[name] = function
        return function

    return add


def many(name: str, options: dict[str, Sequence[Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add one case that runs the function for every combination of the options and names the one that fails."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def run() -> None:
            failed = []
            for values in itertools.product(*options.values()):
                chosen = dict(zip(options, values, strict=True))
                try:
                    torch.manual_seed(0)
                    function(**chosen)
                except Exception as e:
                    failed.append(f"{chosen}: {type(e).__name__}: {str(e)[:1500]}")
            assert not failed, f"{len(failed)} failed: " + "\n".join(failed[:3])

        CASES[name] = run
        return function

    return add


def wide(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


PLACES = {"0": [Shard(0)], "1": [Shard(1)], "last": [Shard(2)], "whole": [R], "sum": [Partial()]}


@many(
    "norms",
    {"stable": [None, False, True], "residual": [False, True], "vectors": ["", "w", "b", "wb"], "place": list(PLACES)},
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

    # 5 and 3 do not divide by the number of processes
    p = PLACES[place]
    out = {"0": p, "1": p, "last": [R], "whole": [R]}.get(place)
    args = wide(5, 3, 6), wide(5, 3, 6) if residual else None, weight, bias
    compare(call, args, [p, p, [R], [R]], out=out)


@many("norms: what needs a gradient", {"x": [True, False], "w": [True, False], "b": [True, False]})
def _(x: bool, w: bool, b: bool) -> None:
    tensors = wide(4, 6), wide(6), wide(6)
    a = [t.clone().to(mesh().device_type).requires_grad_(n) for t, n in zip(tensors, (x, w, b), strict=True)]
    s = [
        _placed(t.detach(), mesh(), p).requires_grad_(t.requires_grad)
        for t, p in zip(a, ([Shard(0)], [R], [R]), strict=True)
    ]
    if not (x or w or b):
        return
    onepass.layer_norm(*a).square().sum().backward()
    onepass.layer_norm(*s).square().sum().backward()
    for e, g in zip(a, s, strict=True):
        assert (e.grad is None) == (g.grad is None)
        if e.grad is not None:
            torch.testing.assert_close(_whole(g.grad), e.grad, rtol=1e-12, atol=1e-12)
    if w:
        assert s[1].grad.placements == (Partial(),)


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
    compare(onepass.weighted_sum, [wide(5, 3, 7), w], [PLACES[place], PLACES[weight]])


@case("weighted_sum: a sharded sum gives a partial result")
def _() -> None:
    compare(onepass.weighted_sum, [wide(5, 7), wide(7)], [[Shard(1)], [Shard(0)]], out=[Partial()])
    compare(onepass.weighted_sum, [wide(5, 7), wide(7)], [[Shard(1)], [R]], out=[Partial()])
    compare(onepass.weighted_sum, [wide(5, 7), wide(4, 7)], [[R], [Shard(0)]], out=[Shard(1)])


BESIDE: dict[str, tuple[tuple[int, ...], dict[str, Placements]]] = {
    "()": ((), {"0": [R], "1": [R], "last": [R]}),
    "(3,)": ((3,), {"0": [R], "1": [Shard(0)], "last": [R]}),
    "(5,1)": ((5, 1), {"0": [Shard(0)], "1": [R], "last": [R]}),
    "(5,3)": ((5, 3), {"0": [Shard(0)], "1": [Shard(1)], "last": [R]}),
}


@many(
    "soft_topk",
    {"k": [None, *BESIDE], "eps": [None, "()", "(5,3)"], "mask": [None, (7,), (3, 7), (5, 1, 7)], "place": ["0", "1"]},
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
    compare(call, [wide(5, 3, 7), of_k[0], of_eps[0], of_mask], places, out=PLACES[place])


@many("soft_topk: kinds", {"kind": ["capped_exp", "sigmoid", "laplace", "clamp"], "place": list(PLACES)})
def _(kind: str, place: str) -> None:
    # a search stops when all of its rows are done: shards may stop one step earlier
    call = lambda s, k: onepass.soft_topk(s, k, kind=kind)
    compare(call, [wide(5, 3, 9), torch.full((), 2.5, dtype=torch.float64)], [PLACES[place], [R]])


@many("coor_descent", {"k": [None, *BESIDE], "mask": [None, (7,), (5, 3, 7)], "place": ["0", "1"]})
def _(k: str | None, mask: tuple[int, ...] | None, place: str) -> None:
    shape, where = ((), {}) if k is None else BESIDE[k]
    of_k = None if k is None else torch.rand(shape, dtype=torch.float64) + 1.5

    def call(s: Tensor, k: Tensor | None, mask: Tensor | None) -> Tensor:
        return onepass.coor_descent(s, n_iters=6, k=2.5 if k is None else k, eps=0.5, mask=mask)

    of_mask = None if mask is None else torch.rand(mask) < 0.8
    compare(call, [wide(5, 3, 7), of_k, of_mask], [PLACES[place], where.get(place, [R]), [R]], out=PLACES[place])


@many("topk", {"eps": [None, "()", "(5,3)"], "mask": [None, (7,), (5, 3, 7)], "place": ["0", "1"], "k": [0, 1, 4, 9]})
def _(eps: str | None, mask: tuple[int, ...] | None, place: str, k: int) -> None:
    shape, where = ((), {}) if eps is None else BESIDE[eps]
    of_eps = None if eps is None else torch.rand(shape, dtype=torch.float64) + 0.5

    def call(s: Tensor, eps: Tensor | None, mask: Tensor | None) -> Any:
        return onepass.topk(s, k, eps=0.5 if eps is None else eps, mask=mask)

    of_mask = None if mask is None else torch.rand(mask) < 0.8
    places = [PLACES[place], where.get(place, [R]), [R]]
    compare(call, [wide(5, 3, 7), of_eps, of_mask], places, gradients=k > 0)


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


@many("routing: scatter_add", {"shape": [(4, 3), (4, 2, 3)], "gates": [True, False], "y": list(PLACES), "u": ["whole", "0"]})
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
        lambda qkv, first, last: rotary_attention(qkv, first, last), [wide(4, 5, 3, 2, 4), i - 2, i + 1],
        [PLACES[place], [R], [R]],
    )  # fmt: skip


@many("causal_choice", {"mask": [True, False], "place": ["0", "1", "whole"]})
def _(mask: bool, place: str) -> None:
    seen = torch.rand(4, 12) < 0.9 if mask else None
    call = lambda s, m: causal_choice(s, 4, block=4, memory=8, mask=m)
    compare(call, [wide(4, 12), seen], [PLACES[place], [R]])


@case("torch.compile")
def _() -> None:
    norm = lambda x, w: onepass.rms_norm(x, w)
    compare(norm, [wide(4, 6), wide(6)], [[Shard(0)], [R]], out=[Shard(0)], compiled=True)
    both = lambda x, w, r: onepass.layer_norm(x, w, residual=r)
    compare(both, [wide(4, 3, 6), wide(6), wide(4, 3, 6)], [[Shard(1)], [R], [Shard(1)]], compiled=True)
    compare(lambda x, w: onepass.weighted_sum(x, w), [wide(4, 6), wide(6)], [[Shard(0)], [R]], compiled=True)
    compare(lambda s: onepass.soft_topk(s, 2), [wide(4, 6)], [[Shard(0)]], compiled=True)
    compare(lambda s: onepass.coor_descent(s, n_iters=3, k=2), [wide(4, 6)], [[Shard(1)]], compiled=True)
    compare(lambda s: onepass.topk(s, 2), [wide(4, 6)], [[Shard(0)]], compiled=True)


@case("a plain tensor beside a DTensor is refused by name")
def _() -> None:
    x = distribute_tensor(wide(4, 6).to(mesh().device_type), mesh(), [Shard(0)])
    try:
        onepass.rms_norm(x, wide(6).to(x.device))
    except RuntimeError as e:
        assert "onepass.norm" in str(e), e
        return
    raise AssertionError("accepted")


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
        compare(lambda s, k: onepass.soft_topk(s, k), [wide(5, 6, 7), k], [p, [R, R]], on)
    else:
        compare(lambda s: onepass.topk(s, 3), [wide(5, 6, 7)], [p], on)


if __name__ == "__main__":
    main(CASES)

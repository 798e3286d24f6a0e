"""Compare a call or a layer on DTensors with the same on whole tensors: results, gradients, placements."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor

from nn.layers import outputs
from onepass.core.launch import INTERPRET
from sharded.processes import device_type

CASES: dict[str, Callable[[], None]] = {}
R = Replicate()
Placements = Sequence[Placement]
_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh(*shape: int) -> DeviceMesh:
    """Return a mesh of this shape, by default of all processes in a row."""
    shape = shape or (dist.get_world_size(),)
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh(device_type(), shape, mesh_dim_names=tuple("abc"[: len(shape)]))
    return _meshes[shape]


def placed(t: Tensor, on: DeviceMesh, placements: Placements) -> DTensor:
    if any(isinstance(p, Partial) for p in placements):
        # the sum of all parts is t
        share = t / math.prod(on.size(i) for i, p in enumerate(placements) if isinstance(p, Partial))
        return DTensor.from_local(share, on, [p if isinstance(p, Partial) else R for p in placements], run_check=False)
    return distribute_tensor(t.detach().clone(), on, placements)


def whole(t: Tensor) -> Tensor:
    return t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()


def in_shards(name: str, module: nn.Module, on: DeviceMesh) -> None:
    """Shard a module's own parameters along their first dimension: a `partition_fn` of `distribute_module`."""
    for key, p in list(module._parameters.items()):
        if p is not None:
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, on, [Shard(0)])))


def _results(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def compare(
    call: Callable[..., Any], tensors: Sequence[Tensor | None], placements: Sequence[Placements | None],
    on: DeviceMesh | None = None, *, out: Placements | None = None, exact: bool = False, gradients: bool = True,
    compiled: bool = False, upstream: Placements | None = None,
) -> list[DTensor | None]:  # fmt: skip
    """Call on whole and on placed tensors; compare all results and gradients; return the placed inputs.

    Sums over shards, of at most 30 terms of order 1, are rounded in another order: 1e-12 in fp64, 1e-5 in fp32. `exact`
    demands equal bits. Upstream gradients are whole, or placed as `upstream`.
    """
    on = on or mesh()
    device = on.device_type
    tensors = [None if t is None else t.to(device) for t in tensors]
    a = [t if t is None or not t.is_floating_point() else t.clone().requires_grad_(gradients) for t in tensors]
    b = [
        None if t is None or p is None else placed(t, on, p).requires_grad_(gradients and t.is_floating_point())
        for t, p in zip(tensors, placements, strict=True)
    ]
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    expected, got = _results(call(*a)), _results(run(*b))
    if out is not None:
        assert tuple(got[0].placements) == tuple(out), f"placed as {got[0].placements}, not {out}"
    most = 0.0 if exact else 1e-5 if narrow() else 1e-12
    tight = {"rtol": most, "atol": most}
    for e, g in zip(expected, got, strict=True):
        assert isinstance(g, DTensor)
        torch.testing.assert_close(whole(g), e.detach(), **tight, equal_nan=True)
    if not gradients:
        return b
    torch.manual_seed(1)
    up = [torch.randn_like(e) if e.requires_grad else None for e in expected]
    torch.autograd.backward([e for e in expected if e.requires_grad], [u for u in up if u is not None])
    above = [R] * on.ndim if upstream is None else upstream
    parts = [(g, u) for g, u in zip(got, up, strict=True) if u is not None]
    torch.autograd.backward([g for g, _ in parts], [distribute_tensor(u, on, above) for _, u in parts])
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x is None or not x.requires_grad:
            continue
        assert (x.grad is None) == (y.grad is None), f"gradient of argument {i}: {x.grad} and {y.grad}"
        if x.grad is not None:
            assert y.grad.shape == x.grad.shape
            torch.testing.assert_close(whole(y.grad), x.grad, **tight, msg=lambda m, i=i: f"gradient of {i}: {m}")
    return b


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Return how far layers that sum in another order may lie apart; `wide` gives fp32 on a GPU."""
    most = 2e-5 if dtype == torch.float32 else 1e-12
    return {"rtol": most, "atol": most}


def same_layer(
    layer: nn.Module, x: Tensor, mask: Tensor | None, on: DeviceMesh, placements: Sequence[Placement],
    weights: Callable[[str, nn.Module, DeviceMesh], None] | None = None, *, plain: bool = False, hooked: bool = False,
) -> tuple[nn.Module, nn.Module]:  # fmt: skip
    """Compare y, the choice and all gradients; demand that y is placed like x. Return the layer and its copy on `on`.

    With hooks inside, y may be placed otherwise. `plain` weights stay whole on each process, as FSDP2 hands them: the
    parts of their gradients add up.
    """
    layer = layer.to(x.device, x.dtype)
    spread = copy.deepcopy(layer) if plain else distribute_module(copy.deepcopy(layer), on, weights)
    a = x.clone().requires_grad_()
    b = placed(x, on, placements).requires_grad_()
    y, routing = layer(a, mask, return_routing=True)
    got, got_routing = spread(b, None if mask is None else placed(mask, on, placements), return_routing=True)
    assert hooked or tuple(got.placements) == tuple(placements), got.placements
    assert got.shape == y.shape
    for found, expected in zip(outputs(got_routing), outputs(routing), strict=True):
        # a block's second layer scores tokens that are rounded otherwise: equal choices, gates within rounding
        assert torch.equal(whole(found.indices), expected.indices)
        torch.testing.assert_close(whole(found[1]), expected[1].detach())
    tight = tolerance(x.dtype)
    torch.testing.assert_close(whole(got), y.detach(), **tight)
    torch.manual_seed(1)
    up = torch.randn_like(y)
    y.backward(up)
    got.backward(distribute_tensor(up, on, got.placements))
    torch.testing.assert_close(whole(b.grad), a.grad, **tight)
    for (name, p), q in zip(layer.named_parameters(), spread.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            if plain:
                dist.all_reduce(q.grad)
            torch.testing.assert_close(whole(q.grad), p.grad, **tight, msg=lambda m, n=name: f"{n}: {m}")
    return layer, spread


def case(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        named = f"{Path(function.__code__.co_filename).stem}: {name}"
        assert named not in CASES
        CASES[named] = function
        return function

    return add


def many(name: str, options: dict[str, Sequence[Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add one case that runs the function for every combination of the options and names the one that fails.

    On a CPU two processes take every second one and four processes the others; GPUs take all.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def run() -> None:
            failed = []
            half = device_type() == "cpu" and len(options) > 1 and not INTERPRET
            other = int(dist.get_world_size() > 2)
            for places in itertools.product(*(range(len(values)) for values in options.values())):
                if half and sum(places) % 2 != other:
                    continue
                chosen = {name: values[i] for i, (name, values) in zip(places, options.items(), strict=True)}
                try:
                    torch.manual_seed(0)
                    function(**chosen)
                except Exception as e:
                    failed.append(f"{chosen}: {type(e).__name__}: {str(e)[:1500]}")
            assert not failed, f"{len(failed)} failed: " + "\n".join(failed[:3])

        CASES[f"{Path(function.__code__.co_filename).stem}: {name}"] = run
        return function

    return add


def narrow() -> bool:
    """Return whether cases are in fp32, as on GPUs, where fp64 takes the torch path."""
    return device_type() == "cuda" or INTERPRET or "CASES_IN_FP32" in os.environ


def wide(*shape: int) -> Tensor:
    """Return random numbers in the dtype of the cases: layers and weights beside them take theirs from it."""
    return torch.randn(*shape, dtype=torch.float32 if narrow() else torch.float64)


PLACES = {"0": [Shard(0)], "1": [Shard(1)], "last": [Shard(2)], "whole": [R], "sum": [Partial()]}

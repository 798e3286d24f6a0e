"""Bench cases of experts without norm and router, forward and backward, beside the products alone and rivals.

"products" are the grouped products of both passes on rows in order. "torch" composes them with gathers alone: it is
deterministic and compiles into few kernels. Rivals get weights in layouts of their own, made before. A CUDA graph's
time is the GPU's; the others' hold the host's too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.case import Case, Definition, Impl, Prepared, graphed
from onepass.ops.experts.op import experts

RIVALS = {"liger_kernel": "liger-kernel", "transformers": "transformers", "sonicmoe": "sonic-moe"}


class Inputs(NamedTuple):
    """Inputs of a case; matrices are up, which for SwiGLU has the gate's columns first, and down."""

    x: Tensor
    indices: Tensor
    weights: Tensor
    matrices: tuple[Tensor, ...]
    dy: Tensor


def _apart(up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients as they are compared: that of up (E, dim, 1 or 2, hidden)."""
    return up.unflatten(2, (-1, down.shape[1])), down  # type: ignore[no-untyped-call]


class Layer(NamedTuple):
    """An implementation: a function of x, weights and its own matrices, and how their gradients are seen as ours.

    Views alone: what a call does is timed.
    """

    forward: Callable[..., Tensor]
    matrices: tuple[Tensor, ...]
    plain: Callable[..., tuple[Tensor, ...]] = _apart


def _inputs(tokens: int, dim: int, n: int, k: int, hidden: int, act: str, device: str) -> Inputs:
    new = partial(torch.randn, device=device, dtype=torch.bfloat16)
    weights, indices = torch.randn(tokens, n, device=device).sigmoid().topk(k)
    shapes = (n, dim, hidden * (1 + (act == "swiglu"))), (n, hidden, dim)
    matrices = tuple(new(*shape).mul_(shape[1] ** -0.5) for shape in shapes)
    return Inputs(new(tokens, dim), indices, weights / weights.sum(1, keepdim=True), matrices, new(tokens, dim))


def _activated(h: Tensor, down: Tensor) -> Tensor:
    gate, *linear = h.split(down.shape[-2], 1)  # type: ignore[no-untyped-call]
    return F.silu(gate) * linear[0] if linear else F.gelu(gate, approximate="tanh")


def _defined(g: Inputs) -> list[Tensor]:
    """Return y and the gradients by the definition, expert by expert in float64."""
    y, dx, dw = (torch.zeros_like(t, dtype=torch.float64) for t in (g.x, g.x, g.weights))
    gradients = [torch.zeros_like(m, dtype=torch.float32) for m in g.matrices]
    for e in range(len(g.matrices[0])):
        t, j = (g.indices == e).nonzero(as_tuple=True)
        leaves = [p.double().requires_grad_() for p in (g.x[t], g.weights[t, j], *(m[e] for m in g.matrices))]
        out = leaves[1][:, None] * (_activated(leaves[0] @ leaves[2], leaves[3]) @ leaves[3])
        grads = torch.autograd.grad(out, leaves, g.dy[t].double())
        y.index_add_(0, t, out.detach())
        dx.index_add_(0, t, grads[0])
        dw[t, j] = grads[1]
        for gradient, expert_grad in zip(gradients, grads[2:], strict=True):
            gradient[e] = expert_grad
    return [y.float(), dx.float(), dw.float(), *_apart(*gradients)]


def _both_passes(g: Inputs, make: Callable[[Inputs], Layer], compiled: bool = False) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        layer = make(g)
        run = torch.compile(layer.forward) if compiled else layer.forward
        leaves = [t.detach().requires_grad_() for t in (g.x, g.weights, *layer.matrices)]

        def call() -> list[Tensor]:
            y = run(*leaves)
            dx, dw, *others = torch.autograd.grad(y, leaves, g.dy)
            return [y.detach(), dx, dw, *layer.plain(*others)]

        return call

    return build


def _ours(g: Inputs) -> Layer:
    activation = "gelu" if g.matrices[0].shape[2] == g.matrices[1].shape[1] else "swiglu"

    def forward(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return experts(x, g.indices, weights, up, down, activation=activation)

    return Layer(forward, g.matrices)


def _moved(t: Tensor, order: Tensor, places: Tensor, spread: bool) -> Tensor:
    return t[order // places.shape[1]] if spread else t[places].sum(1)


class _Move(torch.autograd.Function):
    """Tokens to rows in the order of their experts, or rows added up to tokens: each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, order: Tensor, places: Tensor, spread: bool) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.spread = spread
        return _moved(t, order, places, spread)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        order, places = ctx.saved_tensors
        return _moved(gradients[0], order, places, not ctx.spread), None, None, None


def _order(indices: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    order = indices.flatten().argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    # bincount waits for the GPU; a CPU counts floats alone
    flat = indices.flatten().int() if indices.is_cuda else indices.flatten().float()
    counts = torch.histc(flat, bins=n, min=0, max=n - 1)
    return order, places.view(indices.shape), counts.cumsum(0).int()


def _torch(g: Inputs) -> Layer:
    def forward(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        order, places, ends = _order(g.indices, len(up))
        rows = _Move.apply(x, order, places, True)  # type: ignore[no-untyped-call]
        a = _activated(F.grouped_mm(rows, up, offs=ends), down)
        a = a * weights.flatten()[order].to(a.dtype)[:, None]
        return _Move.apply(F.grouped_mm(a, down, offs=ends), order, places, False)  # type: ignore[no-any-return, no-untyped-call]

    return Layer(forward, g.matrices)


def _products(g: Inputs) -> Callable[[], Any]:
    """The products of both passes alone."""
    order, places, ends = _order(g.indices, len(g.matrices[0]))
    rows, dy = (_moved(t, order, places, True) for t in (g.x, g.dy))
    h, a = (rows.new_empty(len(rows), width).normal_() for width in (g.matrices[0].shape[2], g.matrices[1].shape[1]))
    mm = partial(F.grouped_mm, offs=ends)

    def call() -> tuple[()]:
        for m, x, y in zip(g.matrices, (rows, a), (h, dy), strict=True):
            mm(x, m)
            mm(y, m.mT)
            mm(x.mT, y)
        return ()

    return call


def _transformers(g: Inputs) -> Layer:
    from transformers.integrations.moe import use_experts_implementation

    up, down = g.matrices
    gated = up.shape[2] > down.shape[1]
    block: Any = use_experts_implementation(type("Experts", (nn.Module,), {
        "__init__": lambda self, config: nn.Module.__init__(self), "forward": None,
    }), has_gate=gated, is_transposed=True)(SimpleNamespace(_experts_implementation="grouped_mm"))  # fmt: skip
    block.num_experts, block.act_fn = len(up), F.silu if gated else partial(F.gelu, approximate="tanh")

    def forward(x: Tensor, weights: Tensor, first: Tensor, down: Tensor) -> Tensor:
        block.gate_up_proj, block.up_proj, block.down_proj = first, first, down
        return block(x, g.indices, weights)  # type: ignore[no-any-return]

    return Layer(forward, g.matrices)


def _side_by_side(kernels: Any) -> None:
    """Let a module's Triton autotuners compile their choices in threads, then time each for 20 ms."""
    import triton
    from triton.runtime.autotuner import Autotuner

    for tuner in vars(kernels).values():
        if not isinstance(tuner, Autotuner) or "prune_configs" in vars(tuner):
            continue

        def prune(kwargs: Any, tuner: Any = tuner, before: Any = tuner.prune_configs) -> Any:
            configs = before(kwargs)
            with ThreadPoolExecutor(16) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
                for config in configs:
                    tuner.fn.run(*tuner.nargs.values(), **{**kwargs, **config.all_kwargs(), "warmup": True})
            return configs[:1] if "BENCHMARKS_COMPILE_ONLY" in os.environ else configs

        tuner.prune_configs = prune
        tuner.do_bench = partial(triton.testing.do_bench, warmup=5, rep=20)


def _liger(g: Inputs) -> Layer:
    from liger_kernel.ops import fused_moe, fused_moe_kernels

    _side_by_side(fused_moe_kernels)
    indices = g.indices.int()

    def forward(x: Tensor, weights: Tensor, first: Tensor, down: Tensor) -> Tensor:
        return fused_moe.LigerFusedMoEFunction.apply(x, first, down, indices, weights)  # type: ignore[no-any-return]

    return Layer(forward, tuple(m.mT.contiguous() for m in g.matrices), lambda up, down: _apart(up.mT, down.mT))


def _sonic(g: Inputs) -> Layer:
    """SonicMoE from its order of the rows on: its public layer has the router in it."""
    import sonicmoe.functional as sonic

    # choices of an earlier process were timed beside others
    os.environ |= {"QUACK_FORCE_CACHE_UPDATE": "1", "QUACK_COMPILE_WORKERS": "16"}
    up, down = g.matrices
    (tokens, k), n = g.indices.shape, len(up)
    indices, swiglu = g.indices.int(), sonic.ActivationType.SWIGLU

    def forward(x: Tensor, weights: Tensor, first: Tensor, down: Tensor) -> Tensor:
        counts, ends, rows, order, places = (
            torch.empty(size, dtype=torch.int32, device=x.device) for size in (n, n + 1, *(3 * [tokens * k]))
        )
        sonic.TC_topk_router_metadata_triton(indices, n, counts, ends, rows, order, places)
        rest = rows, order, places, None, False, swiglu
        a, h = sonic._UpProjection.apply(x, first.permute(1, 2, 0), None, ends, tokens * k, k, *rest, False, False)
        return sonic._DownProjection.apply(a, h, down.permute(1, 2, 0), None, weights, ends, tokens, k, *rest)  # type: ignore[no-any-return]

    def plain(first: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        return first.unflatten(1, (-1, 2)).permute(0, 3, 2, 1), down.mT  # type: ignore[no-untyped-call]

    first = torch.stack(up.mT.chunk(2, 1), 2).flatten(1, 2)
    return Layer(forward, (first, down.mT.contiguous()), plain)


def _case(tokens: int, dim: int, n: int, k: int, hidden: int, act: str, device: str = "cuda") -> Case:
    def make() -> Mapping[str, Impl]:
        g = _inputs(tokens, dim, n, k, hidden, act, device)
        layers: dict[str, Callable[[Inputs], Layer]] = {
            "onepass": _ours, "torch": _torch, "transformers": _transformers,
        }  # fmt: skip
        if device == "cuda" and act == "swiglu":
            layers |= {"liger": _liger, "sonic-moe": _sonic}
        impls: dict[str, Impl] = {"definition": Definition(lambda: _defined(g))}
        for name, layer in layers.items():
            impls[name] = Prepared(_both_passes(g, layer))
            if name not in ("liger", "sonic-moe"):
                impls[f"{name}, torch.compile"] = Prepared(_both_passes(g, layer, True))
            # Liger waits for the GPU
            if device == "cuda" and name != "liger":
                impls[f"{name}, CUDA graph"] = graphed(_both_passes(g, layer))
        if device == "cuda":
            impls["torch, torch.compile, CUDA graph"] = graphed(_both_passes(g, _torch, True))
            impls["products, CUDA graph"] = graphed(lambda: _products(g))
        return impls

    floor = 2 * (4 * tokens * dim + 3 * (3 if act == "swiglu" else 2) * n * dim * hidden)
    params = {"rows": tokens, "cols": dim, "experts": n, "k": k, "hidden": hidden, "act": act}
    return Case("experts", "forward+backward", params, torch.bfloat16, floor, make, 2e-2, device)


def _cases() -> Iterator[Case]:
    rows = ((16384, 256, 32, 2, 512), (16384, 512, 16, 2, 1024), (32768, 1024, 64, 4, 1024), (32768, 2048, 128, 8, 768))
    for act in ("gelu", "swiglu"):
        for row in rows:
            yield _case(*row, act)
        yield _case(256, 64, 8, 2, 128, act, "cpu")


CASES = list(_cases())

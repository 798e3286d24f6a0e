"""What benchmarks/sanitize.py runs: every operator, forward and backward, on tiny odd shapes, compared in float64."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from onepass.core.launch import geometry
from onepass.core.spec import GRADIENT, TOLERANCES, Sample, Spec
from onepass.doctor.selftest import both_passes, float64
from onepass.ops._shared.specs import folders, load

Call = tuple[str, Callable[[], None]]
PLANTED = "planted"
OPERATORS = (*folders(), "fused", "lion")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# without a GPU the calls take the torch path: enough to try this file
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def maker(dtype: torch.dtype) -> Callable[..., Tensor]:
    """`make(*shape)`: random numbers, drawn on the CPU so that no kernel but ours writes the inputs."""
    generator = torch.Generator().manual_seed(20)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def check(fn: Callable[..., Any], reference: Callable[..., Any], sample: Sample, tolerance: float) -> None:
    """One call with its backward pass, compared with the definition in float64 on the CPU."""
    dtype = sample.args[0].dtype
    outs, grads = both_passes(fn, sample, dtype)
    expected, expected_grads = both_passes(reference, float64(sample), dtype)
    for a, e in (*zip(outs, expected, strict=True), *((grads[key], e) for key, e in expected_grads.items())):
        if a is None or e is None:
            assert not any(t is not None and t.cpu().any() for t in (a, e))
            continue
        a, e = a.detach().cpu().double(), e.detach()
        scale = max(1.0, float(e.abs().max())) if e.numel() else 1.0
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * scale)


def of_spec(spec: Spec, dtype: torch.dtype, names: tuple[str, ...] = ()) -> Iterator[Call]:
    """The calls that an operator's contract makes, or those of these names."""
    samples = [s for s in spec.samples(maker(dtype)) if not names or s.name in names]
    missing = set(names) - {s.name for s in samples}
    if missing:
        raise ValueError(f"{spec.name} has no sample {', '.join(sorted(missing))}")
    return of_samples(spec, dtype, samples)


def of_samples(spec: Spec, dtype: torch.dtype, samples: list[Sample]) -> Iterator[Call]:
    """Calls of an operator with these samples, but for empty ones."""
    tolerance = GRADIENT * TOLERANCES[dtype]
    for sample in samples:
        if all(v.numel() for v in (*sample.args, *sample.kwargs.values()) if isinstance(v, Tensor)):
            name = f"{spec.name}, {sample.name}, {str(dtype)[6:]}"
            yield name, lambda s=sample: check(spec.op, spec.reference, s, tolerance)  # type: ignore[misc]


def few_multiprocessors() -> AbstractContextManager[Any]:
    """Pretend that the GPU is too small for teams of programs: long rows take the other kernels."""
    gpu = geometry._gpu
    return mock.patch.object(geometry, "_gpu", lambda index: gpu(index)._replace(multiprocessors=1))


def _on_few(calls: Iterator[Call]) -> Iterator[Call]:
    def within(call: Callable[[], None]) -> None:
        with few_multiprocessors():
            call()

    for name, call in calls:
        yield f"{name}, few multiprocessors", lambda c=call: within(c)  # type: ignore[misc]


def _in_8_bits(x: Tensor) -> None:
    """Codes and scales by row and by block, within a step: y may differ in its last bit."""
    import onepass
    from onepass.ops.norm.definition import to_e4m3

    for by, columns in (("row", x.shape[-1]), ("block", 128)):
        pair = onepass.rms_norm(x, quantize=by)  # type: ignore[call-overload]
        for actual, expected in zip(pair, to_e4m3(onepass.rms_norm(x), columns), strict=True):
            torch.testing.assert_close(actual.float(), expected.float(), rtol=0.13, atol=2**-9)


def norm() -> Iterator[Call]:
    """Rows of every kernel: several per program, one, a team, in passes."""
    layer, rms = load("norm").SPECS
    yield from of_spec(
        layer, FP32, ("3-d, odd width", "one column", "width of several chunks", "all, residual", "backward in tiles",
                      "stable, ties, eps=0.1", "stable, residual"),
    )  # fmt: skip
    yield from of_spec(layer, BF16, ("width of several chunks", "backward in tiles"))
    yield from of_spec(rms, FP32, ("offset, residual",))
    yield from of_spec(rms, BF16, ("one row per program", "residual"))
    for dtype in (FP32, BF16):
        yield from of_spec(layer, dtype, ("weights per head, chunks", "adaptive"))
        gates = "gate by sigmoid, chunks, residual", "gate first, groups, residual", "gate, bias per head"
        yield from of_spec(rms, dtype, (*gates, "rounded twice"))
        yield f"rms_norm, 8 bits, {str(dtype)[6:]}", functools.partial(_in_8_bits, maker(dtype)(5, 384))
    # just wider than what one program takes; 41000 columns are read in turns that overlap
    for dtype in (FP32, BF16):
        make = maker(dtype)
        for n in (16392, 41000):
            rows = (make(3, n), make(n))
            yield from of_samples(rms, dtype, [Sample(f"{n} columns, residual", rows, {"residual": make(3, n)})])
        odd = [Sample("team, odd", (make(3, 33001), make(33001), make(33001)), {"eps": 0.1})]
        even = [Sample("team", (make(3, 32784), make(32784)))]
        yield from of_samples(layer, dtype, odd)
        yield from of_samples(rms, dtype, even)
        yield from _on_few(of_samples(layer, dtype, odd))
        yield from _on_few(of_samples(rms, dtype, even))


def weighted_sum() -> Iterator[Call]:
    """Every sample, several 16-bit vectors over a whole tile, and the weight's gradient alone."""
    (spec,) = load("weighted_sum").SPECS
    for dtype in (BF16, FP32):
        make = maker(dtype)
        x, tolerance = make(70, 136), GRADIENT * TOLERANCES[dtype]
        yield from of_samples(spec, dtype, [Sample("a tile, four vectors", (make(70, 136), make(4, 136)))])
        alone = Sample("weight alone", (make(136),))
        ours, theirs = functools.partial(spec.op, x), functools.partial(spec.reference, x.cpu().double())
        yield f"weighted_sum, weight alone, {str(dtype)[6:]}", functools.partial(check, ours, theirs, alone, tolerance)
        yield from of_spec(spec, dtype)


def _long(spec: Spec, n: int, options: dict[str, Any]) -> Iterator[Call]:
    """One row just longer than what one program takes, shared by a team; wide gates take few steps."""
    long = [Sample(f"long {n}", (maker(FP32)(1, n),), {"k": 4000.5, "eps": 4.0, **options})]
    yield from of_samples(spec, FP32, long)


def soft_topk() -> Iterator[Call]:
    """Short rows and rows of a team; backward where topk has chosen."""
    shortest, *_, longest = topk()
    yield from (shortest, longest)
    (spec,) = load("soft_topk").SPECS
    yield from _long(spec, 16387, {"kind": "sigmoid"})
    yield from _long(spec, 32771, {})
    yield from of_spec(
        spec, FP32, ("rows, capped_exp", "rows, sigmoid", "rows, laplace", "rows, clamp",
                      "k and eps tensors, capped_exp", "mask, 0-d k", "wide"),
    )  # fmt: skip
    yield from of_spec(spec, BF16, ("wide",))


def coor_descent() -> Iterator[Call]:
    """Short rows and rows of a team."""
    (spec,) = load("coor_descent").SPECS
    yield from _long(spec, 32771, {"n_iters": 3})
    yield from of_spec(spec, FP32, ("rows", "schedule, k tensor", "mask, 0-d k", "wide"))
    yield from of_spec(spec, BF16, ("wide",))


def topk() -> Iterator[Call]:
    """The hard selection of short and of long rows, and its gradient."""
    import onepass

    def select(s: Tensor, k: int, mask: Tensor | None) -> None:
        top = onepass.topk(s.detach().requires_grad_(), k, mask=mask)
        (top.values.sum() + top.gates.square().sum()).backward()
        allowed = s.detach().cpu() if mask is None else s.detach().cpu().masked_fill(~mask.cpu(), -torch.inf)
        torch.testing.assert_close(top.values.detach().cpu(), allowed.topk(k).values, rtol=0, atol=0)

    make = maker(FP32)
    for n, k in ((33, 5), (1000, 100), (5000, 4500), (9001, 20), (9001, 4100), (32771, 700)):
        s = make(3, n)
        mask = (torch.arange(n) % 7 != 3).to(DEVICE)
        for m in (None, mask):
            yield f"topk, {n}, k={k}{'' if m is None else ', mask'}", lambda a=(s, k, m): select(*a)  # type: ignore[misc]


def routing() -> Iterator[Call]:
    """Every sample of the operators."""
    for spec in load("routing").SPECS:
        for dtype in (FP32, BF16):
            yield from of_spec(spec, dtype)


def fused() -> Iterator[Call]:
    """Kernels that no operator calls alone, and modules that call them."""
    from onepass.fused import branch, norms
    from onepass.nn import RoutedAttention, RoutedBlock, RoutedFeedForward, Router

    make = maker(FP32)

    def cast() -> None:
        weights = tuple(make(33, 5) for _ in range(8))
        for a, e in zip(branch.cast(weights, BF16), weights, strict=True):
            torch.testing.assert_close(a, e.to(BF16), rtol=0, atol=0)

    def norm(scored: bool, mask: bool) -> None:
        given: list[Tensor | None] = [make(2, 41, 33), make(33), make(33) / 6, make(2, 41), make(2, 41, 33), None, None]
        given[5] = (torch.arange(41)[None] < torch.tensor([[41], [32]])).to(DEVICE) if mask else None
        if not scored:
            given[2:5], given[6] = [None, None, make(2, 9, 33)], torch.arange(0, 36, 2).view(2, 9).to(DEVICE)
        results = []
        for device in (DEVICE, "cpu"):
            x, w, v, ds, dy, real, rows = (None if t is None else t.to(device) for t in given)
            way = norms.way(x, w, v)
            y, s, stats = way.forward(x, rows, real, w, v, 1e-6, 1e-6, FP32)
            partials = x.new_empty(way.programs(x, dy.shape[0] * dy.shape[1]), 33 if v is None else 66)
            (dx,) = way.backward(dy, x, rows, real, w, v, stats, s, ds, None, 1, True, partials, None)
            results.append([t.cpu() for t in (y, s, dx, partials.sum(0)) if t is not None])
        for a, e in zip(*results, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4 * max(1.0, float(e.abs().max())))

    for scored, mask in ((True, True), (True, False), (False, False)):
        name = f"norm of {'tokens and their scores' if scored else 'chosen rows'}{', mask' * mask}"
        yield name, functools.partial(norm, scored, mask)
    yield "cast", cast

    def both(build: Callable[[], torch.nn.Module], shape: tuple[int, ...], mask: bool) -> None:
        torch.manual_seed(4)
        module_here = build().to(DEVICE)
        module_cpu = copy.deepcopy(module_here).cpu()
        real = torch.arange(shape[1])[None] < torch.tensor([[shape[1]], [shape[1] - 9]]) if mask else None
        x = torch.randn(*shape)
        results = []
        for module, device in ((module_here, DEVICE), (module_cpu, "cpu")):
            y = module(x.to(device), None if real is None else real.to(device))
            y.square().sum().backward()
            results.append([y.detach().cpu(), *(p.grad.cpu() for p in module.parameters() if p.grad is not None)])
        for a, e in zip(*results, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3 * max(1.0, float(e.abs().max())))

    def block() -> torch.nn.Module:
        return RoutedBlock(48, 9, heads=2, dim_head=16, window=8, causal=True)

    @torch.no_grad()
    def decode() -> None:
        """Steps after prompts of unequal lengths, over the ends of windows."""
        torch.manual_seed(4)
        module_here = RoutedBlock(24, 0.5, heads=3, light_heads=4, dim_head=6, window=8, causal=True).to(DEVICE).eval()
        module_cpu = copy.deepcopy(module_here).cpu()
        x, mask, results = torch.randn(3, 30, 24), torch.arange(20) < torch.tensor([[20], [7], [13]]), []
        for module, device in ((module_here, DEVICE), (module_cpu, "cpu")):
            cache = module.new_cache(3, 64)
            module(x[:, :20].to(device), mask.to(device), cache=cache)
            results.append(torch.cat([module(x[:, i : i + 1].to(device), cache=cache).cpu() for i in range(20, 30)], 1))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)

    yield "decoding", decode
    for mask in (False, True):
        yield (
            f"RoutedFeedForward{', mask' * mask}",
            lambda m=mask: both(lambda: RoutedFeedForward(33, 5), (2, 41, 33), m),
        )  # type: ignore[misc]
        yield (
            f"RoutedAttention{', mask' * mask}",
            lambda m=mask: both(lambda: RoutedAttention(48, 9, 11, heads=2, dim_head=16, window=8), (2, 41, 48), m),  # type: ignore[misc]
        )
        yield f"RoutedBlock, causal{', mask' * mask}", lambda m=mask: both(block, (2, 48, 48), m)  # type: ignore[misc]
    for gate in ("soft", "straight_through"):
        yield (
            f"RoutedFeedForward, share of a mask, {gate}",
            lambda g=gate: both(lambda: RoutedFeedForward(33, 0.12, router=Router(33, gate=g)), (2, 41, 33), True),  # type: ignore[misc]
        )


def lion() -> Iterator[Call]:
    """Two steps in every mode over sizes around a tile, compared with the same steps on the CPU."""
    from onepass.optim import Lion, clip_grad_norm

    shapes = [(), (1,), (7,), (33, 5), (1025,), (4097,), (3, 3001)]

    def steps(dtype: torch.dtype, device: str, clip: bool, offset: int, options: dict[str, Any]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            n = torch.Size(shape).numel()
            flat = torch.randn(n + offset, generator=generator).to(dtype).to(device)
            return flat[offset:].view(shape)

        params = [draw(*s).requires_grad_() for s in shapes]
        optimizer = Lion(params, lr=1e-2, weight_decay=0.1, **options)
        for _ in range(2):
            for p in params:
                p.grad = draw(*p.shape)
            if clip:
                clip_grad_norm(params, 1.0)
            optimizer.step()
        return [p.detach().cpu().float() for p in params]

    def both(dtype: torch.dtype, clip: bool, offset: int, options: dict[str, Any]) -> None:
        for a, e in zip(*(steps(dtype, d, clip, offset, options) for d in (DEVICE, "cpu")), strict=True):
            torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2)

    modes: list[tuple[torch.dtype, dict[str, Any]]] = [
        (FP32, {}), (BF16, {"low_precision": "none"}), (BF16, {"low_precision": "remainder"}),
        (FP32, {"state_dtype": "int8"}),
        (BF16, {"low_precision": "remainder", "state_dtype": "int8"}), (FP32, {"cautious": True}),
        (BF16, {"low_precision": "none", "cautious": 0.5}),
    ]  # fmt: skip
    for (dtype, options), (clip, offset) in itertools.product(modes, ((False, 0), (True, 1))):
        name = f"lion {str(dtype)[6:]} {options}{', clip' if clip else ''}{', unaligned' if offset else ''}"
        yield name, lambda a=(dtype, clip, offset, options): both(*a)  # type: ignore[misc]


def experts() -> Iterator[Call]:
    """Every sample, also without gradients, where few tokens take a way of their own; the router and its parts."""
    from onepass.ops.experts import definition, kernels_choice, kernels_products, kernels_rows, torch_path
    from onepass.ops.experts.choice import choose_experts

    def parts() -> None:
        weight = maker(FP32)(5, 33)
        spec = kernels_choice.parts(weight, 3).view(3, 5, 33).float().sum(0)
        torch.testing.assert_close(spec, weight, rtol=2**-23, atol=0.0)

    def without_torchs(call: Callable[[], None]) -> None:  # initcheck reports tensor maps of torch's products
        own = mock.patch.object(kernels_products, "takes", lambda x, *matrices: x.dtype != BF16)
        products = {name: getattr(torch_path, name) for name in ("product", "weight_product")}
        with own, mock.patch.multiple(kernels_rows, **products):
            call()

    for s, dtype in itertools.product(load("experts").SPECS, (FP32, FP16, BF16)):
        for given in (s, dataclasses.replace(s, op=torch.no_grad()(s.op), reference=torch.no_grad()(s.reference))):
            yield from ((name, functools.partial(without_torchs, call)) for name, call in of_spec(given, dtype))
    for score, dtype in itertools.product(("sigmoid", "softmax"), (FP32, BF16)):
        router = Sample(score, (maker(dtype)(37, 24), maker(FP32)(5, 24)))
        ours: Any = lambda u, w, s=score: choose_experts(u, w, None, None, 3, s, True)[0]  # noqa: E731
        theirs: Any = lambda u, w, s=score: definition.choose(u @ w.t(), None, None, 3, s, True)[0]  # noqa: E731
        name = f"choice of experts by {score}, {str(dtype)[6:]}"
        yield name, functools.partial(check, ours, theirs, router, 1e-2 if dtype == BF16 else 1e-4)
    yield "parts of a router's weight", parts


def planted() -> Iterator[Call]:
    """An error for each tool: a load beyond the end, two writers of one shared word, a load of what nobody wrote."""
    import triton
    import triton.language as tl

    @triton.jit
    def planted_kernel(x_ptr, y_ptr, offset):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 128)
        x = tl.load(x_ptr + at + offset)
        x = tl.inline_asm_elementwise(
            "{ .shared .align 4 .b32 word; st.volatile.shared.b32 [word], $1; ld.volatile.shared.b32 $0, [word]; }",
            "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.store(y_ptr + at, x)

    def launched() -> None:
        x = torch.empty(128, dtype=torch.int32, device="cuda")
        y = torch.empty_like(x)
        planted_kernel[(1,)](x, y, 64)
        torch.cuda.synchronize()

    yield "planted", launched


OWN: dict[str, Callable[[], Iterator[Call]]] = {
    "coor_descent": coor_descent, "experts": experts, "fused": fused, "lion": lion, "norm": norm, "routing": routing,
    "soft_topk": soft_topk, "topk": topk, "weighted_sum": weighted_sum, PLANTED: planted,
}  # fmt: skip


def calls(op: str) -> Iterator[Call]:
    """What is run for an operator: its own list above, or every sample of its contract."""
    if op in OWN:
        yield from OWN[op]()
        return
    for spec in load(op).SPECS if op in folders() else ():
        for dtype in (FP32, BF16):
            yield from of_spec(spec, dtype)

"""Calls whose launches have a budget: each operator and layer at the sizes that models use it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import onepass
from codegen.launched import in_bf16
from onepass.nn import Experts, RoutedAttention, RoutedBlock, RoutedFeedForward, Router, TransformerBlock
from onepass.ops.causal_choice.op import causal_choice
from onepass.ops.routing import op as routing
from onepass.ops.span_attention.op import rotary, rotary_attention, span_attention
from onepass.optim import Lion, clip_grad_norm

Call = tuple[str, Callable[[], Any]]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", torch.int8: "int8"}
# more rows than programs that run at once
MANY = 1 << 16


def _new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def _both(call: Callable[[], Any]) -> None:
    """Forward and backward."""
    y = call()
    wanted = [t for t in (y if isinstance(y, tuple) else (y,)) if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.backward(wanted, [torch.empty_like(t) for t in wanted])


def _weighted_sum() -> Iterator[Call]:
    widths = {
        BF16: ((64, 1), (512, 1), (3000, 1), (4096, 1), (100, 4), (4096, 4), (4096, 16), (64, 4), (512, 4), (3000, 4)),
        FP32: ((64, 1), (100, 1), (512, 4), (4096, 1), (4096, 4)),
    }
    for t, of_dtype in widths.items():
        for cols, vectors in of_dtype:
            x, w = _new(MANY, cols, dtype=t), _new(*([vectors] if vectors > 1 else []), cols, dtype=t)
            call = partial(onepass.weighted_sum, x, w)
            yield f"weighted_sum {NAMES[t]} {vectors}×{cols}", partial(_both, call)
    x, w = _new(MANY, 4096, dtype=BF16), _new(4096)
    yield "weighted_sum bf16 1×4096, weight alone", partial(_both, partial(onepass.weighted_sum, x.detach(), w))


def _norms() -> Iterator[Call]:
    for t in (BF16, FP32):
        layer_norm = f"layer_norm {NAMES[t]}"
        narrow = (128, 768, 1024, 2048, 3000, 4096, 5120, 8192) if t == BF16 else (128, 1024, 2048, 3000, 4096, 8192)
        for n in (*narrow, 16384, 24000, 40000, 65536, 262144):
            x, w, b = _new(max(4096, (1 << 28) // n), n, dtype=t), _new(n, dtype=t), _new(n, dtype=t)
            yield f"{layer_norm} {n}", partial(_both, partial(onepass.layer_norm, x, w, b))
            if n in (2048, 40000):
                added = partial(onepass.layer_norm, x, w, b, residual=_new(*x.shape, dtype=t), stable=n == 2048)
                yield f"{layer_norm} {n}, residual{', stable' * (n == 2048)}", partial(_both, added)
        for n in (1152, 4096):
            x, w, b = _new(16, 4096, n, dtype=t), _new(16, 1, n, dtype=t), _new(16, 1, n, dtype=t)
            yield f"{layer_norm} {n}, adaptive", partial(_both, partial(onepass.layer_norm, x, w, b))
        x = _new(MANY, 128, dtype=t)
        yield f"{layer_norm} 128, inference", partial(onepass.layer_norm, x.detach())
        heads = partial(onepass.rms_norm, _new(4096, 16, 128, dtype=t), _new(16, 128, dtype=t))
        yield f"rms_norm {NAMES[t]} 128, a weight per head", partial(_both, heads)
        for n in (128, 8192) if t == BF16 else (4096,):
            x, z, w = _new(MANY, n, dtype=t), _new(MANY, n, dtype=t), _new(n, dtype=t)
            gated = partial(onepass.rms_norm, x, w, gate=z)
            yield f"rms_norm {NAMES[t]} {n}, gate", partial(_both, partial(gated, gate_act="sigmoid"))
            yield f"rms_norm {NAMES[t]} {n}, gate first", partial(_both, partial(gated, gate_first=True))
        for kind in ("row", "block"):
            quantized = partial(onepass.rms_norm, _new(MANY, 8192, dtype=t).detach(), quantize=kind)
            yield f"rms_norm {NAMES[t]} 8192, {kind}s in 8 bits", quantized
    x, w = _new(MANY, 4096), _new(4096)
    yield "rms_norm bf16 4096, rounded twice", partial(_both, partial(onepass.rms_norm, x, w, rounding="twice"))
    beside = partial(onepass.rms_norm, x, w, residual=_new(MANY, 4096, dtype=FP32))
    yield "rms_norm bf16 4096 beside a stream in fp32", partial(_both, beside)


def _rope() -> Iterator[Call]:
    kinds = ((128, 128, False, BF16), (128, 128, True, BF16), (128, 64, False, BF16), (96, 96, False, BF16),
             (128, 128, False, FP32), (128, 128, True, FP32))  # fmt: skip
    for d, turned, interleaved, t in kinds:
        q, k, w = _new(8, 4096, 16, d, dtype=t), _new(8, 4096, 4, d, dtype=t), _new(d, dtype=t)
        angles = _new(4096, turned // 2, dtype=FP32).detach()
        options: dict[str, Any] = {"cos": angles, "sin": angles, "interleaved": interleaved}
        call = partial(onepass.qk_norm_rope, q, k, w, w, **options)
        name = f"qk_norm_rope {NAMES[t]} {turned} of {d}{', interleaved' * interleaved}"
        yield name, partial(_both, call)


def _selection() -> Iterator[Call]:
    long = 1 << 18
    for n, t, kind in (
        *((n, FP32, "capped_exp") for n in (64, 1024, 8192, 16384, 32768, long)), (8192, BF16, "capped_exp"),
        *((8192, FP32, kind) for kind in ("sigmoid", "laplace", "clamp")), (16384, FP32, "sigmoid"),
        (long, FP32, "sigmoid"),
    ):  # fmt: skip
        s = _new(MANY if n < long else 64, n, dtype=t)
        call = partial(onepass.soft_topk, s if kind == "capped_exp" else s.detach(), n // 16, kind=kind)
        yield f"soft_topk {NAMES[t]} {n} {kind}", partial(_both, call)
    for n, t in ((64, FP32), (1024, FP32), (8192, FP32), (32768, FP32), (8192, BF16), (long, FP32)):
        s = _new(MANY if n < long else 64, n, dtype=t)
        call = partial(onepass.coor_descent, s, n_iters=20, k=n // 16)
        yield f"coor_descent {NAMES[t]} {n}", partial(_both, call)
    for k, n_rows, n, t in (
        (8, MANY, 64, FP32), (8, 1 << 15, 256, BF16), (32, 4096, 65536, FP32), (64, 1 << 14, 24576, BF16),
        (64, 4096, 1024, FP32), (2048, 8192, 8192, FP32), (2048, 8192, 8192, BF16), (2048, 8192, 16384, FP32),
        (64, 64, long, FP32), (2048, 64, long, FP32), (2048, 2048, long, FP32), (2048, 64, long, BF16),
        (1 << 16, 8, long, FP32), (128, 4096, 65536, FP32),
    ):  # fmt: skip
        name, s = f"topk {NAMES[t]} {k} of {n_rows}×{n}", _new(n_rows, n, dtype=t)
        yield name, partial(_both if t == FP32 and n_rows >= 64 else _without, partial(onepass.topk, s, k))
        if n_rows == 64 and t == FP32:
            yield f"{name}, by column", partial(_without, partial(onepass.topk, s, k, sorted=False))
        if n == long:
            ends = torch.empty(n_rows, dtype=torch.int32, device="meta")
            ranges = partial(onepass.topk, s, k, start=ends, lengths=ends)
            yield f"{name}, ranges", partial(_without, ranges)


def _attention() -> Iterator[Call]:
    spans = torch.empty(4096, dtype=torch.int32, device="meta")
    positions = torch.empty(2, 4096, dtype=torch.int64, device="meta")
    for t, precision in ((BF16, "highest"), (FP32, "highest"), (FP32, "high")):
        q = _new(2, 4096, 8, 64, dtype=t)
        call = partial(_both, partial(span_attention, q, q, q, spans, spans))
        yield f"span_attention {NAMES[t]} {precision}", partial(_in_precision, precision, call)
    yield "rotary bf16", partial(_both, partial(rotary, _new(2, 4096, 8, 64), positions))
    yield "rotary_attention bf16", partial(_both, partial(rotary_attention, _new(2, 4096, 3, 8, 64), spans, spans))


def _routing() -> Iterator[Call]:
    for t in (BF16, FP32):
        x, indices = _new(4, 8192, 1024, dtype=t), torch.empty(4, 512, dtype=torch.int64, device="meta")
        for vectors in (1, 4, 16):
            score = partial(routing.score, x, _new(vectors, 1024, dtype=FP32))
            yield f"score {NAMES[t]} {vectors}×1024", partial(_both, score)
        yield f"gather {NAMES[t]} 1024", partial(_both, partial(routing.gather, x, indices))
        update, gates = _new(4, 512, 1024, dtype=t), _new(4, 512, dtype=FP32)
        yield f"scatter_add {NAMES[t]} 1024", partial(_both, partial(routing.scatter_add, x, update, gates, indices))
    for n, block, memory, masked in ((32768, 128, 2048, False), (65536, 8, 8192, True)):
        mask = torch.empty(4, n, dtype=torch.bool, device="meta") if masked else None
        choose = partial(causal_choice, _new(4, n, dtype=FP32), 1 / 16, block=block, memory=memory, mask=mask)
        yield f"causal_choice {n}, blocks of {block}", partial(_both, choose)


def _layers() -> Iterator[Call]:
    """Layers in training: fp32 weights whose products are in bf16, or all in bf16."""
    mask = torch.empty(4, 8192, dtype=torch.bool, device="meta")
    for t in (BF16, FP32):
        for dim in (1024, 2048, 4096) if t == BF16 else (512, 1024):
            layer = RoutedFeedForward(dim, 1 / 16, device="meta", dtype=t)
            yield f"RoutedFeedForward {NAMES[t]} {dim}", partial(_layer, layer, None)
        router = Router(1024, gate="straight_through", device="meta", dtype=t)
        for name, made in (
            ("", RoutedFeedForward(1024, 1 / 16, router=router, device="meta", dtype=t)),
            ("causal ", RoutedAttention(1024, 1 / 16, 1 / 8, causal=True, device="meta", dtype=t)),
            ("", RoutedAttention(1024, 1 / 16, 1 / 8, device="meta", dtype=t)),
        ):
            yield f"{name}{type(made).__name__} {NAMES[t]} 1024, masked", partial(_layer, made, mask)
        block = RoutedBlock(1024, 1 / 16, causal=True, device="meta", dtype=t)
        yield f"RoutedBlock {NAMES[t]} 1024", partial(_layer, block, None)
        experts = Experts(1024, 64, 4, activation="swiglu", device="meta", dtype=t)
        yield f"Experts {NAMES[t]} 1024", partial(_layer, experts, None)
        yield f"Experts {NAMES[t]} 1024, gelu", partial(_layer, Experts(1024, 64, 4, device="meta", dtype=t), None)
        few = Experts(1024, 8, 2, hidden_dim=2048, activation="swiglu", device="meta", dtype=t).eval()
        yield f"Experts {NAMES[t]} 1024, a token", partial(_without, partial(few, _new(1, 1, 1024, dtype=t)))
    x, indices = _new(32768, 512), torch.empty(32768, 4, dtype=torch.int64, device="meta")
    own = partial(onepass.experts, x, indices, _new(32768, 4), _new(64, 512, 2048), _new(64, 1024, 512))
    yield "experts bf16 512", partial(_both, partial(own, activation="swiglu"))
    yield "Experts fp16 1024", partial(_layer, Experts(1024, 64, 4, device="meta", dtype=FP16), None)
    products = Experts(1024, 64, 4, device="meta", dtype=FP32)
    yield "Experts fp32 1024, no autocast", partial(_both, partial(products, _new(4, 8192, 1024, dtype=FP32)))
    for window in (256, None):
        decoded: Any = TransformerBlock(1024, window=window, causal=True, device="meta", dtype=BF16)
        yield f"step of TransformerBlock, window {window}", partial(_step, decoded)
    routed = RoutedBlock(1024, 1 / 8, causal=True, device="meta", dtype=BF16)
    yield "step of RoutedBlock", partial(_step, routed)
    yield "step of RoutedBlock, a prompt", partial(_step, routed, 1024)


def _lion() -> Iterator[Call]:
    for t, gradient, options in (
        *((t, t, {}) for t in (FP32, BF16, FP16)), (FP32, FP32, {"state_dtype": BF16}), (FP32, BF16, {}),
        (BF16, BF16, {"state_dtype": FP32, "low_precision": "none"}), (BF16, BF16, {"state_dtype": FP32}),
        (BF16, BF16, {"low_precision": "none"}), (FP32, FP32, {"state_dtype": "int8"}),
        (BF16, BF16, {"state_dtype": "int8"}), (BF16, BF16, {"state_dtype": "int8", "low_precision": "none"}),
        (FP32, FP32, {"cautious": True}), (BF16, BF16, {"cautious": True}),
        (BF16, BF16, {"cautious": True, "state_dtype": "int8", "low_precision": "none"}),
    ):  # fmt: skip
        words = [f"{k} {NAMES.get(v, v)}" for k, v in options.items()]  # type: ignore[call-overload]
        name = ", ".join([f"Lion {NAMES[t]}, gradients {NAMES[gradient]}", *words])
        yield name, partial(_lion_step, t, gradient, options)


def _without(call: Callable[[], Any]) -> None:
    with torch.no_grad():
        call()


def _in_precision(precision: str, call: Callable[[], Any]) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    call()
    torch.set_float32_matmul_precision(before)


def _layer(layer: Any, mask: Tensor | None) -> None:
    weight = next(layer.parameters())
    x = _new(4, 8192, layer.dim if hasattr(layer, "dim") else weight.shape[-1], dtype=weight.dtype)
    # as under autocast, which knows no meta tensors
    with in_bf16(weight.dtype == FP32):
        _both(lambda: layer(x, mask))


@torch.no_grad()
def _step(block: Any, tokens: int = 1) -> None:
    block.eval()(_new(8, tokens, 1024), cache=block.new_cache(8, 8192))


def _lion_step(t: torch.dtype, gradient: torch.dtype, options: dict[str, Any]) -> None:
    parameter = _new(1 << 22, dtype=gradient)
    parameter.grad = torch.empty_like(parameter).detach()
    parameter.data = parameter.data.to(t)
    optimizer = Lion([parameter], **options)
    clip_grad_norm([parameter], 1.0)
    optimizer.step()


CALLS: list[Call] = [
    *_weighted_sum(), *_norms(), *_rope(), *_selection(), *_attention(), *_routing(), *_layers(), *_lion(),
]  # fmt: skip

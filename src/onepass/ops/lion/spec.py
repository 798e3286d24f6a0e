"""What the Lion kernel may cost and what a step is measured against; its contract is in tests/ops/lion and tests/optim.

An op that only mutates lists has no values and gradients to compare, so there is no `Spec`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import Case, Kernel, Spec

from .table import shape_of

SPECS: list[Spec] = []


def _step_kernel() -> Any:
    from .kernels_triton import step_kernel

    return step_kernel


def _norm_kernel() -> Any:
    from .kernels_triton import norm_kernel

    return norm_kernel


def _kernels() -> Iterator[Kernel]:
    signature = {
        "table_ptr": "*i64", "scale_ptr": "*fp32", "clip_ptr": "*fp32", "found_inf_ptr": "*fp32", "agreed_ptr": "*i64",
        "n_tensors": "i32", "n_groups": "i32",
    }  # fmt: skip
    types = (
        # mode, parameter, gradient, momentum, extra
        ("fp32", 0, "fp32", "fp32", "fp32", "fp32"),
        ("bf16", 0, "bf16", "bf16", "bf16", "bf16"),
        ("fp16", 0, "fp16", "fp16", "fp16", "fp16"),
        ("fp32, bf16 momentum", 0, "fp32", "fp32", "bf16", "fp32"),
        ("fp32, bf16 gradient", 0, "fp32", "bf16", "fp32", "fp32"),
        ("bf16, fp32 momentum", 0, "bf16", "bf16", "fp32", "bf16"),
        ("bf16 + remainder", 1, "i16", "bf16", "bf16", "i16"),
        ("bf16 + remainder, fp32 momentum", 1, "i16", "bf16", "fp32", "i16"),
        ("bf16 + kahan", 2, "bf16", "bf16", "bf16", "bf16"),
        ("fp16 + kahan", 2, "fp16", "fp16", "fp16", "fp16"),
        ("bf16, stochastic", 3, "i16", "bf16", "bf16", "i64"),
        ("fp16, stochastic", 3, "fp16", "fp16", "fp16", "i64"),
        ("fp32, int8 momentum", 0, "fp32", "fp32", "i8", "fp32"),
        ("bf16, int8 momentum", 0, "bf16", "bf16", "i8", "bf16"),
        ("bf16 + remainder, int8 momentum", 1, "i16", "bf16", "i8", "i16"),
        ("bf16, stochastic, int8 momentum", 3, "i16", "bf16", "i8", "i64"),
    )
    variants = ((True, False, False), (False, False, False), (True, True, False), (True, True, True))
    for name, mode, p, g, m, e in types:
        for aligned, cautious, count in variants:
            if cautious and g == "fp16":
                continue
            words = [name, *(["cautious"] * cautious), *(["count"] * count), *(["unaligned"] * (not aligned))]
            shape = shape_of(p, m)
            yield Kernel(
                f"lion {', '.join(words)}", _step_kernel, signature,
                {
                    "P_TYPE": p, "G_TYPE": g, "M_TYPE": m, "E_TYPE": e, "MODE": mode, "ALIGNED": aligned,
                    "CAUTIOUS": cautious, "COUNT": count, "HAS_SCALE": True, "HAS_CLIP": True, "HAS_FOUND_INF": True,
                    "STREAM": shape.stream, "SPAN": 32, "BLOCK": shape.block, "TILES": shape.tiles,
                },
                divisible=("table_ptr", "scale_ptr", "clip_ptr", "found_inf_ptr", "agreed_ptr"),
                num_warps=shape.num_warps, max_registers=64 if aligned else 128, vector_loads=aligned,
            )  # fmt: skip
    for g in ("fp32", "bf16", "fp16"):
        yield Kernel(
            f"gradient norm {g}", _norm_kernel,
            {
                "table_ptr": "*i64", "before_ptr": "*fp32", "partial_ptr": "*fp32", "ticket_ptr": "*i32",
                "out_ptr": "*fp32", "max_norm_ptr": "*fp32", "scale_ptr": "*fp32", "n_tensors": "i32",
                "n_groups": "i32", "n_chunks": "i32",
            },
            {
                "G_TYPE": g, "ALIGNED": True, "HAS_BEFORE": True, "HAS_SCALE": True, "SPAN": 32, "CHUNK": 4096,
                "BLOCK": 2048, "PROGRAMS": 1056,
            },
            divisible=("table_ptr", "partial_ptr"), num_warps=8, max_registers=64,
        )  # fmt: skip


KERNELS = list(_kernels())


def gpt2_124m() -> list[tuple[int, ...]]:
    """Shapes of GPT-2 small: 12 layers of width 768, tied embeddings."""
    d = 768
    layer: list[tuple[int, ...]] = [
        (d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,),
    ]  # fmt: skip
    return [(50257, d), (1024, d), *(12 * layer), (d,), (d,)]


def llama_1b() -> list[tuple[int, ...]]:
    """Shapes of Llama 3.2 1B: 16 layers of width 2048, 8 of 32 heads for keys and values, tied embeddings."""
    d, kv, hidden = 2048, 512, 8192
    layer: list[tuple[int, ...]] = [
        (d, d), (kv, d), (kv, d), (d, d), (hidden, d), (hidden, d), (d, hidden), (d,), (d,),
    ]  # fmt: skip
    return [(128256, d), *(16 * layer), (d,)]


def small_1000() -> list[tuple[int, ...]]:
    """A thousand tensors of a few thousand elements, none a multiple of the tile."""
    return [(997 + 7 * i,) for i in range(1000)]


MODELS: Mapping[str, Callable[[], Sequence[tuple[int, ...]]]] = {
    "gpt2-124m": gpt2_124m, "llama-1b": llama_1b, "1000 small tensors": small_1000,
}  # fmt: skip


def count(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements in all."""
    return sum(torch.Size(s).numel() for s in shapes)


def _rivals(params: list[Tensor]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Constructors of the rivals that are installed; each failure to import is a rival left out."""

    def found(module: str) -> Any:
        try:
            return importlib.import_module(module)
        except ImportError:
            return None

    options = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
    if lib := found("lion_pytorch"):
        yield "lion-pytorch", lambda: lib.Lion(params, **options)
        yield "lion-pytorch triton", lambda: lib.Lion(params, use_triton=True, **options)
    if foreach := found("lion_pytorch.foreach"):
        yield "lion-pytorch foreach", lambda: foreach.Lion(params, **options)
    if optimi := found("optimi"):
        yield "optimi", lambda: optimi.Lion(params, kahan_sum=False, **options)
    if bnb := found("bitsandbytes"):
        yield "bitsandbytes", lambda: bnb.optim.Lion(params, **options)
    if flash := found("flashoptim"):
        yield "flashoptim", lambda: flash.FlashLion(params, **options)
    yield "torch AdamW fused", lambda: torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)


def _case(model: str, dtype: torch.dtype, low_precision: str) -> Case:
    shapes = MODELS[model]()
    bytes_each = 5 * dtype.itemsize + (0 if low_precision == "none" else 2 * 2)

    def make() -> Mapping[str, Callable[[], Any]]:
        from onepass.optim import Lion

        params = [torch.randn(s, device="cuda", dtype=dtype).requires_grad_() for s in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        ours = Lion(params, lr=1e-4, weight_decay=0.1, low_precision=low_precision)
        impls: dict[str, Callable[[], Any]] = {"onepass": ours.step}
        if low_precision == "none":
            for name, build in _rivals(params):
                try:
                    impls[name] = build().step
                except (RuntimeError, ImportError, AttributeError, TypeError):
                    # an installed rival may still lack what it needs on this machine
                    continue
        return impls

    params = {"model": model, "tensors": len(shapes), "elements": count(shapes), "low_precision": low_precision}
    return Case("lion", "step", params, dtype, count(shapes) * bytes_each, make)


CASES = [
    _case(model, dtype, low_precision)
    for model in MODELS
    for dtype, low_precision in (
        (torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "remainder"), (torch.bfloat16, "kahan"),
    )
]  # fmt: skip

"""Cases of Lion: whole steps over the parameters of a model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Definition, Impl, Prepared
from onepass.optim import Lion, clip_grad_norm


def gpt2_124m() -> list[tuple[int, ...]]:
    """Return the shapes of GPT-2 small: 12 layers of width 768, tied embeddings."""
    d = 768
    layer: list[tuple[int, ...]] = [
        (d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,),
    ]  # fmt: skip
    return [(50257, d), (1024, d), *(12 * layer), (d,), (d,)]


def llama_1b() -> list[tuple[int, ...]]:
    """Return the shapes of Llama 3.2 1B: 16 layers of width 2048, 8 key and value heads of 32, tied embeddings."""
    d, kv, hidden = 2048, 512, 8192
    layer: list[tuple[int, ...]] = [(d, d), (kv, d), (kv, d), (d, d), (hidden, d), (hidden, d), (d, hidden), (d,), (d,)]
    return [(128256, d), *(16 * layer), (d,)]


def small_1000() -> list[tuple[int, ...]]:
    """Return the shapes of a thousand tensors of 997 to 7990 elements, few of them multiples of the tile."""
    return [(997 + 7 * i,) for i in range(1000)]


def adapters_300() -> list[tuple[int, ...]]:
    """Return the shapes of 300 adapters of rank 16 on a width of 4096."""
    return [(16, 4096)] * 300


MODELS: Mapping[str, Callable[[], Sequence[tuple[int, ...]]]] = {
    "gpt2-124m": gpt2_124m, "llama-1b": llama_1b, "1000 small tensors": small_1000,
    "300 adapters": adapters_300,
}  # fmt: skip


def count(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the number of elements of all shapes."""
    return sum(torch.Size(s).numel() for s in shapes)


# import name → distribution
RIVALS = {
    "bitsandbytes": "bitsandbytes",
    "flashoptim": "flashoptim",
    "lion_pytorch": "lion-pytorch",
    "optimi": "torch-optimi",
}
_OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
# two steps move a weight by 2e-4; 16 bits round to 4e-3
_CHECK = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
_ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
# name → (module, class, options)
_Rivals = Mapping[str, tuple[str, str, dict[str, Any]]]
_PLAIN: _Rivals = {
    "lion-pytorch foreach": ("lion_pytorch.foreach", "Lion", _OPTIONS),
    "lion-pytorch triton": ("lion_pytorch", "Lion", {**_OPTIONS, "use_triton": True}),
    "optimi": ("optimi", "Lion", {**_OPTIONS, "kahan_sum": False}),
    "bitsandbytes": ("bitsandbytes.optim", "Lion", _OPTIONS),
    "flashoptim": ("flashoptim", "FlashLion", _OPTIONS),
    "torch AdamW fused": ("torch.optim", "AdamW", _ADAMW),
}
_KAHAN: _Rivals = {"optimi kahan": ("optimi", "Lion", {**_OPTIONS, "kahan_sum": True})}
_INT8: _Rivals = {
    "bitsandbytes 8 bit": ("bitsandbytes.optim", "Lion8bit", _OPTIONS),
    "flashoptim": ("flashoptim", "FlashLion", _OPTIONS),
}


def _parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return parameters with gradients, the same in each call."""
    torch.manual_seed(0)
    params = [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def _ends(params: list[Tensor]) -> list[Tensor]:
    """Return the numbers to compare: the beginnings of the first and the last parameter."""
    return [p.detach().flatten()[:4096].clone() for p in (params[0], params[-1])]


def _defined(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return `_ends` by the formula after two steps; from zero momentum both steps take the gradient's sign."""
    params = _parameters(shapes, dtype, device)
    signs = [p.grad.flatten()[:4096].sign() for p in (params[0], params[-1])]  # type: ignore[union-attr]
    lr, decay = _OPTIONS["lr"], _OPTIONS["weight_decay"]
    ends = _ends(params)
    for _ in range(2):
        ends = [p.double() * (1 - lr * decay) - lr * s for p, s in zip(ends, signs, strict=True)]
    return ends


def _prepared(
    build: Callable[[list[Tensor]], Any], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str = "cuda"
) -> Prepared:
    """Prepare an optimizer with parameters of its own, built late: one optimizer at a time holds memory."""
    params: list[Tensor] = []

    def make() -> Callable[[], Any]:
        params[:] = _parameters(shapes, dtype, device)
        step: Callable[[], Any] = build(params).step
        return step

    return Prepared(make, lambda _: _ends(params))


def _rival(module: str, name: str, options: dict[str, Any]) -> Callable[[list[Tensor]], Any]:
    return lambda params: getattr(importlib.import_module(module), name)(params, **options)


def _clipped(optimizer: Any, clip: Callable[..., Any], params: list[Tensor]) -> Any:
    def step() -> None:
        clip(params, 1.0)
        optimizer.step()

    return SimpleNamespace(step=step)


def floor_bytes(dtype: torch.dtype, momentum: torch.dtype | str, low_precision: str, clip: bool = False) -> float:
    """Return the byte floor per element: 2P + G + 2M, 4 for a remainder or compensation, G once more for a norm."""
    state = 2 * (1 + 4 / 256) if momentum == "int8" else 2 * momentum.itemsize  # type: ignore[union-attr]
    beside = 4 if low_precision == "remainder" else 0
    return (4 if clip else 3) * dtype.itemsize + state + beside


def _case(
    model: str, dtype: torch.dtype, low_precision: str, momentum: torch.dtype | str | None = None, *,
    cautious: bool = False, clip: bool = False, rivals: _Rivals | None = None,
) -> Case:  # fmt: skip
    shapes = MODELS[model]()
    elements = count(shapes)
    element_bytes = floor_bytes(dtype, momentum or dtype, low_precision, clip) + (dtype.itemsize * 2 if cautious else 0)

    def ours(params: list[Tensor]) -> Any:
        optimizer = Lion(
            params, lr=1e-4, weight_decay=0.1, low_precision=low_precision, state_dtype=momentum, cautious=cautious
        )
        return _clipped(optimizer, clip_grad_norm, params) if clip else optimizer

    def torch_clip(params: list[Tensor]) -> Any:
        return _clipped(torch.optim.AdamW(params, **_ADAMW), torch.nn.utils.clip_grad_norm_, params)

    def make() -> Mapping[str, Impl]:
        impls: dict[str, Impl] = {"definition": Definition(lambda: _defined(shapes, dtype, "cuda"))}
        impls["onepass"] = _prepared(ours, shapes, dtype)
        if clip:
            impls["torch clip_grad_norm_ + AdamW fused"] = _prepared(torch_clip, shapes, dtype)
        for name, (module, cls, options) in (rivals or {}).items():
            impls[name] = _prepared(_rival(module, cls, options), shapes, dtype)
        return impls

    params: dict[str, Any] = {
        "model": model, "tensors": len(shapes), "elements": elements, "low_precision": low_precision
    }  # fmt: skip
    if momentum is not None:
        params["momentum"] = str(momentum).removeprefix("torch.")
    if cautious:
        params["cautious"] = "cautious"
    if clip:
        params["clip"] = "clip"
    return Case("lion", "step", params, dtype, round(elements * element_bytes), make, _CHECK[dtype])


_CPU_MODELS: Mapping[str, Sequence[tuple[int, ...]]] = {
    "one tensor of 16 M": [(1 << 24,)],
    "3 layers of GPT-2": gpt2_124m()[2 : 2 + 36],
    "300 small tensors": small_1000()[:300],
}


class _Compiled:
    """A loop over tensors with lion-pytorch's update function, compiled, without the overhead of its optimizer."""

    def __init__(self, params: list[Tensor]) -> None:
        from lion_pytorch.lion_pytorch import update_fn

        self.update: Callable[..., Any] = torch.compile(update_fn)
        self.pairs = [(p, torch.zeros_like(p)) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        for p, m in self.pairs:
            self.update(p, p.grad, m, 1e-4, 0.1, 0.9, 0.99)


def _cpu_case(model: str, fused: bool) -> Case:
    """Measure whole steps in fp32 on a CPU; `fused` compiles ours."""
    shapes, fp32 = _CPU_MODELS[model], torch.float32

    def ours(params: list[Tensor]) -> Any:
        return Lion(params, fused=fused or None, **_OPTIONS)

    def make() -> Mapping[str, Impl]:
        rivals: dict[str, Callable[[list[Tensor]], Any]] = {
            "lion-pytorch": _rival("lion_pytorch", "Lion", _OPTIONS),
            "lion-pytorch foreach": _rival(*_PLAIN["lion-pytorch foreach"]),
            "lion-pytorch torch.compile": _Compiled,
        }
        impls: dict[str, Impl] = {"definition": Definition(lambda: _defined(shapes, fp32, "cpu"))}
        impls["onepass"] = _prepared(ours, shapes, fp32, "cpu")
        for name, build in rivals.items():
            impls[name] = _prepared(build, shapes, fp32, "cpu")
        return impls

    elements = count(shapes)
    params = {"model": model, "tensors": len(shapes), "elements": elements} | ({"fused": "fused"} if fused else {})
    floor = round(elements * floor_bytes(fp32, fp32, "none"))
    return Case("lion", "step", params, fp32, floor, make, _CHECK[fp32], "cpu")


def _cases() -> Iterator[Case]:
    fp32, bf16 = torch.float32, torch.bfloat16
    for model in MODELS:
        for dtype in (fp32, bf16):
            yield _case(model, dtype, "none", rivals=_PLAIN)
    # measure each mode against its own byte floor, beside rivals that have it
    for model in ("gpt2-124m", "llama-1b"):
        yield _case(model, bf16, "remainder", rivals=_KAHAN if model == "llama-1b" else None)
        yield _case(model, bf16, "none", "int8", rivals=_INT8)
        yield _case(model, bf16, "remainder", "int8")
    for dtype in (fp32, bf16):
        yield _case("1000 small tensors", dtype, "none", clip=True)
    yield _case("llama-1b", fp32, "none", "int8")
    yield _case("llama-1b", bf16, "none", cautious=True)
    yield _case("llama-1b", bf16, "none", clip=True)
    for model in _CPU_MODELS:
        for fused in (False, True):
            yield _cpu_case(model, fused)


CASES = list(_cases())

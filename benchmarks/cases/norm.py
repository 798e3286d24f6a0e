"""Bench cases of the norms, and the rivals that they are measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Impl, Prepared, Timed, rival, staged, upstream
from onepass.ops.norm.op import layer_norm, rms_norm

RIVALS = {"liger_kernel": "liger-kernel", "quack": "quack-kernels"}


def _layer_norm_rivals(x: Tensor, w: Tensor, b: Tensor) -> dict[str, Timed]:
    n = (x.shape[-1],)
    compiled = torch.compile(F.layer_norm)
    impls: dict[str, Timed] = {
        "onepass": lambda: layer_norm(x, w, b),
        "F.layer_norm": lambda: F.layer_norm(x, n, w, b),
        "torch.compile": lambda: compiled(x, n, w, b),
    }
    if x.is_cuda:
        liger = "liger_kernel.ops.layer_norm"
        impls["liger"] = rival(liger, lambda m: lambda: m.LigerLayerNormFunction.apply(x, w, b, 1e-5))
    return impls


def _rms_norm_rivals(x: Tensor, w: Tensor) -> dict[str, Timed]:
    n = (x.shape[-1],)
    compiled = torch.compile(F.rms_norm)
    impls: dict[str, Timed] = {
        "onepass": lambda: rms_norm(x, w, eps=1e-6),
        "F.rms_norm": lambda: F.rms_norm(x, n, w, 1e-6),
        "torch.compile": lambda: compiled(x, n, w, 1e-6),
    }
    if x.is_cuda:
        # in_place=False: all implementations share one upstream gradient, which in_place would overwrite
        options = 1e-6, 0.0, "llama", False
        liger = "liger_kernel.ops.rms_norm"
        impls["liger"] = rival(liger, lambda m: lambda: m.LigerRMSNormFunction.apply(x, w, *options))
        impls["quack"] = rival("quack.rmsnorm", lambda m: lambda: m.rmsnorm(x, w, eps=1e-6))
    return impls


def _quack_layer_norm(x: Tensor, w: Tensor, b: Tensor, stage: str) -> Prepared:
    """Call quack's forward and backward functions: its layer norm has no autograd and takes fp32 weights only."""

    def use(quack: Any) -> Callable[[], Any]:
        data, weight, bias = x.detach(), w.detach().float(), b.detach().float()
        if stage == "forward":
            return lambda: quack.layernorm_fwd(data, weight, bias, eps=1e-5)
        (dy,) = upstream(data)
        _, rstd, mean = quack.layernorm_fwd(data, weight, bias, eps=1e-5, return_rstd=True, return_mean=True)
        return lambda: quack.layernorm_bwd(data, weight, dy, rstd, mean)

    return rival("quack.rmsnorm", use)


def _case(op: str, rows: int, cols: int, dtype: torch.dtype, stage: str, device: str = "cuda") -> Case:
    def make() -> Mapping[str, Impl]:
        x, w, b = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((rows, cols), (cols,), (cols,)))
        if op == "rms_norm":
            return staged(stage, _rms_norm_rivals(x, w), (x, w))
        impls = staged(stage, _layer_norm_rivals(x, w, b), (x, w, b))
        return impls | ({"quack": _quack_layer_norm(x, w, b, stage)} if device == "cuda" else {})

    floor = rows * cols * dtype.itemsize * (2 if stage == "forward" else 3)
    check = 1e-3 if dtype == torch.float32 else 5e-2
    return Case(op, stage, {"rows": rows, "cols": cols}, dtype, floor, make, check, device)


def _residual_case(rows: int, cols: int, dtype: torch.dtype, stage: str, device: str = "cuda") -> Case:
    """Measure norm(x + residual). Four tensors move, forward (x, residual → s, y) and backward (dy, ds, s → dx)."""

    def make() -> Mapping[str, Impl]:
        x, r = (torch.randn(rows, cols, device=device, dtype=dtype) for _ in range(2))
        w = torch.randn(cols, device=device, dtype=dtype)

        def pair() -> tuple[Tensor, Tensor]:
            s = x + r
            return rms_norm(s, w, eps=1e-6), s

        compiled = torch.compile(lambda: (F.rms_norm(x + r, (cols,), w, 1e-6), x + r))
        impls: dict[str, Timed] = {
            "onepass": lambda: rms_norm(x, w, residual=r, eps=1e-6),
            "add, then onepass": pair,
            "torch.compile": compiled,
        }
        if device == "cuda":
            fused = {"residual": r, "eps": 1e-6, "prenorm": True}
            impls["quack"] = rival("quack.rmsnorm", lambda m: lambda: m.rmsnorm(x, w, **fused))
        return staged(stage, impls, (x, r, w))

    check = 1e-3 if dtype == torch.float32 else 5e-2
    params = {"rows": rows, "cols": cols, "residual": True}
    return Case("rms_norm", stage, params, dtype, 4 * rows * cols * dtype.itemsize, make, check, device)


# sizes of the bars: 2^25 … 2^27 elements
_SIZES = (
    (262144, 128), (65536, 768), (32768, 1024), (32768, 4096), (16384, 5120), (16384, 8192), (4096, 16384),
    (4096, 32768), (1024, 65536), (1024, 131072), (512, 262144),
)  # fmt: skip
_RESIDUAL_SIZES = ((32768, 1024), (32768, 4096), (16384, 8192))
_CPU_SIZES = ((64, 1024), (2048, 1024), (2048, 4096))
CASES = [
    _case(op, rows, cols, dtype, stage, device)
    for device, sizes in (("cuda", _SIZES), ("cpu", _CPU_SIZES))
    for op in ("layer_norm", "rms_norm")
    for rows, cols in sizes
    for dtype in (torch.bfloat16, torch.float32)
    for stage in ("forward", "backward")
] + [
    _residual_case(rows, cols, dtype, stage, device)
    for device, sizes in (("cuda", _RESIDUAL_SIZES), ("cpu", ((2048, 1024),)))
    for rows, cols in sizes
    for dtype in (torch.bfloat16, torch.float32)
    for stage in ("forward", "backward")
]

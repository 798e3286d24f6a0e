"""The torch path: CPU, float64, no Triton. Native kernels where torch has them, formulas elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import stable_scale


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _native_arguments(
    x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """X, weight and bias such that torch's kernels keep their statistics in fp32 or wider.

    Given a 16-bit x, torch does so only when the weight is fp32 (it then calls the types mixed); its CUDA kernels
    take no mixed types, so there x itself is widened.
    """
    wide = _wide(x)
    if weight is not None:
        weight = weight.to(wide)
    elif x.dtype != wide and not x.is_cuda:
        weight = torch.ones(x.shape[-1], dtype=wide, device=x.device)
    return x.to(wide) if x.is_cuda else x, weight, None if bias is None else bias.to(wide)


def _effective_weight(weight: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor | None:
    if weight is None:
        return None
    return weight.to(dtype) + offset if offset else weight.to(dtype)


def forward(
    s: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S (..., n), not empty → y of `dtype`, contiguous, and statistics (1 to 3, rows): 1/σ, then the mean, then ±m."""
    s = s.contiguous()
    wide, n = _wide(s), s.shape[-1]
    if has_mean and not stable:
        x, weight, bias = _native_arguments(s, weight, bias)
        y, mean, rstd = torch.native_layer_norm(x, (n,), weight, bias, eps)
        return y.to(dtype), torch.cat((rstd.view(1, -1), mean.view(1, -1)))
    w = _effective_weight(weight, offset, wide)
    if not has_mean:
        square = torch.linalg.vector_norm(s, 2, -1, keepdim=True, dtype=wide).square_()
        rstd = square.div_(n).add_(eps).rsqrt_()
        y = s * rstd
        stats = rstd.view(1, -1)
    else:
        f = s.to(wide)
        m, magnitude = stable_scale(f), f.abs().amax(-1, keepdim=True)
        # in units of max|x| no row overflows or underflows, however huge its values
        unit = torch.where(magnitude > 0, magnitude, torch.ones_like(magnitude))
        f = f / unit
        var, mean = torch.var_mean(f, -1, correction=0, keepdim=True)
        rstd = (var + eps * (m / unit).square()).rsqrt()
        y = (f - mean).mul_(rstd)
        signed = torch.where(s.amax(-1, keepdim=True) > 0, m, -m)
        stats = torch.stack([(rstd / unit).view(-1), (mean * unit).view(-1), signed.view(-1)])
    if w is not None:
        y.mul_(w)
    if bias is not None:
        y.add_(bias)
    return y.to(dtype), stats


def backward(
    dy: Tensor, x: Tensor, stats: Tensor, weight: Tensor | None, eps: float, offset: float, has_mean: bool,
    stable: bool, need_x: bool, need_w: bool, need_b: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients that are needed, of x, weight and bias, the latter two in fp32 or wider; the others are None."""
    x, dy = x.contiguous(), dy.contiguous()
    wide, n = _wide(x), x.shape[-1]
    column = (*x.shape[:-1], 1)
    rstd = stats[0].view(column)
    if not has_mean:
        return _rms_backward(dy, x, rstd, _effective_weight(weight, offset, wide), need_x, need_w)
    mean = stats[1].view(column)
    native_x, native_w, _ = _native_arguments(x, weight, None)
    # a bias gradient is only computed for a bias; its values play no part
    b = torch.empty(n, dtype=wide, device=x.device) if need_b else None
    needs = [need_x, need_w, need_b]
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        dy.to(native_x.dtype), native_x, (n,), mean, rstd, native_w, b, needs
    )
    if need_x and stable:
        dx = dx.to(wide) - _stable_term(dy, x, stats[2].view(column), mean, rstd, weight, eps)
    return dx, dw, db


def _rms_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, w: Tensor | None, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None, None]:
    n = x * rstd
    dy = dy.to(n.dtype)
    dw = (dy * n).flatten(0, -2).sum(0) if need_w and x.dim() > 1 else (dy * n if need_w else None)
    if not need_x:
        return None, dw, None
    g = dy if w is None else dy * w
    a = torch.linalg.vecdot(g, n).unsqueeze(-1).div_(x.shape[-1])
    return torch.addcmul(g, n, a, value=-1).mul_(rstd), dw, None


def _stable_term(
    dy: Tensor, x: Tensor, signed: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, eps: float
) -> Tensor:
    f = x.to(mean.dtype)
    n = (f - mean) * rstd
    g = dy.to(n.dtype) if weight is None else dy * weight.to(n.dtype)
    attained = f == signed
    share = torch.linalg.vecdot(g, n).unsqueeze(-1) / attained.sum(-1, keepdim=True).clamp_(min=1)
    term: Tensor = attained * (share * eps * (signed * rstd) * rstd)
    return term

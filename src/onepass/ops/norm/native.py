"""Plain eager calls on a CPU: use torch's own differentiable operators where they keep the contract.

The time of a small call is mostly Python, so this path is short: check the arguments once, then call torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import fast_apply, once
from onepass.core.launch import INTERPRET
from onepass.core.sums import BLOCK

from .torch_path import far_rows, sixteen_bit_backward, sixteen_bit_forward

# elements up to which torch.rms_norm, several passes over x, takes less time than the call of our formulas
SMALL = 1 << 19


def native(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool
) -> Tensor | None:
    """Return the norm by torch's operators on a CPU, differentiable; None if they are less exact or slower.

    16-bit layer norms take `_SixteenBit`: torch keeps their statistics, and sums dw and db, in 16 bits (12 % off after
    4096 rows). Large RMS norms and RMS norms with gradients return None: torch makes several passes over the whole
    tensor, and its gradient underflows for large x.
    """
    if INTERPRET or not x.is_cpu or stable or torch._C._is_any_autocast_enabled():
        return None
    if not isinstance(eps, (float, int)) or not eps >= 0:
        return None
    if not x.numel() or not x.dim() or x.dtype not in check.FLOATS:
        return None
    dtype, n_cols = x.dtype, x.shape[-1]
    for v in (weight, bias):
        if v is not None and not (isinstance(v, Tensor) and v.dtype == dtype and v.shape == (n_cols,) and v.is_cpu):
            return None
    if has_mean:
        if weight is None and bias is not None:
            # torch's second derivative fails for a bias without a weight, with an error that names neither
            return None
        if dtype.itemsize == 2:
            return _sixteen_bit(x, weight, bias, eps)
        y, mean, rstd = torch.native_layer_norm(x, (n_cols,), weight, bias, eps)
        # y is right everywhere, but the backward that torch has recorded is not: ours holds there
        return None if y.requires_grad and far_rows(mean, rstd, eps) is not None else y
    # y must have the same bits by torch as by our formulas; above BLOCK columns torch's order of a sum depends on the
    # number of rows and threads
    if bias is not None or x.numel() > SMALL or n_cols > BLOCK or (offset and weight is not None):
        return None
    # torch's gradient uses the cube of 1/rms, which underflows from |x| of about 1e13 on; ours stays right
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return None
    return torch.rms_norm(x.contiguous(), (n_cols,), weight, eps)


def _wide_weight(weight: Tensor | None, x: Tensor) -> Tensor:
    # torch's kernel keeps fp32 statistics of 16-bit rows only beside an fp32 weight
    return torch.ones(x.shape[-1], dtype=torch.float32, device=x.device) if weight is None else weight.float()


class _SixteenBit(torch.autograd.Function):
    """Layer norm of 16-bit tensors on a CPU, with statistics and sums in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        b = None if bias is None else bias.float()
        y, mean, rstd = sixteen_bit_forward(x, _wide_weight(weight, x), b, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _once(ctx, dy)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    n_cols, w = x.shape[-1], _wide_weight(weight, x)
    dx, dw, db = sixteen_bit_backward(
        dy.reshape(-1, n_cols), x.reshape(-1, n_cols), mean.view(-1), rstd.view(-1), w, ctx.eps,
        ctx.needs_input_grad[:3],
    )  # fmt: skip
    dx, dw, db = (None if d is None else d.to(x.dtype) for d in (dx, dw, db))
    return None if dx is None else dx.view(x.shape), dw, db, None


_once = once("layer_norm", _gradients)
_sixteen_bit: Callable[..., Tensor] = fast_apply(_SixteenBit)

__all__ = ["SMALL", "native"]

"""`weighted_sum`: its declaration and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.launch import import_later, uses_triton
from onepass.ops._shared.declare import RESULT_DTYPE, SUMMED, VECTORS, declare

from . import definition

_kernels = import_later(".kernels", __package__)


def _way(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Any:
    return _kernels() if uses_triton(x, weight) else definition


def _result(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> tuple[torch.Size, torch.dtype]:
    return x.shape[:-1] + weight.shape[:-1], out_dtype or torch.promote_types(x.dtype, weight.dtype)


_call, forward, backward, forward_op, backward_op = declare(
    "weighted_sum", {"x": SUMMED, "weight": VECTORS, "out_dtype": RESULT_DTYPE}, _way, result=_result, replay=True
)


def weighted_sum(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    r"""Add up the last dimension with weights, in one pass over ``x``.

    .. math:: y_{\dots r} = \sum_d x_{\dots d}\, w_{r d}

    Products and sums are in fp32 (fp64 if x or weight is fp64), rounded once at the end.

    Args:
        x: ``(..., D)``, fp32, fp16, bf16 or fp64, any strides.
        weight: ``(D,)``, or ``(R, D)`` with R ≤ 16 for R sums from one read of ``x``.
        out_dtype: dtype of the result; default ``torch.promote_types(x.dtype, weight.dtype)``.

    Returns:
        ``(...,)`` for a ``(D,)`` weight, ``(..., R)`` for an ``(R, D)`` weight. D = 0 gives zeros.

    Gradients flow to ``x`` and ``weight``. Backward computes only the needed ones, and repeats them bit for bit from
    run to run.

    Raises:
        TypeError: x or weight is not a floating-point tensor, or out_dtype is not a floating-point dtype.
        ValueError: shapes don't fit, R is out of range, or the tensors are on different devices.
        NotImplementedError: for a second or forward-mode derivative.

    Source: the "weighted sum" exercise of Stanford's CS336, generalised to R vectors.

    Example:
        >>> import torch, onepass
        >>> x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> onepass.weighted_sum(x, torch.tensor([1.0, 0.0, -1.0]))
        tensor([-2., -2.])
    """
    return _call(x, weight, out_dtype)  # type: ignore[no-any-return]

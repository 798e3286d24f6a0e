"""`WeightedSum`: learned vectors, one weighted sum of the last dimension per vector."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from onepass.ops._shared.arguments import MAX_VECTORS
from onepass.ops.weighted_sum.op import weighted_sum

from .count import check_int

torch.fx.wrap("weighted_sum")  # torch.fx traces the call as one node


class WeightedSum(nn.Module):
    r"""Weighted sums of the last dimension with learned weights: ``y[..., r] = Σ_d x[..., d]·weight[r, d]``.

    It equals ``nn.Linear(dim, R, bias=False)`` for R ≤ 16, limited by the speed of memory and accumulated in fp32 or
    wider whatever the dtypes; with ``num_vectors=None`` the result has no last dimension.

    Args:
        dim: width D of the last dimension of x.
        num_vectors: None for one weight ``(D,)`` and a result ``(...,)``; R (1 to 16) for a weight ``(R, D)`` and a
            result ``(..., R)`` from the same single read of x.
        out_dtype: dtype of the result; default: the promotion of those of x and the weight.
        device, dtype: of the weight.

    Weights start uniform in ±1/√dim, as those of `nn.Linear`.

    Raises:
        TypeError: dim or num_vectors is not an int.
        ValueError: dim < 1 or num_vectors out of range.

    Source: the "weighted sum" exercise of Stanford's CS336.

    Example:
        >>> import torch
        >>> from onepass.nn import WeightedSum
        >>> WeightedSum(8)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5])
        >>> WeightedSum(8, num_vectors=3)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 3])
    """

    def __init__(
        self, dim: int, num_vectors: int | None = None, *, out_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_int("WeightedSum", "dim", dim)
        if num_vectors is not None:
            check_int("WeightedSum", "num_vectors", num_vectors, 1, MAX_VECTORS)
        self.dim, self.num_vectors, self.out_dtype = dim, num_vectors, out_dtype
        shape = (dim,) if num_vectors is None else (num_vectors, dim)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew, uniform in ±1/√dim."""
        bound = 1 / math.sqrt(self.dim)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return weighted_sum(x, self.weight, out_dtype=self.out_dtype)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return f"{self.dim}, num_vectors={self.num_vectors}"

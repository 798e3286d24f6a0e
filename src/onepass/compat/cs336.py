"""CS336's "weighted sum" exercise: ``WeightedSumFunc.apply(x, weight)``."""

from __future__ import annotations

from torch import Tensor

from onepass.ops.weighted_sum.op import weighted_sum

__all__ = ["WeightedSumFunc"]


class WeightedSumFunc:
    """Compute ``y[...] = Σ_d x[..., d]·weight[d]``, differentiable in both, with the exercise's call.

    Shapes, dtypes and errors are those of `onepass.weighted_sum`; unlike there, the weight must be a vector ``(D,)``.

    Source: Stanford CS336, assignment 2.

    Example:
        >>> import torch
        >>> from onepass.compat.cs336 import WeightedSumFunc
        >>> WeightedSumFunc.apply(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1.0, 0.0, -1.0]))
        tensor([-2.])
    """

    @staticmethod
    def apply(x: Tensor, weight: Tensor) -> Tensor:
        """Return Σ_d x[..., d]·weight[d]."""
        if isinstance(weight, Tensor) and weight.dim() != 1:
            raise ValueError(f"WeightedSumFunc: weight must be a vector (D,), got {tuple(weight.shape)}")
        return weighted_sum(x, weight)

"""triton-transformer's layer norm, without the original's `Transformer` and other kernels."""

from __future__ import annotations

from torch import Tensor

from onepass.compat._absent import absent
from onepass.ops.norm.op import layer_norm

__all__ = ["layernorm"]

_INSTEAD = {"Transformer": "a transformer of your own with onepass.nn.LayerNorm(dim, stable=...)"}


def layernorm(x: Tensor, gamma: Tensor, eps: float = 1e-5, use_triton: bool = False, stable: bool = False) -> Tensor:
    """Compute layer norm over the last dimension with weight ``gamma``, no bias, differentiable in x and gamma.

    Dtypes, strides and errors are those of `onepass.layer_norm`, on CPU and CUDA. ``use_triton`` is accepted and
    ignored: the tensors decide the path. ``stable`` first divides a row by its maximum, as in CogView. Rows whose
    maximum is not positive are divided by their largest magnitude; the original flips their sign or returns NaN.

    Source: lucidrains/triton-transformer.

    Example:
        >>> import torch
        >>> from onepass.compat.triton_transformer import layernorm
        >>> layernorm(torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 2.0]), stable=True)
        tensor([[-1.0000,  1.9999]])
    """
    return layer_norm(x, gamma, eps=eps, stable=stable)


absent(__name__, __all__, _INSTEAD)

"""triton-transformer's layer norm: ``layernorm(x, gamma, eps, use_triton, stable)``.

The layer norm alone; the original's `Transformer` and its other kernels are not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from onepass.compat._absent import absent
from onepass.ops.norm.op import layer_norm

__all__ = ["layernorm"]

_INSTEAD = {"Transformer": "a transformer of your own with onepass.nn.LayerNorm(dim, stable=...)"}


def layernorm(x: Tensor, gamma: Tensor, eps: float = 1e-5, use_triton: bool = False, stable: bool = False) -> Tensor:
    """Layer norm over the last dimension with weight ``gamma`` and no bias, differentiable in x and gamma.

    Any dtypes and strides `onepass.layer_norm` takes, CPU and CUDA. ``use_triton`` is accepted and not needed: the
    path follows from the tensors. ``stable`` divides a row by its maximum first, as CogView does; rows whose maximum
    is not positive, which the original turns upside down or into NaN, are divided by their largest magnitude.

    Errors are those of `onepass.layer_norm`.

    Source: lucidrains/triton-transformer.

    Example:
        >>> import torch
        >>> from onepass.compat.triton_transformer import layernorm
        >>> layernorm(torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 2.0]), stable=True)
        tensor([[-1.0000,  1.9999]])
    """
    y: Tensor = layer_norm(x, gamma, eps=eps, stable=stable)
    return y


if not TYPE_CHECKING:  # a type checker must not take every name for one that exists

    def __getattr__(name: str) -> Any:
        raise absent(__name__, __all__, name, _INSTEAD)

"""triton-transformer's layer norm: ``layernorm(x, gamma, eps, use_triton, stable)``."""

from __future__ import annotations

from torch import Tensor

from onepass.ops.norm.op import layer_norm


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


__all__ = ["layernorm"]

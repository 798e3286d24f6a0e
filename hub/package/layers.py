"""Layers whose forward `kernels.kernelize` gives to a model's norms. They have no state: the model's norm has it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onepass.ops.norm.op import layer_norm, rms_norm


def _flat(t: Tensor, dims: int) -> Tensor:
    return t if dims == 1 else t.flatten(-dims)


def _vector(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.flatten()


class LayerNorm(nn.Module):
    """For ``torch.nn.LayerNorm``."""

    has_backward = True
    can_torch_compile = True
    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer norm of the last dimensions."""
        x = _flat(input, len(self.normalized_shape))
        return layer_norm(x, _vector(self.weight), _vector(self.bias), eps=self.eps).view(input.shape)


class RMSNorm(nn.Module):
    """For ``torch.nn.RMSNorm``."""

    has_backward = True
    can_torch_compile = True
    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    eps: float | None

    def forward(self, x: Tensor) -> Tensor:
        """Return the RMS norm of the last dimensions."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        eps = torch.finfo(wide).eps if self.eps is None else self.eps
        return rms_norm(_flat(x, len(self.normalized_shape)), _vector(self.weight), eps=eps).view(x.shape)


class LlamaRMSNorm(nn.Module):
    """For the RMS norms of Llama, Mistral, Qwen and T5 in transformers, which round twice."""

    has_backward = True
    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the RMS norm of the last dimension, with the bits of the original on a CPU."""
        return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon, rounding="twice")


class GemmaRMSNorm(nn.Module):
    """For the RMS norms of Gemma in transformers, which multiply by 1 + weight."""

    has_backward = True
    can_torch_compile = True
    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Return the RMS norm of the last dimension."""
        return rms_norm(x, self.weight, eps=self.eps, offset=1.0)


__all__ = ["GemmaRMSNorm", "LayerNorm", "LlamaRMSNorm", "RMSNorm"]

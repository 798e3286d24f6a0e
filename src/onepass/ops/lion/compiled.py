"""The update of CPU tensors in one pass over memory, by torch.compile; opt-in (`fused=True`)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .reference import sign
from .storage import narrow_, widen

# (parameter, gradient, momentum, extra, hyperparameters): vectors, updated in place
Update = Callable[[Tensor, Tensor, Tensor, "Tensor | None", Tensor], None]


@functools.cache
def one_pass(mode: int, cautious_decay: bool) -> Update:
    """Return the compiled update of one mode.

    The first call with each combination of dtypes takes seconds and needs a C++ compiler. Other lengths and
    hyperparameters reuse the compiled code.
    """

    def update_(p: Tensor, g: Tensor, m: Tensor, extra: Tensor | None, hyper: Tensor) -> None:
        """Update in place; hyper: lr, weight decay, β1, (1 − β1)·factor, β2, (1 − β2)·factor in the compute dtype."""
        lr, weight_decay, beta1, rest1, beta2, rest2 = hyper.unbind()
        value, grad, momentum = widen(p, extra, mode, hyper.dtype), g.to(hyper.dtype), m.to(hyper.dtype)
        s = sign(momentum * beta1 + grad * rest1)
        decay = value * weight_decay
        if cautious_decay:
            decay = torch.where(s * value > 0, decay, torch.zeros_like(decay))
        narrow_(p, extra, mode, value - (s + decay) * lr)
        m.copy_(momentum * beta2 + grad * rest2)

    return torch.compile(update_, dynamic=True)

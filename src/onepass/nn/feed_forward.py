"""`FeedForward`: one branch of `RoutedFeedForward`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .norm import RMSNorm


class FeedForward(nn.Module):
    """``down(gelu(up(norm(x))))``: one branch of `RoutedFeedForward`, with a norm of its own."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, device=device, dtype=dtype)
        self.up = nn.Linear(dim, hidden, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]

    def layers(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The norm and the two linear layers."""
        # not as attributes: a module looks for those in three places, which adds up where calls are short
        own = self._modules
        return own["norm"], own["up"], own["down"]  # type: ignore[return-value]

    def weights(self) -> tuple[Tensor | None, ...]:
        """Of the two linear layers: weight and bias, weight and bias."""
        _, up, down = self.layers()
        first, second = up._parameters, down._parameters
        return first["weight"], first["bias"], second["weight"], second["bias"]

    def is_plain(self) -> bool:
        """Whether a call runs what stands in `forward` and nothing else."""
        layers = self.layers()
        return type(self) is FeedForward and [type(m) for m in layers] == _KINDS and untouched(self, *layers)


_KINDS = [RMSNorm, nn.Linear, nn.Linear]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def untouched(*modules: nn.Module) -> bool:
    """Whether no hook, global ones included, and no forward set on an instance takes part in calling these modules."""
    if torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    for m in modules:
        state = m.__dict__
        if "forward" in state:
            return False
        for hooks in _HOOKS:
            if state[hooks]:
                return False
    return True

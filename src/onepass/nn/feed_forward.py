"""`FeedForward`: one branch of `RoutedFeedForward`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from onepass.ops.routing.op_feed_forward import Weights

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

    def weights(self) -> Weights:
        """Of the two linear layers."""
        up, down = self.up, self.down
        return Weights(up.weight, up.bias, down.weight, down.bias)

    def norm_eps(self, x: Tensor) -> float:
        """The ε of the norm for an x of this dtype."""
        eps: float | None = self.norm.eps
        return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps if eps is None else eps

    def is_plain(self) -> bool:
        """Whether a call runs what stands in `forward` and nothing else."""
        norm, up, down = self.norm, self.up, self.down
        kinds = type(self) is FeedForward and type(norm) is RMSNorm and type(up) is type(down) is nn.Linear
        return kinds and untouched(self, norm, up, down)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def untouched(*modules: nn.Module) -> bool:
    """Whether no hook, global ones included, and no forward set on an instance takes part in calling these modules."""
    if torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    for m in modules:
        state = m.__dict__
        if "forward" in state or any(state[hooks] for hooks in _HOOKS):
            return False
    return True

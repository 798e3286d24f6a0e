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
        """The norm's weight; of the two linear layers weight and bias, weight and bias."""
        norm, up, down = (m._parameters for m in self.layers())
        return norm["weight"], up["weight"], up["bias"], down["weight"], down["bias"]

    def is_plain(self) -> bool:
        """Whether a call runs what stands in `forward` and nothing else."""
        layers = self.layers()
        return type(self) is FeedForward and [type(m) for m in layers] == _KINDS and has_no_overrides(self, *layers)


_KINDS = [RMSNorm, nn.Linear, nn.Linear]


def has_no_overrides(*modules: nn.Module) -> bool:
    """Whether calling these modules is no more than what their classes say, with parameters of their own.

    No hook, global ones included, no forward set on an instance, no other tensor in a parameter's place: a hypernetwork
    puts a result there, a wrapper that shards or replicates a module a view, who freezes a weight a buffer.
    """
    if torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    for m in modules:
        own = m.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return False
        if "forward" in own or "weight" in own or "bias" in own or "null" in own or own["_buffers"]:
            return False
    return True

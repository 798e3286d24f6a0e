"""`FeedForward`: one branch of `RoutedFeedForward`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from onepass.core.eager import plain, takes_operators

from .count import check_dtype
from .norm import RMSNorm


class FeedForward(nn.Module):
    """``down(gelu(up(norm(x))))``: one branch of `RoutedFeedForward`, with a norm of its own.

    With a residual it takes ``x + residual`` for x, and returns that sum as well.
    """

    def __init__(
        self, dim: int, hidden: int, *, bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm = RMSNorm(dim, device=device, dtype=dtype)
        self.up = nn.Linear(dim, hidden, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        check_dtype("FeedForward", x, self.up)
        normed, *total = (self.norm(x),) if residual is None else self.norm(x, residual)
        y = self.down(F.gelu(self.up(normed)))
        return (y, *total) if total else y  # type: ignore[return-value]

    def layers(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """Return the norm and the two linear layers."""
        # read `_modules`: an attribute of a module is searched in three dictionaries, which adds up in short calls
        own = self._modules
        return own["norm"], own["up"], own["down"]  # type: ignore[return-value]

    def weights(self) -> tuple[Tensor | None, ...]:
        """Return the norm's weight, then weight and bias of the first linear layer, then those of the second."""
        norm, up, down = (m._parameters for m in self.layers())
        return norm["weight"], up["weight"], up["bias"], down["weight"], down["bias"]

    def is_plain(self) -> bool:
        """Return whether a call runs `forward` as written here and nothing else."""
        layers = self.layers()
        if type(self) is not FeedForward or [type(m) for m in layers] != _KINDS:
            return False
        # the fused node multiplies by the norm's weight alone
        return not layers[0].offset and layers[0].rounding == "once" and has_no_overrides(self, *layers)


_KINDS = [RMSNorm, nn.Linear, nn.Linear]


def has_no_overrides(*modules: nn.Module) -> bool:
    """Return whether a call of these modules runs only what their classes define, on their own parameters.

    False for any hook, global ones included; for a forward set on an instance; and for another tensor in place of a
    parameter, such as a hypernetwork's output, the view of a wrapper that shards or replicates, or a buffer.
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


def branch_dtype(
    x: Tensor, mask: Tensor | None, weights: Sequence[Tensor], multiplied: Sequence[Tensor]
) -> torch.dtype | None:
    """Return the dtype of the branches of a fused layer; None where its modules have to compute.

    That is where something intercepts the call, or where weights are on another device or, without autocast, of another
    dtype than x.
    """
    if not (plain(x, mask, *weights) or takes_operators(x, mask, *weights)):
        return None
    # kernels don't check devices; the modules raise the error
    if {w.device for w in weights} != {x.device}:
        return None
    dtypes = {w.dtype for w in multiplied}
    if torch.is_autocast_enabled(x.device.type):
        return None if torch.float64 in (x.dtype, *dtypes) else torch.get_autocast_dtype(x.device.type)
    return x.dtype if dtypes == {x.dtype} else None

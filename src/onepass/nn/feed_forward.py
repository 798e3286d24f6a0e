"""`FeedForward`: one branch of `RoutedFeedForward`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .calls import as_written
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

    def is_plain(self) -> bool:
        """Return whether a call runs `forward` as written here and nothing else."""
        return as_written([self, *self._modules.values()], _KINDS)  # type: ignore[list-item]


_KINDS = [FeedForward, RMSNorm, nn.Linear, nn.Linear]

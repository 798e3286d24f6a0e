"""Define the Lion update, and how a bf16 weight and an int16 remainder form an fp32 value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Number = float | Tensor


def sign(u: Tensor) -> Tensor:
    """Return −1, 0 or 1, and nan for nan: torch.sign returns 0 there, and the weight would not show the nan."""
    # u == u instead of isnan: torch.compile for a CPU vectorises the comparison but not isnan
    return torch.where(u == u, u.sign(), u)


def reference(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    *,
    lr: Number,
    weight_decay: Number = 0.0,
    betas: tuple[float, float] = (0.9, 0.99),
    cautious: float | None = None,
    cautious_weight_decay: bool = False,
    mean: Callable[[Tensor], Tensor] = torch.mean,
) -> tuple[Tensor, Tensor]:
    """Return (new parameter, new momentum) after one step, out of place, in the dtype of the inputs (fp32 or fp64).

    u = β1·m + (1 − β1)·g; p ← p − lr·(sign(u) + wd·p); m ← β2·m + (1 − β2)·g.

    The decay is inside the bracket because 1 − lr·wd in fp32 is off by 19 % at lr·wd = 1e-7. The momentum avoids lerp,
    m + (1 − β)·(g − m), which turns an infinite gradient into nan.

    Args:
        p: parameter.
        g: gradient.
        m: momentum.
        lr: learning rate, a number or a tensor.
        weight_decay: a number or a tensor.
        betas: β1, β2.
        cautious: factor for updates whose sign disagrees with the gradient; the update is then divided by the mean
            factor (arXiv 2411.16085). None for plain Lion.
        cautious_weight_decay: decay only weights that the update moves towards zero (arXiv 2510.12402).
        mean: of the factors of `cautious`; for a shard, that over all shards.
    """
    beta1, beta2 = betas
    s = sign(m * beta1 + g * (1 - beta1))
    if cautious is not None:
        keep = torch.where(s * g > 0, 1.0, cautious).to(s.dtype)
        s = s * (keep / mean(keep).clamp(min=1e-5))
    decay = p * weight_decay
    if cautious_weight_decay:
        decay = torch.where(s * p > 0, decay, torch.zeros_like(decay))
    return p - (s + decay) * lr, m * beta2 + g * (1 - beta2)


def join(p: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 value with bits p·2^16 + remainder, from bf16 p and an int16 remainder."""
    return ((p.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bf16 rounded half up, int16 remainder) of fp32 x; `join` restores x bit for bit.

    Rounding half up, instead of to even, makes every remainder fit in 16 bits. Every nan becomes 0x7FC00000, whose
    upper half is a nan too.
    """
    bits = torch.where(x == x, x.view(torch.int32), torch.tensor(0x7FC00000, dtype=torch.int32, device=x.device))
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)

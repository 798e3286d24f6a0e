"""The definition of the Lion update, and how a bf16 weight and an int16 remainder spell an fp32 value."""

from __future__ import annotations

import torch
from torch import Tensor

Number = float | Tensor


def sign(u: Tensor) -> Tensor:
    """−1, 0 or 1, and nan where u is nan (torch.sign gives 0 there, which would hide it from the weight)."""
    # isnan would do; compiled for a CPU it is done one number at a time, a comparison is not
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
) -> tuple[Tensor, Tensor]:
    """One step: (new parameter, new momentum), out of place, in the dtype of its inputs (fp32 or fp64).

    u = β1·m + (1 − β1)·g; p ← p − lr·(sign(u) + wd·p); m ← β2·m + (1 − β2)·g.

    The decay is inside the bracket because 1 − lr·wd in fp32 is off by 19 % at lr·wd = 1e-7. The momentum is no
    lerp because m + (1 − β)·(g − m) turns an infinite gradient into nan.

    Args:
        p: parameter.
        g: gradient.
        m: momentum.
        lr: learning rate, a number or a tensor.
        weight_decay: a number or a tensor.
        betas: β1, β2.
        cautious: factor for updates that disagree with the gradient, after which the whole is rescaled by the mean
            factor (arXiv 2411.16085); None for plain Lion.
        cautious_weight_decay: decay only weights that the update moves towards zero (arXiv 2510.12402).
    """
    beta1, beta2 = betas
    s = sign(m * beta1 + g * (1 - beta1))
    if cautious is not None:
        keep = torch.where(s * g > 0, 1.0, cautious).to(s.dtype)
        s = s * (keep / keep.mean().clamp(min=1e-5))
    decay = p * weight_decay
    if cautious_weight_decay:
        decay = torch.where(s * p > 0, decay, torch.zeros_like(decay))
    return p - (s + decay) * lr, m * beta2 + g * (1 - beta2)


def join(p: Tensor, remainder: Tensor) -> Tensor:
    """(bf16, int16) → the fp32 value with bits p·2^16 + remainder."""
    return ((p.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 → (bf16 rounded half up, int16 remainder); `join` gives x back bit for bit.

    Half up, and not to even, because only then does every remainder fit in 16 bits. A nan becomes the one whose upper
    half is a nan too.
    """
    bits = torch.where(x == x, x.view(torch.int32), torch.tensor(0x7FC00000, dtype=torch.int32, device=x.device))
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)

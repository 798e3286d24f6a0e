"""Define `qk_norm_rope` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.ops.norm.reference import rms_norm


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return q and k (..., T, heads, D), each head normed by its root mean square, its first columns rotated.

    Column i of 2·cos.shape[-1] columns is rotated with i + half of them, or, if interleaved, 2i with 2i + 1.
    """

    def one(x: Tensor, weight: Tensor | None) -> Tensor:
        n = rms_norm(x.to(torch.promote_types(x.dtype, torch.float32)), weight, eps=eps, offset=offset)
        rotated, rest = n[..., : 2 * half], n[..., 2 * half :]
        a, b = rotated.reshape(*x.shape[:-1], *pairs).unbind(-1 if interleaved else -2)
        c, s = (t.detach().to(n.dtype)[at][..., None, :] for t in (cos, sin))
        turned = torch.stack((a * c - b * s, b * c + a * s), -1 if interleaved else -2)
        return torch.cat((turned.reshape(rotated.shape), rest), -1).to(x.dtype)

    half = cos.shape[-1]
    pairs = (half, 2) if interleaved else (2, half)
    at = torch.arange(q.shape[-3], device=q.device) if positions is None else positions
    return one(q, q_weight), one(k, k_weight)

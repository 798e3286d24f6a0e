"""The functions of colt5-attention, on top of onepass: `coor_descent`, `triton_coor_descent` and `topk`.

The modules (``Conditional…`` and the router) are in `contrib/colt5` of the repository, outside the package.
docs/moving.md lists where results differ, because the original is faulty or limited.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onepass.compat._absent import absent
from onepass.ops._shared import arguments
from onepass.ops.coor_descent.op import coor_descent as _coor_descent
from onepass.ops.topk import op as _op

__all__ = ["TopkReturn", "coor_descent", "topk", "triton_coor_descent"]

_MODULES = (
    "ConditionalRoutedAttention", "ConditionalRoutedAutoregressiveAttention", "ConditionalRoutedCrossAttention",
    "ConditionalRoutedFeedForward", "ConditionalRoutedImageAttention", "ConditionalRoutedTransformerBlock",
    "ConditionalRoutedViT", "CoordinateDescentRouter", "RouterReturn",
)  # fmt: skip
_INSTEAD = {name: f"`from contrib.colt5 import {name}` in a checkout of onepass" for name in _MODULES}


class TopkReturn(NamedTuple):
    """The result of :func:`topk`, each ``(..., k)``; the last two are None with ``non_differentiable``."""

    values: Tensor
    indices: Tensor
    coor_descent_values: Tensor | None
    gates: Tensor | None


def coor_descent(
    s: Tensor, *, n_iters: int, k: Tensor | float, eps: float = 1e-1, eps_init: float | None = None,
    eps_decay: float = 1.0, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run T steps of coordinate descent, as ``colt5_attention.coor_descent``; see :func:`onepass.coor_descent`.

    Example:
        >>> import torch
        >>> from onepass.compat.colt5_attention import coor_descent
        >>> y = coor_descent(torch.tensor([3.0, 1.0, 2.0, -1.0]), n_iters=20, k=2, eps=0.5)
        >>> [round(v, 3) for v in y.tolist()]
        [1.0, 0.12, 0.89, 0.002]
    """
    return _coor_descent(s, n_iters=n_iters, k=k, eps=eps, eps_init=eps_init, eps_decay=eps_decay, mask=mask)


def triton_coor_descent(
    s: Tensor, *, n_iters: int, k: Tensor | float, eps: float = 1e-1, eps_init: float | None = None,
    eps_decay: float = 1.0, mask: Tensor | None = None, checkpoint_segments: int = 1,
) -> Tensor:  # fmt: skip
    """Run T steps of coordinate descent, as ``colt5_attention.triton_coor_descent``.

    ``checkpoint_segments`` is accepted and ignored: backward repeats no step. See :func:`onepass.coor_descent`.
    """
    return coor_descent(s, n_iters=n_iters, k=k, eps=eps, eps_init=eps_init, eps_decay=eps_decay, mask=mask)


def topk(
    x: Tensor, k: int, coor_descent_k_ratio: float = 9 / 8, n_iters: int = 20, eps: float = 1e-1,
    eps_init: float | None = None, eps_decay: float = 1.0, mask: Tensor | None = None, fused: bool = False,
    non_differentiable: bool = False,
) -> TopkReturn:  # fmt: skip
    """Select the k largest scores with straight-through gates, as ``colt5_attention.topk``.

    Values are the selected scores in descending order. Gates are 1, with the gradient of T steps of coordinate descent
    towards a sum of ``k · coor_descent_k_ratio``, at most n. Rows with fewer than k valid entries are padded with value
    -inf, index -1, gate 0. ``fused`` is accepted and ignored: onepass picks the path itself.

    Example:
        >>> import torch
        >>> from onepass.compat.colt5_attention import topk
        >>> top = topk(torch.tensor([3.0, -1.0, 2.0, 1.0]), k=2, mask=torch.tensor([False, True, True, True]))
        >>> top.values.tolist(), top.indices.tolist(), top.gates.tolist()
        ([2.0, 1.0], [2, 3], [1.0, 1.0])
    """
    arguments.number("topk", "coor_descent_k_ratio", coor_descent_k_ratio)
    if coor_descent_k_ratio < 1:
        raise ValueError(f"topk: coor_descent_k_ratio must be ≥ 1, got {coor_descent_k_ratio}")
    arguments.whole("topk", "k", k, 1)
    arguments.rows("topk", "x", x)
    values, indices, _ = _op.topk(x, k, mask=mask, pad=True)
    if non_differentiable:
        return TopkReturn(values, indices, None, None)
    if x.shape[-1] == 0:
        return TopkReturn(values, indices, torch.zeros_like(values), torch.zeros_like(values))
    soft = coor_descent(
        x, n_iters=n_iters, k=min(k * coor_descent_k_ratio, x.shape[-1]), eps=eps, eps_init=eps_init,
        eps_decay=eps_decay, mask=mask,
    )  # fmt: skip
    chosen = torch.where(indices >= 0, soft.gather(-1, indices.clamp(min=0)), 0.0)
    return TopkReturn(values, indices, chosen, _op.gates(soft, indices))


absent(__name__, __all__, _INSTEAD)

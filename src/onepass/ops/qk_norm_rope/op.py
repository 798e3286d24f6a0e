"""`qk_norm_rope`: argument checks, registration with the dispatcher, autograd, public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import visible
from onepass.core.launch import import_later, uses_triton
from onepass.core.operator import operator
from onepass.core.sharding import REPLICATE, Way, beside, row_dims

from . import definition


def ways(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, positions: Any, *rest: Any) -> list[Way]:
    """List the ways to shard q, k, the weights, cos, sin and positions, with q and k rotated.

    Tokens may be sharded if each has a position of its own.
    """
    whole, heads = (REPLICATE,) * 4, q.ndim - 2
    dims = [d for d in row_dims(q) if d != heads - 1 or positions is not None]
    return [((d, d), (d, d, *whole, REPLICATE if d == heads else beside(positions, heads, d))) for d in dims]


_kernels = import_later(".kernels", __package__)
OP = "qk_norm_rope"
# widest head of the kernels
MAX_HEAD = 1024


def _check(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None, eps: float, offset: float, interleaved: bool,
) -> None:  # fmt: skip
    for name, t in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check.floating(OP, name, t)
        check.same_device(OP, name, t, "q", q)
    if q.dim() < 3:
        raise ValueError(f"{OP}: q must be (..., tokens, heads, D), got {tuple(q.shape)}")
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{OP}: k must have the shape of q {tuple(q.shape)} but for its heads; got {tuple(k.shape)}")
    d, tokens = q.shape[-1], q.shape[-3]
    if d > MAX_HEAD:
        raise ValueError(f"{OP}: heads may have {MAX_HEAD} columns, got {d}; norm them by rms_norm, then rotate them")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check.floating(OP, name, weight)
            if weight.shape != (d,):
                raise ValueError(f"{OP}: {name} must be ({d},), the width of a head; got {tuple(weight.shape)}")
            check.same_device(OP, name, weight, "q", q)
    if cos.dim() != 2 or sin.shape != cos.shape or not 1 <= cos.shape[1] <= d // 2:
        raise ValueError(
            f"{OP}: cos and sin must be (positions, R / 2), with R ≤ {d} rotated columns of a head; "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if positions is None:
        if cos.shape[0] < tokens:
            raise ValueError(f"{OP}: cos and sin have {cos.shape[0]} positions, q has {tokens} tokens")
    else:
        check.tensor(OP, "positions", positions)
        if positions.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{OP}: positions must be int32 or int64, got {positions.dtype}")
        token_shape = q.shape[:-2]
        if positions.shape not in (token_shape[-1:], token_shape):
            accepted = f"{tuple(token_shape[-1:])} or {tuple(token_shape)}"
            raise ValueError(f"{OP}: positions must be {accepted}; got {tuple(positions.shape)}")
        check.same_device(OP, "positions", positions, "q", q)
        # on a GPU the host would wait for the values: a position outside of the tables gives NaN there
        if positions.numel() and visible(positions):
            low, high = (int(v) for v in torch.aminmax(positions))
            if low < 0 or high >= len(cos):
                raise ValueError(f"{OP}: positions must be from 0 to {len(cos) - 1}; got {low} to {high}")
    check.not_negative(OP, "eps", eps)


def _forward(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None, eps: float, offset: float, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    way = _way(q, k, q_weight, k_weight, cos, sin)
    return way.forward(q, k, q_weight, k_weight, cos, sin, positions, eps, offset, interleaved)  # type: ignore[no-any-return]


def _way(q: Tensor, k: Tensor, *others: Tensor | None) -> Any:
    """Return the module that computes: kernels, or the definition where they don't run or have nothing to do."""
    return _kernels() if uses_triton(q, k, *others) and (q.numel() or k.numel()) else definition


def _backward(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
    sin: Tensor, positions: Tensor | None, eps: float, offset: float, interleaved: bool, need_q: bool, need_k: bool,
    need_q_weight: bool, need_k_weight: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k and both weights; None for those that are not needed."""
    needs, options = (need_q, need_k, need_q_weight, need_k_weight), (eps, offset, interleaved)
    way = _way(q, k, q_weight, k_weight, cos, sin, dq, dk)
    return way.backward(dq, dk, q, k, q_weight, k_weight, cos, sin, positions, *options, needs)  # type: ignore[no-any-return]


_call, forward_op, backward_op = operator(
    OP, _forward, _backward, ("new_q", "new_k"), ways=ways, check=_check, n_public=2, replay=True,
    fake=lambda q, k, *rest: (q.new_empty(q.shape), k.new_empty(k.shape)),
)  # fmt: skip


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None, *, cos: Tensor, sin: Tensor,
    positions: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Normalise each head of queries and keys by its root mean square and rotate it, in one pass over both.

    With n the normed head, :math:`n = (w + \mathrm{offset})\,x/\sqrt{\mathrm{mean}(x^2) + \varepsilon}`, a pair of its
    columns (a, b) becomes

    .. math:: (a \cos\theta - b \sin\theta,\ b \cos\theta + a \sin\theta).

    The first R columns are rotated, where R is twice the width of ``cos``: column i with i + R/2, or with
    ``interleaved`` column 2i with 2i + 1. All is computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        q: ``(..., T, heads, D)``, D ≤ 1024, fp32, fp16, bf16 or fp64, any strides: packed projections are not copied.
        k: ``(..., T, key heads, D)``, likewise.
        q_weight: ``(D,)`` or None, of any of these dtypes.
        k_weight: likewise.
        cos: ``(P, R / 2)``: of the angles at positions 0 to P − 1; no gradient flows to it.
        sin: likewise.
        positions: ``(T,)`` or ``(..., T)`` in int32 or int64: the position of each token. None: 0 to T − 1.
        eps: added to the mean of squares; ≥ 0.
        offset: added to the weights (1.0 for a model that stores weight − 1).
        interleaved: how columns are paired.

    Returns:
        q and k, normed and rotated, contiguous, in their own dtypes.

    Gradients flow to q, k and the weights; backward repeats them bit for bit and keeps q and k alone.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: shapes don't fit, a position is outside of the table (on a GPU such a token becomes NaN), eps is
            negative, or the tensors are on different devices.
        NotImplementedError: for forward-mode and second derivatives.

    Source: Henry et al. 2020, arXiv:2010.04245; Su et al. 2021, arXiv:2104.09864.

    Example:
        >>> import torch, onepass
        >>> angles = torch.arange(8.0)[:, None] * 10000.0 ** -torch.linspace(0, 1, 5)[:-1]
        >>> qkv = torch.randn(2, 8, 6, 8)  # 2 heads of queries, 2 of keys, 2 of values
        >>> q, k, v = qkv.split(2, dim=-2)
        >>> q, k = onepass.qk_norm_rope(q, k, torch.ones(8), torch.ones(8), cos=angles.cos(), sin=angles.sin())
        >>> q.shape
        torch.Size([2, 8, 2, 8])
    """
    offset = check.number(OP, "offset", offset)
    return _call(q, k, q_weight, k_weight, cos, sin, positions, eps, offset, interleaved)  # type: ignore[no-any-return]

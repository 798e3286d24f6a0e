"""Launch the kernels of qk_norm_rope."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.core.launch import cdiv, device_guard, even_rows, launch, sm_count
from onepass.ops._shared.kernels_partials import add_vector_partials

from . import shapes
from .kernels_triton import rope_backward_kernel, rope_forward_kernel


def _heads(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return x as (batch, tokens, heads, D) whose rows are aligned as a contiguous tensor's, and its strides in VEC."""
    x = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    x = even_rows(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous(), 8)
    vec = math.gcd(8, x.shape[-1])
    a, b, c = (s if size > 1 else 0 for s, size in zip(x.stride()[:3], x.shape[:3], strict=True))
    return x, (a // vec, b // vec, c // vec)


def _tables(q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
    """Return cos, sin and positions (batch, tokens) as the kernels read them; number of positions and strides."""
    cos, sin = (even_rows(t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous(), 8) for t in (cos, sin))
    vec = math.gcd(8, cos.shape[-1])
    strides = [0, 0]
    if positions is not None:
        positions = positions.expand(q.shape[:-2]).reshape(math.prod(q.shape[:-3]), q.shape[-3])
        strides = list(positions.stride())
    return [cos, sin, positions], [cos.shape[0], cos.stride(0) // vec, sin.stride(0) // vec, *strides]


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Return rows of q and k, their heads, tokens."""
    return q.numel() // q.shape[-1], k.numel() // k.shape[-1], q.shape[-2], k.shape[-2], q.shape[-3]


def forward(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None, eps: float, offset: float, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return q and k, normed and rotated, contiguous."""
    new_q, new_k = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    heads = shapes.heads(q.shape[-1], 2 * cos.shape[-1], interleaved, shapes.FORWARD_TILE)
    tables, places = _tables(q, cos, sin, positions)
    sizes = _sizes(q, k)
    tiles = [cdiv(rows, heads.rows) for rows in sizes[:2]]
    (q, q_strides), (k, k_strides) = _heads(q), _heads(k)
    with device_guard(q):
        launch(
            rope_forward_kernel, (sum(tiles), 1, 1), (q, k, q_weight, k_weight, *tables, new_q, new_k),
            (*sizes, *q_strides, *k_strides, *places, tiles[0], float(eps), float(offset)), heads,
            num_warps=shapes.WARPS,
        )  # fmt: skip
    return new_q, new_k


def backward(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
    sin: Tensor, positions: Tensor | None, eps: float, offset: float, interleaved: bool,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k and both weights, contiguous and in their dtypes; None for those not needed."""
    dq_in, dk_in, dq_weight, dk_weight = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if need and t is not None else None
        for t, need in zip((q, k, q_weight, k_weight), needs, strict=True)
    )
    itemsize = max(q.element_size(), dq.element_size())
    heads = shapes.heads(q.shape[-1], 2 * cos.shape[-1], interleaved, shapes.BACKWARD_BYTES // itemsize)
    tables, places = _tables(q, cos, sin, positions)
    sizes = _sizes(q, k)
    programs = min(shapes.backward_per_sm(heads) * sm_count(q), cdiv(max(sizes[:2]), heads.rows))
    rows = [_heads(t) for t in (dq, dk, q, k)]
    strides = [s for _, of_one in rows for s in of_one]
    n_weights = needs[2] + needs[3]
    q_partials = k_partials = None
    if n_weights:
        partials = torch.empty((n_weights, programs, q.shape[-1]), dtype=torch.float32, device=q.device)
        q_partials, k_partials = partials[0] if needs[2] else None, partials[-1] if needs[3] else None
    with device_guard(q):
        launch(
            rope_backward_kernel, (programs, 1, 1),
            (*(t for t, _ in rows), q_weight, k_weight, *tables, dq_in, dk_in, q_partials, k_partials),
            (*sizes, *strides, *places, float(eps), float(offset)), (*heads, shapes.BACKWARD_STAGES),
            num_warps=shapes.WARPS,
        )  # fmt: skip
        if n_weights:
            add_vector_partials(partials, dq_weight, dk_weight, programs, 1)
    return dq_in, dk_in, dq_weight, dk_weight

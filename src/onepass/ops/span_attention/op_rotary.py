"""`rotary`, and `rotary_attention`: attention from one packed projection, whose gradient is one tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.bind import bind
from onepass.core.launch import uses_triton
from onepass.core.register import register, register_fake

from . import op, sharding, torch_rotary

BASE = 10_000.0


def apply_rotary(x: Tensor, positions: Tensor | None, base: float, inverse: bool, out: Tensor) -> None:
    """Rotate x and write the result to out, which may be x."""
    if not uses_triton(x):
        out.copy_(torch_rotary.rotate(x, positions, base, inverse))
    elif x.numel():
        from . import kernels_rotary

        x = x if x.stride(-1) == 1 else x.contiguous()
        kernels_rotary.rotate(x, None if positions is None else positions.contiguous(), base, inverse, out)


def _rotary(x: Tensor, positions: Tensor | None, base: float, inverse: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    apply_rotary(x, positions, base, inverse, out)
    return out


rotary_op = register("rotary", _rotary, sharding.rotary)
rotary_backward_op = register("rotary_backward", _rotary, sharding.rotary)


@register_fake(rotary_op)
@register_fake(rotary_backward_op)
def _(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save_rotary(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.options = inputs[2:]


def _rotary_gradients(ctx: Any, run: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    base, inverse = ctx.options
    return run(dy, ctx.saved_tensors[0], base, not inverse), None, None, None


_call_rotary = bind(
    name="rotary",
    forward=_rotary, forward_op=rotary_op, backward=_rotary, backward_op=rotary_backward_op,
    save=_save_rotary, gradients=_rotary_gradients,
)  # fmt: skip


def _check(name: str, x: Tensor, positions: Tensor | None, base: float) -> None:
    if x.shape[-1] % 2:
        raise ValueError(f"{name}: the width of a head must be even, got {x.shape[-1]}")
    if not 0 < base < math.inf:
        raise ValueError(f"{name}: base must be a finite number > 0, got {base}")
    if positions is None:
        return
    check.tensor(name, "positions", positions)
    if positions.dtype != torch.int64:
        raise TypeError(f"{name}: positions must be int64, got {positions.dtype}")
    if positions.shape not in ((x.shape[1],), x.shape[:2]):
        raise ValueError(
            f"{name}: positions must be (n,) = {(x.shape[1],)} or (batch, n) = {tuple(x.shape[:2])}, "
            f"got {tuple(positions.shape)}"
        )
    check.same_device(name, "positions", positions, "x", x)


def rotary(x: Tensor, positions: Tensor | None = None, *, base: float = BASE) -> Tensor:
    r"""Rotate pairs of channels by an angle proportional to the token's position.

    .. math:: (x_c, x_{c+w/2}) \mapsto (x_c \cos\theta - x_{c+w/2}\sin\theta,\; x_c\sin\theta + x_{c+w/2}\cos\theta),
              \qquad \theta = p\cdot\mathrm{base}^{-2c/w}

    The product of a turned query and a turned key depends on the distance of their positions alone. Angles are fp64
    until less than a turn is left, then fp32: right to a few of its last bits at positions up to 1e9, and off by about
    2⁻⁵² of the position beyond. Products are in fp32 or wider.

    Args:
        x: ``(batch, n, heads, width)``, width even, fp32, fp16, bf16 or fp64, any strides.
        positions: p, ``(n,)`` or ``(batch, n)`` int64; default 0 … n−1.
        base: the slowest pair turns once in about 2π·base positions.

    Returns:
        The same shape and dtype, contiguous.

    Raises:
        TypeError: x is not a floating-point tensor, or positions is not int64.
        ValueError: shapes don't fit, base is not > 0, or the tensors are on different devices.
        NotImplementedError: for second and forward-mode derivatives.

    Source: Su et al., RoFormer (arXiv:2104.09864).

    Example:
        >>> import torch
        >>> from onepass.ops.span_attention.op_rotary import rotary
        >>> q, k = torch.randn(2, 1, 1, 1, 8)
        >>> def product(i, j):
        ...     return (rotary(q, torch.tensor([i])) * rotary(k, torch.tensor([j]))).sum()
        >>> torch.allclose(product(7, 3), product(104, 100), atol=1e-5)  # distance alone counts
        True
    """
    check.floating("rotary", "x", x)
    if x.dim() != 4:
        raise ValueError(f"rotary: x must be (batch, n, heads, width), got {tuple(x.shape)}")
    _check("rotary", x, positions, base)
    positions = positions[None] if positions is not None and positions.dim() == 1 else positions
    return _call_rotary(x, positions, float(base), False)  # type: ignore[no-any-return]


def split(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys as heads side by side, (batch, n, 2·heads, width), and values, without a copy."""
    batch, n, _, heads, width = qkv.shape
    flat = qkv.view(batch, n, 3 * heads, width)
    return flat[:, :, : 2 * heads], flat[:, :, 2 * heads :]


def packed_forward(
    qkv: Tensor, first: Tensor, last: Tensor, mask: Tensor | None, base: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, denominators, rotated queries and keys: `rotary_attention` without checks and autograd."""
    qkv = qkv.contiguous()
    qk, v = split(qkv)
    turned = _rotary(qk, None, base, False)
    q, k = turned.chunk(2, dim=2)
    out, lse = op.forward(q, k, v, first, last, mask, scale)
    return out, lse, turned


def packed_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, turned: Tensor, first: Tensor, last: Tensor,
    mask: Tensor | None, base: float, scale: float, edges: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of qkv as one tensor; `edges` as `op.backward` takes them."""
    _, v = split(qkv.contiguous())
    q, k = turned.chunk(2, dim=2)
    grad = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    dqk, dv = split(grad)
    dq, dk = dqk.chunk(2, dim=2)
    op.backward(dout, q, k, v, out, lse, first, last, mask, scale, (dq, dk, dv), edges)
    apply_rotary(dqk, None, base, True, dqk)
    return grad


forward_op = register("rotary_attention", packed_forward, sharding.packed_forward)
backward_op = register("rotary_attention_backward", packed_backward, sharding.packed_backward)


@register_fake(forward_op)
def _(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, _, heads, width = qkv.shape
    out = torch.empty((batch, n, heads, width), dtype=qkv.dtype, device=qkv.device)
    acc = torch.promote_types(qkv.dtype, torch.float32)
    lse = torch.empty((batch, heads, n), dtype=acc, device=qkv.device)
    return out, lse, torch.empty((batch, n, 2 * heads, width), dtype=qkv.dtype, device=qkv.device)


@register_fake(backward_op)
def _(dout: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    return torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, first, last, mask, *ctx.options = inputs
    ctx.save_for_backward(qkv, *output, first, last, mask)


def _gradients(ctx: Any, run: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (run(dout, *ctx.saved_tensors, *ctx.options), None, None, None, None, None)


_call = bind(
    name="rotary_attention",
    forward=packed_forward, forward_op=forward_op, backward=packed_backward, backward_op=backward_op,
    save=_save, gradients=_gradients,
)  # fmt: skip


def rotary_attention(
    qkv: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    mask: Tensor | None = None,
    base: float = BASE,
    scale: float | None = None,
) -> Tensor:
    """`span_attention` of ``rotary(q)``, ``rotary(k)`` and v, from one packed projection.

    The packed form saves three copies: queries and keys are rotated in one pass, and the gradient of the projection is
    written as one tensor instead of being concatenated from three.

    Args:
        qkv: ``(batch, n, 3, heads, width)``: q, k and v from one linear layer, width even.
        first: the first key of each query's run, see `span_attention`.
        last: one past its last key.
        mask: ``(batch, n)`` bool, True at tokens that may be seen. A masked token still has a query, which must be
            finite; see the README.
        base: see `rotary`; positions are 0 … n−1.
        scale: of the scores; default 1/√width.

    Returns:
        ``(batch, n, heads, width)``, contiguous.

    Raises:
        TypeError: as `span_attention`.
        ValueError: qkv is not packed as above, its width is odd, base is not > 0, or as `span_attention`.
        NotImplementedError: for second and forward-mode derivatives.

    Example:
        >>> import torch
        >>> from onepass.ops.span_attention.op_rotary import rotary_attention
        >>> i = torch.arange(10)
        >>> rotary_attention(torch.randn(2, 10, 3, 4, 8), i - 3, i + 1).shape
        torch.Size([2, 10, 4, 8])
    """
    check.floating("rotary_attention", "qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"rotary_attention: qkv must be (batch, n, 3, heads, width), got {tuple(qkv.shape)}")
    _check("rotary_attention", qkv, None, base)
    first, last = op.checked_spans("rotary_attention", qkv, qkv, first, last, mask)
    scale = op.checked_scale("rotary_attention", scale, qkv.shape[-1])
    return _call(qkv, first, last, mask, float(base), scale)  # type: ignore[no-any-return]

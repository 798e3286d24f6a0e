"""`span_attention`, `rotary` and both at once: their operators and the public functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.launch import import_later, uses_triton
from onepass.core.operator import operator
from onepass.core.sharding import REPLICATE, Way, beside
from onepass.ops._shared import arguments
from onepass.ops.routing.op import as_bytes

from . import definition

_INTS = torch.int32, torch.int64
_kernels = import_later(".kernels", __package__)
_kernels_rotary = import_later(".kernels_rotary", __package__)


def _places(op: str, name: str, t: Tensor, dtypes: tuple[torch.dtype, ...], of: str, like: Tensor) -> Tensor:
    """Check places in a sequence, (n,) or (batch, n) beside `like` (batch, n, …); return them in two dimensions."""
    check.tensor(op, name, t)
    if t.dtype not in dtypes:
        accepted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{op}: {name} must be {accepted}, got {t.dtype}")
    batch, n = like.shape[:2]
    if t.shape not in ((n,), (batch, n)):
        raise ValueError(f"{op}: {name} must be (n,) = {(n,)} or (batch, n) = {(batch, n)}, got {tuple(t.shape)}")
    check.same_device(op, name, t, of, like)
    return t if t.dim() == 2 else t[None]


def apply_rotary(x: Tensor, positions: Tensor | None, inverse: bool, out: Tensor) -> None:
    """Rotate x and write the result to out, which may be x."""
    if not uses_triton(x):
        out.copy_(definition.rotate(x, positions, inverse=inverse))
    elif x.numel():
        positions = None if positions is None else positions.contiguous()
        _kernels_rotary().rotate(_unit_width(x), positions, inverse, out)


def _rotary(x: Tensor, positions: Tensor | None, inverse: bool = False) -> Tensor:
    out = x.new_empty(x.shape)
    apply_rotary(x, positions, inverse, out)
    return out


def _rotary_backward(dy: Tensor, positions: Tensor | None) -> Tensor:
    return _rotary(dy, positions, True)


def _rotary_ways(x: Any, positions: Any, *rest: Any) -> list[Way]:
    """Shard along the batch, the heads, or tokens that have positions: without, a shard's first would be token 0."""
    ways: list[Way] = [((0,), (0, beside(positions, 2, 0))), ((2,), (2, REPLICATE))]
    return ways if positions is None else [*ways, ((1,), (1, 1))]


_call_rotary, *_ = operator(
    "rotary", _rotary, _rotary_backward, ("y",), fake=lambda x, *rest: x.new_empty(x.shape), ways=_rotary_ways,
    of=("x",), fake_back=lambda dy, *rest: dy.new_empty(dy.shape),
)  # fmt: skip


def rotary(x: Tensor, positions: Tensor | None = None) -> Tensor:
    r"""Rotate pairs of channels by an angle proportional to the token's position.

    .. math:: (x_c, x_{c+w/2}) \mapsto (x_c \cos\theta - x_{c+w/2}\sin\theta,\; x_c\sin\theta + x_{c+w/2}\cos\theta),
              \qquad \theta = p\cdot 10000^{-2c/w}

    The product of a turned query and a turned key depends on the distance of their positions alone. Angles are fp64
    until less than a turn is left, then fp32: right to a few of its last bits at positions up to 1e9, and off by about
    2⁻⁵² of the position beyond. Products are in fp32 or wider.

    Args:
        x: ``(batch, n, heads, width)``, width even, fp32, fp16, bf16 or fp64, any strides.
        positions: p, ``(n,)`` or ``(batch, n)`` int64; default 0 … n−1.

    Returns:
        The same shape and dtype, contiguous.

    Raises:
        TypeError: x is not a floating-point tensor, or positions is not int64.
        ValueError: shapes don't fit, or the tensors are on different devices.
        NotImplementedError: for second and forward-mode derivatives.

    Source: Su et al., RoFormer (arXiv:2104.09864).

    Example:
        >>> import torch
        >>> from onepass.ops.span_attention.op import rotary
        >>> q, k = torch.randn(2, 1, 1, 1, 8)
        >>> def product(i, j):
        ...     return (rotary(q, torch.tensor([i])) * rotary(k, torch.tensor([j]))).sum()
        >>> torch.allclose(product(7, 3), product(104, 100), atol=1e-5)  # distance alone counts
        True
    """
    check.floating("rotary", "x", x)
    if x.dim() != 4:
        raise ValueError(f"rotary: x must be (batch, n, heads, width), got {tuple(x.shape)}")
    if x.shape[-1] % 2:
        raise ValueError(f"rotary: the width of a head must be even, got {x.shape[-1]}")
    if positions is not None:
        positions = _places("rotary", "positions", positions, (torch.int64,), "x", x)
    return _call_rotary(x, positions)  # type: ignore[no-any-return]


def split(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys as heads side by side, (batch, n, 2·heads, width), and values, without a copy."""
    batch, n, _, heads, width = qkv.shape
    flat = qkv.view(batch, n, 3 * heads, width)
    return flat[:, :, : 2 * heads], flat[:, :, 2 * heads :]


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        check.floating("span_attention", name, t)
        if t.dim() != 4:
            raise ValueError(f"span_attention: {name} must be (batch, length, heads, width), got {tuple(t.shape)}")
        if t.dtype != q.dtype:
            raise TypeError(f"span_attention: q, k and v must have one dtype; q is {q.dtype}, {name} is {t.dtype}")
        check.same_device("span_attention", name, t, "q", q)
    batch, _, heads, width = q.shape
    if k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (batch, heads, width):
        raise ValueError(
            f"span_attention: k and v must be (batch, length, heads, width) with q's batch, heads and width "
            f"{(batch, heads, width)}; got {tuple(k.shape)} and {tuple(v.shape)}"
        )


def _checked_runs(
    op: str, of: str, q: Tensor, k: Tensor, first: Tensor, last: Tensor, mask: Tensor | None
) -> tuple[Tensor, ...]:
    """Check these against q (batch, n, …) and k (batch, m, …); return first and last as (batch or 1, n) int32."""
    arguments.mask_of(op, mask, "(batch, keys)", k.shape[:2], of, q, "may be seen")
    runs = (("first", first), ("last", last))
    return tuple(_beside(q, _places(op, name, t, _INTS, of, q).to(torch.int32)) for name, t in runs)


def _beside(q: Any, t: Any) -> Tensor:
    """Return positions that are a plain tensor, whole on every device, as a DTensor beside a DTensor q."""
    if not hasattr(q, "to_local") or hasattr(t, "to_local"):
        return t  # type: ignore[no-any-return]
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(t, q.device_mesh, [Replicate()] * q.device_mesh.ndim, run_check=False)


def _unit_width(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _runs(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return first and last as the kernels read them: contiguous, and both shared by the batch or neither."""
    if len(first) != len(last):
        first, last = torch.broadcast_tensors(first, last)  # type: ignore[no-untyped-call]
    return first.contiguous(), last.contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output and the denominators of the softmax: `span_attention` without checks and autograd."""
    if not uses_triton(q):
        # a caller's autocast would round the products of forward but not those of backward
        with torch.autocast(q.device.type, enabled=False):
            return definition.forward(q, k, v, first, last, mask)
    if not q.numel() or not k.numel():
        out, lse = _fake(q)
        return out.zero_(), lse.fill_(math.inf)
    q, k, v = map(_unit_width, (q, k, v))
    return _kernels().forward(q, k, v, *_runs(first, last), as_bytes(mask))  # type: ignore[no-any-return]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: Tensor, last: Tensor,
    mask: Tensor | None, grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, written to `grads` if given, which may be parts of one tensor."""
    grads = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)) if grads is None else grads
    if not uses_triton(q):
        gradients = definition.backward(dout, q, k, v, out, lse, first, last, mask)
        for grad, value in zip(grads, gradients, strict=True):
            grad.copy_(value)
    elif not q.numel() or not k.numel():
        for grad in grads:
            grad.zero_()
    else:
        q, k, v = map(_unit_width, (q, k, v))
        # `.sum().backward()` passes a dout with stride 0
        first, last = _runs(first, last)
        dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
        _kernels().backward(dout, q, k, v, out, lse, first, last, as_bytes(mask), grads)
    return grads


def _fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, n, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, n), dtype=torch.promote_types(q.dtype, torch.float32))


def _ways(q: Any, k: Any, v: Any, first: Any, last: Any, mask: Any, *rest: Any) -> list[Way]:
    """Shard along the batch or the heads."""
    return [
        ((0, 0), (0, 0, 0, beside(first, 2, 0), beside(last, 2, 0), 0)),
        ((2, 1), (2, 2, 2, REPLICATE, REPLICATE, REPLICATE)),
    ]


_call, forward_op, backward_op = operator(
    "span_attention", forward, backward, ("out", "lse"), fake=_fake, ways=_ways, of=("q", "k", "v"), replay=True,
    state=torch.get_float32_matmul_precision,
)  # fmt: skip


def span_attention(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    r"""Attention in which query i sees the keys first_i ≤ j < last_i, of these only the ones that ``mask`` allows.

    .. math:: y_i = \frac{\sum_{j} e^{q_i\cdot k_j/\sqrt{w}}\, v_j}{\sum_{j} e^{q_i\cdot k_j/\sqrt{w}}},
              \qquad \mathrm{first}_i \le j < \mathrm{last}_i,\; \mathrm{mask}_j

    A local window, a causal window, a prefix and a padded sequence are all runs of keys. Work and memory follow the
    length of the runs; no key is copied. A query that sees no key gives 0.

    Args:
        q: ``(batch, n, heads, width)``, fp32, fp16, bf16 or fp64, any strides.
        k: ``(batch, m, heads, width)``, q's dtype.
        v: like k.
        first: the first key of each query's run, ``(n,)`` or ``(batch, n)``, int32 or int64, never decreasing along n.
        last: one past its last key, likewise. Keys outside [0, m) are ignored.
        mask: ``(batch, m)`` bool, True at keys that may be seen; the others are not read, whatever they hold.

    Returns:
        ``(batch, n, heads, width)``, q's dtype, contiguous.

    Gradients flow to q, k and v, the same bit for bit from run to run.

    Raises:
        TypeError: a dtype is not one of these, or q, k and v differ in it.
        ValueError: shapes don't fit, or the tensors are on different devices.
        NotImplementedError: for second and forward-mode derivatives.

    Source: Dao, FlashAttention-2 (arXiv:2307.08691), with runs of keys in place of one causal flag.

    Example:
        >>> import torch
        >>> from onepass.ops.span_attention.op import span_attention
        >>> q = k = v = torch.eye(3)[None, :, None]
        >>> i = torch.arange(3)
        >>> span_attention(q, k, v, i, i + 1)[0, :, 0]  # each sees itself
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    _check(q, k, v)
    runs = _checked_runs("span_attention", "q", q, k, first, last, mask)
    return _call(q, k, v, *runs, mask)  # type: ignore[no-any-return]


def packed_forward(qkv: Tensor, first: Tensor, last: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, denominators, rotated queries and keys: `rotary_attention` without checks and autograd."""
    qk, v = split(qkv.contiguous())
    turned = _rotary(qk, None)
    q, k = turned.chunk(2, dim=2)
    return *forward(q, k, v, first, last, mask), turned


def packed_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, turned: Tensor, first: Tensor, last: Tensor,
    mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradient of qkv: parts of one tensor, where autograd would put it together from three."""
    grad = qkv.new_empty(qkv.shape)
    (_, v), (dqk, dv) = split(qkv.contiguous()), split(grad)
    (q, k), (dq, dk) = turned.chunk(2, dim=2), dqk.chunk(2, dim=2)
    backward(dout, q, k, v, out, lse, first, last, mask, (dq, dk, dv))
    apply_rotary(dqk, None, True, dqk)
    return grad


def _fake_packed(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, _, heads, width = qkv.shape
    return *_fake(qkv[:, :, 0]), qkv.new_empty((batch, n, 2 * heads, width))


def _packed_ways(qkv: Any, first: Any, last: Any, mask: Any, *rest: Any) -> list[Way]:
    """Shard along the batch."""
    return [((0, 0, 0), (0, beside(first, 2, 0), beside(last, 2, 0), 0))]


_call_packed, *_ = operator(
    "rotary_attention", packed_forward, packed_backward, ("out", "lse", "turned"), fake=_fake_packed,
    ways=_packed_ways, of=("qkv",),
)  # fmt: skip


def rotary_attention(qkv: Tensor, first: Tensor, last: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return `span_attention` of ``rotary(q)``, ``rotary(k)`` and v; queries and keys are rotated in one pass.

    Args:
        qkv: ``(batch, n, 3, heads, width)``: q, k and v from one linear layer, width even.
        first: the first key of each query's run, see `span_attention`.
        last: one past its last key.
        mask: ``(batch, n)`` bool, True at tokens that may be seen. A masked token still has a query, which must be
            finite; see the README.

    Example:
        >>> import torch
        >>> from onepass.ops.span_attention.op import rotary_attention
        >>> i = torch.arange(10)
        >>> rotary_attention(torch.randn(2, 10, 3, 4, 8), i - 3, i + 1).shape
        torch.Size([2, 10, 4, 8])
    """
    check.floating("rotary_attention", "qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3 or qkv.shape[4] % 2:
        shape = tuple(qkv.shape)
        raise ValueError(f"rotary_attention: qkv must be (batch, n, 3, heads, width), width even, got {shape}")
    first, last = _checked_runs("rotary_attention", "qkv", qkv, qkv, first, last, mask)
    return _call_packed(qkv, first, last, mask)  # type: ignore[no-any-return]

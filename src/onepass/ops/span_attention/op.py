"""`span_attention`: checks, registration with the dispatcher, autograd, the public function."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.bind import bind
from onepass.core.launch import uses_triton
from onepass.core.register import register, register_fake
from onepass.ops._shared import arguments

from . import sharding, torch_path


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


def checked_spans(
    op: str, q: Tensor, k: Tensor, first: Tensor, last: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Check first, last and mask against q (batch, n) and k (batch, m); return first, last as (batch or 1, n) int32."""
    batch, n = q.shape[:2]
    for name, t in (("first", first), ("last", last)):
        check.tensor(op, name, t)
        if t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: {name} must be int32 or int64, got {t.dtype}")
        if t.shape not in ((n,), (batch, n)):
            raise ValueError(f"{op}: {name} must be (n,) = {(n,)} or (batch, n) = {(batch, n)}, got {tuple(t.shape)}")
        check.same_device(op, name, t, "q", q)
    if mask is not None:
        arguments.boolean(op, mask, "may be seen")
        if mask.shape != k.shape[:2]:
            raise ValueError(f"{op}: mask must be (batch, keys) = {tuple(k.shape[:2])}, got {tuple(mask.shape)}")
    first, last = ((t if t.dim() == 2 else t[None]).to(torch.int32) for t in (first, last))
    return _beside(q, first), _beside(q, last)


def _beside(q: Any, t: Any) -> Tensor:
    """Return positions that are a plain tensor, whole on every device, as a DTensor beside a DTensor q."""
    if not hasattr(q, "to_local") or hasattr(t, "to_local"):
        return t  # type: ignore[no-any-return]
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(t, q.device_mesh, [Replicate()] * q.device_mesh.ndim, run_check=False)


def checked_scale(op: str, scale: float | None, width: int) -> float:
    """Return the scale of the scores, 1/√width by default; raise ValueError unless it is finite and > 0."""
    if scale is None:
        return 1 / math.sqrt(max(width, 1))
    if not 0 < scale < math.inf:
        raise ValueError(f"{op}: scale must be a finite number > 0, got {scale}")
    return float(scale)


def _unit_width(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _runs(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return first and last as the kernels read them: contiguous, and both shared by the batch or neither."""
    if len(first) != len(last):
        first, last = torch.broadcast_tensors(first, last)  # type: ignore[no-untyped-call]
    return first.contiguous(), last.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the denominators of the softmax: `span_attention` without checks and autograd."""
    if not uses_triton(q):
        # a caller's autocast would round the products of forward but not those of backward
        with torch.autocast(q.device.type, enabled=False):
            return torch_path.forward(q, k, v, first, last, mask, scale)
    if not q.numel() or not k.numel():
        lse = torch.full(_lse_shape(q), math.inf, dtype=torch.float32, device=q.device)
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), lse
    from . import kernels_triton

    q, k, v = map(_unit_width, (q, k, v))
    return kernels_triton.forward(q, k, v, *_runs(first, last), _bytes(mask), scale)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: Tensor, last: Tensor,
    mask: Tensor | None, scale: float, grads: tuple[Tensor, Tensor, Tensor] | None = None,
    edges: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, written to `grads` if given, which may be parts of one tensor.

    `edges` as :func:`edges`.
    """
    grads = _like(q, k, v) if grads is None else grads
    if not uses_triton(q):
        found = torch_path.backward(dout, q, k, v, out, lse, first, last, mask, scale)
        for grad, value in zip(grads, found, strict=True):
            grad.copy_(value)
    elif not q.numel() or not k.numel():
        for grad in grads:
            grad.zero_()
    else:
        from . import kernels_triton

        q, k, v = map(_unit_width, (q, k, v))
        # `.sum().backward()` passes a gradient with stride 0
        first, last = _runs(first, last)
        dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
        kernels_triton.backward(dout, q, k, v, out, lse, first, last, _bytes(mask), scale, grads, edges)
    return grads


def edges(like: Tensor, first: Tensor, last: Tensor, m: int) -> tuple[Tensor, Tensor] | None:
    """Return the queries that see each tile of m keys, which `backward` computes otherwise; None without kernels.

    `like` has the width and dtype of the queries. For callers whose runs repeat, or that replay the rest.
    """
    if not uses_triton(like) or not m or not first.numel():
        return None
    from . import kernels_triton

    return kernels_triton.askers(*_runs(first, last), m, like.shape[-1], like.dtype)


def _lse_shape(q: Tensor) -> tuple[int, int, int]:
    return q.shape[0], q.shape[2], q.shape[1]


def _like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    return dq, dk, dv


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


forward_op = register("span_attention", forward, sharding.forward)
backward_op = register("span_attention_backward", backward, sharding.backward)


@register_fake(forward_op)
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(_lse_shape(q), dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


@register_fake(backward_op)
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q, k, v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, first, last, mask, scale = inputs
    ctx.save_for_backward(q, k, v, *output, first, last, mask)
    ctx.scale = scale


def _gradients(ctx: Any, run: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (*run(dout, *ctx.saved_tensors, ctx.scale), None, None, None, None)


_call = bind(
    name="span_attention", forward=forward, forward_op=forward_op, backward=backward, backward_op=backward_op,
    save=_save, gradients=_gradients,
)  # fmt: skip


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    r"""Attention in which query i sees the keys first_i ≤ j < last_i, of these only the ones that ``mask`` allows.

    .. math:: y_i = \frac{\sum_{j} e^{s\,q_i\cdot k_j}\, v_j}{\sum_{j} e^{s\,q_i\cdot k_j}},
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
        scale: s > 0; default 1/√width.

    Returns:
        ``(batch, n, heads, width)``, q's dtype, contiguous.

    Gradients flow to q, k and v, the same bit for bit from run to run.

    Raises:
        TypeError: a dtype is not one of these, or q, k and v differ in it.
        ValueError: shapes don't fit, scale is not > 0, or the tensors are on different devices.
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
    first, last = checked_spans("span_attention", q, k, first, last, mask)
    scale = checked_scale("span_attention", scale, q.shape[-1])
    return _call(q, k, v, first, last, mask, scale)  # type: ignore[no-any-return]

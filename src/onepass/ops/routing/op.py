"""`score`, `gather`, `scatter_add`: their operators and the public functions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import is_fake, once, plain
from onepass.core.launch import import_later, uses_triton
from onepass.core.operator import operator
from onepass.core.sharding import REPLICATE, Way
from onepass.ops._shared.arguments import vectors

from . import definition

_kernels = import_later(".kernels", __package__)
_kernels_score = import_later(".kernels_score", __package__)


def _check_score(x: Tensor, weight: Tensor, eps: float) -> None:
    check.floating("score", "x", x)
    if x.dim() != 3 or x.shape[-1] < 1:
        raise ValueError(f"score: x must be (batch, n, dim) with dim ≥ 1, got {tuple(x.shape)}")
    vectors("score", "weight", weight, "x", x)
    check.not_negative("score", "eps", eps)


def _indices(op: str, indices: Tensor, name: str, other: Tensor) -> None:
    check.tensor(op, "indices", indices)
    if indices.dtype != torch.int64:
        raise TypeError(f"{op}: indices must be int64, got {indices.dtype}")
    if indices.dim() not in (2, 3):
        raise ValueError(f"{op}: indices must be (batch, k) or (batch, R, k), got {tuple(indices.shape)}")
    check.same_device(op, "indices", indices, name, other)


def _check_gather(x: Tensor, indices: Tensor, *_: int) -> None:
    check.floating("gather", "x", x)
    if x.dim() != 3:
        raise ValueError(f"gather: x must be (batch, n, dim), got {tuple(x.shape)}")
    _indices("gather", indices, "x", x)
    if indices.shape[0] != x.shape[0]:
        raise ValueError(f"gather: indices {tuple(indices.shape)} must have the batch {x.shape[0]} of x")


def _check_scatter(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> None:
    op = "scatter_add"
    check.floating(op, "y", y)
    check.floating(op, "update", update)
    _indices(op, indices, "y", y)
    batch = indices.shape[0]
    if y.dim() == 2:
        fits = y.shape[0] % batch == 0 if batch else y.shape[0] == 0
    else:
        fits = y.dim() == 3 and y.shape[0] == batch
    if not fits:
        raise ValueError(
            f"{op}: y must be (batch, n, dim) or its rows (batch·n, dim) with batch = {batch} of indices "
            f"{tuple(indices.shape)}; got {tuple(y.shape)}"
        )
    if update.shape != (*indices.shape, y.shape[-1]):
        raise ValueError(f"{op}: update must be {(*indices.shape, y.shape[-1])}, got {tuple(update.shape)}")
    check.same_device(op, "update", update, "y", y)
    if gates is not None:
        check.floating(op, "gates", gates)
        if gates.shape != indices.shape:
            raise ValueError(
                f"{op}: gates must have the shape of indices {tuple(indices.shape)}, got {tuple(gates.shape)}"
            )
        check.same_device(op, "gates", gates, "y", y)


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """Return a mask as kernels take it: contiguous, uint8."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def add_rows(
    y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, shift: Tensor | None = None
) -> tuple[()]:
    """Add gates·update in place to y (rows, d), contiguous, one route after another; shapes as in `scatter_add`.

    With `shift` (d,), contiguous, it adds gates·(update − shift).
    """
    if not is_fake(y) and indices.numel() and y.numel():
        way = _kernels() if uses_triton(y, update, gates) else definition
        gates = gates if gates is None else gates.contiguous()
        way.add_rows(y, update.contiguous(), gates, indices.contiguous(), shift)
    return ()


def scatter_backward(
    d_y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, need_update: bool, need_gates: bool,
    shift: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of update and gates, None where not needed, from that of `add_rows`' result, d_y."""
    if not (need_update or need_gates):
        return None, None
    if is_fake(d_y) or not indices.numel() or not d_y.numel():
        return (
            torch.zeros_like(update, memory_format=torch.contiguous_format) if need_update else None,
            None if gates is None or not need_gates else gates.new_zeros(gates.shape),
        )
    way = _kernels() if uses_triton(d_y, update, gates) else definition
    gates = gates if gates is None else gates.contiguous()
    rows = d_y.reshape(len(indices), -1, d_y.shape[-1])
    return way.add_backward(rows, update.contiguous(), gates, indices.contiguous(), need_update, need_gates, shift)  # type: ignore[no-any-return]


def _score(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    way = _kernels_score() if uses_triton(x) and x.numel() else definition
    scores, inverse = way.score_forward(x, weight.reshape(-1, x.shape[-1]).contiguous(), eps)
    return (scores if weight.dim() == 2 else scores[:, 0]).contiguous(), inverse


def _score_backward(
    ds: Tensor, x: Tensor, weight: Tensor, scores: Tensor, inverse: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    vectors = weight.reshape(-1, x.shape[-1]).contiguous()
    shape = (x.shape[0], len(vectors), x.shape[1])
    ds, scores, inverse = ds.reshape(shape).contiguous(), scores.reshape(shape).contiguous(), inverse.contiguous()
    way = _kernels_score() if uses_triton(x) and x.numel() else definition
    dx, dw = way.score_backward(ds, x, vectors, scores, inverse, need_x, need_weight)
    return dx, None if dw is None else dw.view(weight.shape)


def _fake_score(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    shape = (x.shape[0], *weight.shape[:-1], x.shape[1])
    return x.new_empty(shape, dtype=dtype), x.new_empty(x.shape[:2], dtype=dtype)


def _score_ways(x: Any, weight: Any, *rest: Any) -> list[Way]:
    """Shard along the batch or the tokens."""
    return [((0, 0), (0, REPLICATE)), ((weight.ndim, 1), (1, REPLICATE))]


_call_score, *_ = operator(
    "score", _score, _score_backward, ("scores", "inverse"), fake=_fake_score, ways=_score_ways,
    registered="routing_score", check_fake=_check_score,
)  # fmt: skip


def score(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    r"""Score every token: the dot product of its RMS-normalised row with a learned vector, in one read of ``x``.

    .. math:: s_t = \left\langle \frac{x_t}{\sqrt{\mathrm{mean}(x_t^2) + \varepsilon}}, v\right\rangle

    With a random v of length 1, scores have a standard deviation of 1 at every width.

    Args:
        x: ``(batch, n, dim)``, fp32, fp16, bf16 or fp64, any strides.
        weight: v, ``(dim,)``, or ``(R, dim)`` with R ≤ 16 for the scores of R routes from one read of ``x``.
        eps: ε, ≥ 0.

    Returns:
        ``(batch, n)``, or ``(batch, R, n)`` for R vectors, fp32 (fp64 for fp64 x).

    Gradients of ``x`` and ``weight`` come from one pass over x, the same bit for bit from run to run; only those that
    are needed are computed. A token whose score gets a gradient of exactly 0, such as a masked one, adds nothing to
    the gradient of the vectors whatever it holds, NaN included.

    Raises:
        TypeError: x or weight is not a floating-point tensor.
        ValueError: shapes don't fit, R is out of range, eps < 0, or the tensors are on different devices.
        NotImplementedError: for second and forward-mode derivatives.

    Source: CoLT5 (arXiv:2303.09752) scores with the raw dot product; the normalisation keeps ε of the gates meaningful.

    Example:
        >>> import torch
        >>> from onepass.ops.routing.op import score
        >>> score(torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), torch.tensor([1.0, 0.0]))
        tensor([[0.8485, 0.0000]])
    """
    _check_score(x, weight, eps)
    return _call_score(x, weight, float(eps))  # type: ignore[no-any-return]


def _gather(x: Tensor, indices: Tensor, n: int) -> Tensor:
    if not indices.numel() or not x.numel():
        return x.new_zeros((*indices.shape, x.shape[-1]))
    return (_kernels() if uses_triton(x) else definition).gather(x, indices.contiguous())  # type: ignore[no-any-return]


def _gather_backward(dy: Tensor, indices: Tensor, n: int) -> Tensor:
    dx = dy.new_zeros((indices.shape[0] * n, dy.shape[-1]))
    add_rows(dx, dy, None, indices)
    return dx.view(indices.shape[0], n, dy.shape[-1])


def _gather_ways(x: Any, indices: Any, n: int) -> list[Way]:
    """Shard along the batch, the features or the chosen tokens."""
    last = indices.ndim
    return [((0,), (0, 0)), ((last,), (2, REPLICATE)), ((last - 1,), (REPLICATE, last - 1))]


# n: how many tokens x has, which is all that backward needs of it
_call_gather, *_ = operator(
    "gather", _gather, _gather_backward, ("y",), fake=lambda x, i, n: x.new_empty((*i.shape, x.shape[-1])),
    ways=_gather_ways, of=("x",), fake_back=lambda dy, i, n: dy.new_empty((i.shape[0], n, dy.shape[-1])),
    registered="routing_gather", check_fake=_check_gather,
)  # fmt: skip


def gather(x: Tensor, indices: Tensor) -> Tensor:
    r"""Rows of ``x`` by index: :math:`y_{bj} = x_{b\,i_{bj}}`, zeros where :math:`i_{bj}` names no token.

    Args:
        x: ``(batch, n, dim)``, fp32, fp16, bf16 or fp64, any strides.
        indices: ``(batch, k)`` or ``(batch, R, k)`` int64. −1, or anything else outside 0 … n−1, means "missing": it
            gives zeros and reads nothing. A token must not appear twice within a route (the last dimension): the
            gradient of a repeated one would be incomplete.

    Returns:
        ``(batch, k, dim)`` or ``(batch, R, k, dim)``, dtype of ``x``.

    The gradient of x is the same bit for bit from run to run; a token that several routes name gets their gradients one
    after another.

    Raises:
        TypeError: x is not a floating-point tensor, or indices is not int64.
        ValueError: shapes don't fit, or the tensors are on different devices.
        NotImplementedError: for second and forward-mode derivatives.

    Example:
        >>> import torch
        >>> from onepass.ops.routing.op import gather
        >>> gather(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[1, -1]]))
        tensor([[[3., 4.],
                 [0., 0.]]])
    """
    _check_gather(x, indices)
    return _call_gather(x, indices, x.shape[1])  # type: ignore[no-any-return]


def _scatter(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device).copy_(y)
    add_rows(out.flatten(0, -2), update, gates, indices)
    return out


def _scatter_ways(y: Any, update: Any, gates: Any, indices: Any) -> list[Way]:
    """Shard along the features or, for 3-d y, the batch."""
    y_last, update_last = y.ndim - 1, update.ndim - 1
    gates_way = None if gates is None else REPLICATE
    ways: list[Way] = [((y_last,), (y_last, update_last, gates_way, REPLICATE))]
    return [*ways, ((0,), (0, 0, gates if gates is None else 0, 0))] if y.ndim == 3 else ways


_call_scatter, _, scatter_backward_op = operator(
    "scatter_add", _scatter, scatter_backward, ("out",), ways=_scatter_ways,
    fake=lambda y, *rest: torch.empty(y.shape, dtype=y.dtype, device=y.device),
    registered="routing_scatter_add", check_fake=_check_scatter,
)  # fmt: skip


class _InPlace(torch.autograd.Function):
    """`scatter_add` that writes into y."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> Tensor:
        add_rows(y.flatten(0, -2), update, gates, indices)
        ctx.mark_dirty(y)
        ctx.save_for_backward(update, gates, indices)
        return y

    @staticmethod
    @functools.partial(once, "scatter_add")
    def backward(ctx: Any, dy: Tensor) -> Any:
        need_y, *needs, _ = ctx.needs_input_grad
        return dy if need_y else None, *scatter_backward(dy, *ctx.saved_tensors, *needs), None


def scatter_add(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, *, inplace: bool = False) -> Tensor:
    r"""Add gated rows: :math:`y_{b\,i_{bj}} \mathrel{+}= g_{bj}\,u_{bj}`; all other rows stay as they are.

    Products and sums are in fp32 (fp64 if a tensor is), with one rounding per route to the dtype of y.

    Args:
        y: ``(batch, n, dim)``, or its rows ``(batch·n, dim)``; fp32, fp16, bf16 or fp64.
        update: u, ``(batch, k, dim)`` or ``(batch, R, k, dim)``, of any of these dtypes.
        gates: g, ``(batch, k)`` or ``(batch, R, k)``, of any of these dtypes; None: 1.
        indices: ``(batch, k)`` or ``(batch, R, k)`` int64. −1, or anything else outside 0 … n−1, is skipped. A token
            must not appear twice within a route; the routes are added one after another.
        inplace: allow overwriting y. Plain eager PyTorch then writes into y, if it is contiguous, and returns it. Such
            a y must not be a leaf that requires a gradient; pass the flat rows rather than a view of them, for which
            autograd copies the whole gradient. Under torch.compile and torch.func the result is a new tensor.

    Returns:
        The sum, shape and dtype of ``y``.

    The gradient of y is dy itself; those of update, :math:`g\,dy_i`, and of the gates, :math:`\langle dy_i,
    u\rangle`, come from one pass over the chosen rows. All are the same bit for bit from run to run.

    Raises:
        TypeError: a tensor is not floating-point, or indices is not int64.
        ValueError: shapes don't fit, or the tensors are on different devices.
        NotImplementedError: for second and forward-mode derivatives.

    Example:
        >>> import torch
        >>> from onepass.ops.routing.op import scatter_add
        >>> y, u = torch.zeros(1, 3, 2), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
        >>> scatter_add(y, u, torch.tensor([[1.0, 0.5]]), torch.tensor([[2, 0]]))
        tensor([[[1.5000, 2.0000],
                 [0.0000, 0.0000],
                 [1.0000, 2.0000]]])
    """
    _check_scatter(y, update, gates, indices)
    if inplace and plain(y, update, gates, indices) and y.is_contiguous():
        if torch.is_grad_enabled():
            return _InPlace.apply(y, update, gates, indices)  # type: ignore[no-untyped-call, no-any-return]
        add_rows(y.flatten(0, -2), update, gates, indices)
        torch.autograd.graph.increment_version(y)  # a kernel does not, and autograd checks it
        return y
    return _call_scatter(y, update, gates, indices)  # type: ignore[no-any-return]

"""`score`, `gather`, `scatter_add`: checks, shards, registration with the dispatcher, autograd, public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.bind import bind
from onepass.core.eager import is_fake, once, plain
from onepass.core.launch import uses_triton
from onepass.core.operator import operator
from onepass.core.register import register, register_backward, register_fake
from onepass.core.sharding import PARTIAL, REPLICATE, Placement, Way

from . import definition


def score_ways(x: Any, weight: Any, *rest: Any) -> list[Way]:
    """List the ways to shard x (batch, n, dim) and weight, with scores and 1/rms: along batch or tokens."""
    return [((0, 0), (0, REPLICATE)), ((weight.ndim, 1), (1, REPLICATE))]


def gather_ways(x: Any, indices: Any) -> list[Way]:
    """List the ways to shard x and indices, with the rows: along batch, features or chosen tokens."""
    return [((0,), (0, 0)), ((indices.ndim,), (2, REPLICATE)), ((indices.ndim - 1,), (REPLICATE, indices.ndim - 1))]


def gather_backward_ways(dy: Any, indices: Any, n: int) -> list[Way]:
    """List the ways to shard dy and indices, with dx."""
    chosen = indices.ndim - 1
    return [((0,), (0, 0)), ((2,), (indices.ndim, REPLICATE)), ((PARTIAL,), (chosen, chosen))]


def scatter_add_ways(y: Any, update: Any, gates: Any, indices: Any) -> list[Way]:
    """List the ways to shard y, update, gates and indices, with the sum: along features or, for 3-d y, the batch."""
    ways: list[Way] = [((y.ndim - 1,), (y.ndim - 1, update.ndim - 1, REPLICATE, REPLICATE))]
    return [*ways, ((0,), (0, 0, 0, 0))] if y.ndim == 3 else ways


def scatter_add_backward_ways(dy: Any, update: Any, gates: Any, indices: Any, need_u: bool, need_g: bool) -> list[Way]:
    """List the ways to shard dy, update, gates and indices, with the gradients of update and gates."""

    def way(du: Placement, dg: Placement, *inputs: Placement) -> Way:
        return (du if need_u else REPLICATE, dg if need_g and gates is not None else REPLICATE), inputs

    last = update.ndim - 1
    ways = [way(last, PARTIAL, dy.ndim - 1, last, REPLICATE, REPLICATE)]
    return [*ways, way(0, 0, 0, 0, 0, 0)] if dy.ndim == 3 else ways


MAX_VECTORS = 16


def check_score(x: Tensor, weight: Tensor, eps: float) -> None:
    """Raise TypeError or ValueError for arguments that :func:`score` does not accept."""
    check.floating("score", "x", x)
    check.floating("score", "weight", weight)
    if x.dim() != 3 or x.shape[-1] < 1:
        raise ValueError(f"score: x must be (batch, n, dim) with dim ≥ 1, got {tuple(x.shape)}")
    if weight.dim() not in (1, 2) or weight.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"score: weight must be (dim,) or (R, dim) with dim = {x.shape[-1]} of x {tuple(x.shape)}; "
            f"got {tuple(weight.shape)}"
        )
    if weight.dim() == 2 and not 1 <= weight.shape[0] <= MAX_VECTORS:
        raise ValueError(f"score: weight (R, dim) takes 1 ≤ R ≤ {MAX_VECTORS} vectors, got R = {weight.shape[0]}")
    if eps < 0:
        raise ValueError(f"score: eps must be ≥ 0, got {eps}")
    check.same_device("score", "weight", weight, "x", x)


def _indices(op: str, indices: Tensor, name: str, other: Tensor) -> None:
    check.tensor(op, "indices", indices)
    if indices.dtype != torch.int64:
        raise TypeError(f"{op}: indices must be int64, got {indices.dtype}")
    if indices.dim() not in (2, 3):
        raise ValueError(f"{op}: indices must be (batch, k) or (batch, R, k), got {tuple(indices.shape)}")
    check.same_device(op, "indices", indices, name, other)


def check_gather(x: Tensor, indices: Tensor) -> None:
    """Raise TypeError or ValueError for arguments that :func:`gather` does not accept."""
    check.floating("gather", "x", x)
    if x.dim() != 3:
        raise ValueError(f"gather: x must be (batch, n, dim), got {tuple(x.shape)}")
    _indices("gather", indices, "x", x)
    if indices.shape[0] != x.shape[0]:
        raise ValueError(f"gather: indices {tuple(indices.shape)} must have the batch {x.shape[0]} of x")


def check_scatter_add(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> None:
    """Raise TypeError or ValueError for arguments that :func:`scatter_add` does not accept."""
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


def on_triton(*tensors: Tensor | None) -> bool:
    """Return whether kernels take all of these tensors; None is ignored."""
    return all(t is None or uses_triton(t) for t in tensors)


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """Return a mask as kernels take it: contiguous, uint8."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def add_rows(
    y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, shift: Tensor | None = None
) -> tuple[()]:
    """Add gates·update in place to y (rows, d), contiguous, one route after another; shapes as in `scatter_add`.

    With `shift` (d,), contiguous, it adds gates·(update − shift).
    """
    if is_fake(y) or not indices.numel() or not y.numel():
        return ()
    batch, k = indices.shape[0], indices.shape[-1]
    indices, update = indices.reshape(batch, -1, k), update.reshape(batch, -1, k, y.shape[-1])
    gates = None if gates is None else gates.reshape(batch, -1, k)
    if on_triton(y, update, gates):
        from . import kernels

        kernels.add_rows(
            y, update.contiguous(), None if gates is None else gates.contiguous(), indices.contiguous(), shift
        )
        return ()
    update = update if shift is None else update - shift
    for r in range(indices.shape[1]):
        definition.add_rows(y, update[:, r], None if gates is None else gates[:, r], indices[:, r], len(y) // batch)
    return ()


def scatter_backward(
    dy: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, need_u: bool, need_g: bool,
    shift: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of update and gates, None where not needed; dy is that of the result of :func:`add_rows`."""
    need_g = need_g and gates is not None
    if is_fake(dy) or not indices.numel() or not dy.numel():
        return (
            update.new_zeros(update.shape) if need_u else None,
            gates.new_zeros(gates.shape) if need_g and gates is not None else None,
        )
    batch, d = indices.shape[0], dy.shape[-1]
    u, i = update.reshape(batch, -1, d).contiguous(), indices.reshape(batch, -1).contiguous()
    g = None if gates is None else gates.reshape(batch, -1).contiguous()
    if on_triton(dy, update, gates):
        from . import kernels

        du, dg = kernels.add_backward(dy.reshape(batch, -1, d), u, g, i, need_u, need_g, shift)
    else:
        rows = dy.reshape(-1, d)
        u = u if shift is None else u - shift
        du, dg = definition.scatter_backward(rows, u, g, i, len(rows) // batch, need_u, need_g)
    return (
        None if du is None else du.view(update.shape),
        None if dg is None or gates is None else dg.view(gates.shape),
    )


def _vectors(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 2 else weight[None]


def _score(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    vectors = _vectors(weight)
    if uses_triton(x) and x.numel():
        from . import kernels_score

        scores, inverse = kernels_score.forward(x, vectors.contiguous(), eps)
    else:
        scores, inverse = definition.score_forward(x, vectors, eps)
    return (scores if weight.dim() == 2 else scores[:, 0]).contiguous(), inverse


def _score_backward(
    ds: Tensor, x: Tensor, weight: Tensor, scores: Tensor, inverse: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    vectors = _vectors(weight)
    shape = (x.shape[0], len(vectors), x.shape[1])
    ds, scores, inverse = ds.reshape(shape).contiguous(), scores.reshape(shape).contiguous(), inverse.contiguous()
    if uses_triton(x) and x.numel():
        from . import kernels_score

        dx, dw = kernels_score.backward(ds, x, vectors.contiguous(), scores, inverse, need_x, need_weight)
    else:
        dx, dw = definition.score_backward(ds, x, vectors, scores, inverse, need_x, need_weight)
    return dx, None if dw is None else dw.view(weight.shape)


def _fake_score(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    shape = (x.shape[0], *weight.shape[:-1], x.shape[1])
    return x.new_empty(shape, dtype=dtype), x.new_empty(x.shape[:2], dtype=dtype)


_call_score, score_op, score_backward_op = operator(
    "score", _score, _score_backward, ("scores", "inverse"), fake=_fake_score, ways=score_ways,
    registered="routing_score", check_fake=check_score,
)  # fmt: skip


def score(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    r"""Score every token: the dot product of its RMS-normalised row with a learned vector, in one read of ``x``.

    .. math:: s_t = \Big\langle \frac{x_t}{\sqrt{\mathrm{mean}(x_t^2) + \varepsilon}}, v\Big\rangle

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
    check_score(x, weight, eps)
    return _call_score(x, weight, float(eps))  # type: ignore[no-any-return]


def _gather(x: Tensor, indices: Tensor) -> Tensor:
    if not indices.numel() or not x.numel():
        return x.new_zeros((*indices.shape, x.shape[-1]))
    flat = indices.flatten(1)
    if uses_triton(x):
        from . import kernels

        return kernels.gather(x, flat.contiguous()).view(*indices.shape, x.shape[-1])  # type: ignore[no-any-return]
    return definition.gather(x, flat).view(*indices.shape, x.shape[-1])


def _gather_backward(dy: Tensor, indices: Tensor, n: int) -> Tensor:
    dx = dy.new_zeros((indices.shape[0] * n, dy.shape[-1]))
    add_rows(dx, dy, None, indices)
    return dx.view(indices.shape[0], n, dy.shape[-1])


gather_op = register("routing_gather", _gather, gather_ways)
gather_backward_op = register("routing_gather_backward", _gather_backward, gather_backward_ways)


@register_fake(gather_op)
def _(x: Tensor, indices: Tensor) -> Tensor:
    check_gather(x, indices)
    return x.new_empty((*indices.shape, x.shape[-1]))


@register_fake(gather_backward_op)
def _(dy: Tensor, indices: Tensor, n: int) -> Tensor:
    return dy.new_empty((indices.shape[0], n, dy.shape[-1]))


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.n = inputs[0].shape[1]


def _gather_gradients(ctx: Any, run: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return run(dy, *ctx.saved_tensors, ctx.n), None


_call_gather = bind(
    name="gather",
    forward=_gather, forward_op=gather_op, backward=_gather_backward, backward_op=gather_backward_op,
    save=_save_gather, gradients=_gather_gradients,
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
    check_gather(x, indices)
    return _call_gather(x, indices)  # type: ignore[no-any-return]


def _scatter(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device).copy_(y)
    add_rows(out.flatten(0, -2), update, gates, indices)
    return out


scatter_op = register("routing_scatter_add", _scatter, scatter_add_ways)
scatter_backward_op = register_backward(
    "routing_scatter_add_backward", scatter_backward, scatter_add_backward_ways, of=("update", "gates")
)


@register_fake(scatter_op)
def _(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> Tensor:
    check_scatter_add(y, update, gates, indices)
    return torch.empty(y.shape, dtype=y.dtype, device=y.device)


def _save_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _scatter_gradients(ctx: Any, run: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    update, gates, indices = ctx.saved_tensors
    need_y, need_u, need_g = ctx.needs_input_grad[:3]
    du, dg = run(dy, update, gates, indices, need_u, need_g) if need_u or need_g else (None, None)
    return dy if need_y else None, du if need_u else None, dg if need_g else None, None


_call_scatter = bind(
    name="scatter_add",
    forward=_scatter, forward_op=scatter_op, backward=scatter_backward, backward_op=scatter_backward_op,
    save=_save_scatter, gradients=_scatter_gradients,
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
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _in_place_backward(ctx, dy)


_in_place_backward = once("scatter_add", lambda ctx, dy: _scatter_gradients(ctx, scatter_backward, dy))


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
    check_scatter_add(y, update, gates, indices)
    if inplace and plain(y, update, gates, indices) and y.is_contiguous():
        if torch.is_grad_enabled():
            return _InPlace.apply(y, update, gates, indices)  # type: ignore[no-untyped-call, no-any-return]
        add_rows(y.flatten(0, -2), update, gates, indices)
        return y
    return _call_scatter(y, update, gates, indices)  # type: ignore[no-any-return]


__all__ = ["MAX_VECTORS", "gather", "gather_op", "scatter_add", "scatter_op", "score"]

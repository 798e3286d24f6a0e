"""What a norm may be told: the options of the registered operator, and which arguments go together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core import check

QUANTIZE = (None, "row", "block")


class Options(NamedTuple):
    """What a norm is told beside its tensors; each is an argument of the registered operators.

    Attributes:
        eps: added to the variance or the mean of squares.
        offset: added to the weight.
        has_mean: a layer norm; else an RMS norm.
        stable: normalise s/max(s).
        twice: round the normalised row, then its product with the weight.
        gate_first: the gate multiplies s; else y.
        sigmoid: the gate's activation is the sigmoid, not silu.
        quantize: index into QUANTIZE.
        dtype: of y; None: that of x.
        keep_y: y is wanted, not its 8-bit form alone.
    """

    eps: float
    offset: float
    has_mean: bool
    stable: bool
    twice: bool
    gate_first: bool
    sigmoid: bool
    quantize: int
    dtype: torch.dtype | None
    keep_y: bool

    def alone(self) -> Options:
        """Return those of the same norm without weight, gate and roundings."""
        return Options(self.eps, 0.0, self.has_mean, self.stable, *NONE)


# the last options of calls that have none: eager calls pass `(eps, offset, has_mean, stable, *NONE)`, since to make
# an `Options` takes the host half a microsecond
NONE = (False, False, False, 0, None, True)


class Needs(NamedTuple):
    """Which gradients are needed; x stands for x, the residual or both."""

    x: bool
    gate: bool
    weight: bool
    bias: bool


class Table(NamedTuple):
    """How rows take their weight: row i takes entry (i // repeat) % entries."""

    repeat: int
    entries: int


def table(shape: torch.Size, vector: Tensor | None) -> Table | None:
    """Return the table that a weight is for x of `shape`.

    None if the weight does not broadcast to x, or differs in dimensions of x that are not neighbours.
    """
    if vector is None:
        return Table(1, 1)
    if not 1 <= vector.dim() <= len(shape) or vector.shape[-1] != shape[-1]:
        return None
    rows, own = shape[:-1], (1,) * (len(shape) - vector.dim()) + tuple(vector.shape[:-1])
    different = [d for d, size in enumerate(own) if size != 1]
    if not different:
        return Table(1, 1)
    first, last = different[0], different[-1] + 1
    if own[first:last] != tuple(rows[first:last]):
        return None
    return Table(math.prod(rows[last:]), math.prod(rows[first:last]))


def shared_table(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Table:
    """Return the table of weight and bias, which `check_arguments` has compared."""
    found = table(x.shape, bias if weight is None else weight)
    assert found is not None
    return found


def _check_shapes(op: str, n: int, x: Tensor, tensors: Sequence[Any], when: str = "") -> None:
    """Raise unless weight and bias have the last n dimensions of x, residual and gate all of them."""
    for name, t in zip(("weight", "bias", "residual", "gate"), tensors, strict=True):
        shape, of_x = (x.shape[-n:], "") if name in ("weight", "bias") else (x.shape, " of x")
        if t is not None:
            check.tensor(op, name, t)
            if t.shape != shape:
                raise ValueError(f"{op}: {when}{name} must have the shape{of_x} {tuple(shape)}; got {tuple(t.shape)}")


def flattened(op: str, n: int, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """Return x, [weight, bias, residual, gate] with the last n dimensions of x as one."""
    _check_shapes(op, n, x, tensors)
    return x.flatten(-n), [None if t is None else t.flatten(-n) for t in tensors]


def grouped(op: str, groups: int, x: Tensor, *rest: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return x, [weight, bias, residual, gate] with columns split into groups (..., groups, N / groups)."""
    *tensors, quantize = rest
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"{op}: groups must be an int, got {type(groups).__name__}")
    if quantize is not None:
        raise ValueError(f"{op}: quantize takes no groups")
    check.floating(op, "x", x)
    n_cols = x.shape[-1] if x.dim() else 0
    if groups < 1 or n_cols % groups:
        raise ValueError(f"{op}: groups must divide the {n_cols} columns of x, got {groups}")
    _check_shapes(op, 1, x, tensors, "with groups, ")
    split = (groups, n_cols // groups)
    parts = [None if t is None else t.unflatten(-1, split) for t in tensors]
    return x.unflatten(-1, split), parts  # type: ignore[no-untyped-call]


def check_arguments(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    options: Options | tuple[Any, ...],
) -> None:  # fmt: skip
    """Raise an error unless the arguments of a norm fit together."""
    o = Options(*options)
    op = "layer_norm" if o.has_mean else "rms_norm"
    check.floating(op, "x", x)
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have at least one dimension, got a 0-d tensor")
    shape = tuple(x.shape)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check.floating(op, name, vector)
            if table(x.shape, vector) is None:
                raise ValueError(
                    f"{op}: {name} must be ({shape[-1]},), the last dimension of x {shape}, or broadcast to x from "
                    f"neighbouring dimensions, as (heads, N) and (batch, 1, N) do; got {tuple(vector.shape)}"
                )
            check.same_device(op, name, vector, "x", x)
    if weight is not None and bias is not None and table(x.shape, weight) != table(x.shape, bias):
        raise ValueError(f"{op}: bias must have the shape of weight {tuple(weight.shape)}; got {tuple(bias.shape)}")
    for name, rows in (("residual", residual), ("gate", gate)):
        if rows is not None:
            check.floating(op, name, rows)
            if rows.shape != x.shape:
                raise ValueError(f"{op}: {name} must have the shape of x {shape}; got {tuple(rows.shape)}")
            check.same_device(op, name, rows, "x", x)
    check.real(op, "eps", o.eps)
    if gate is not None and (o.stable or o.quantize):
        raise ValueError(f"{op}: {'stable' if o.stable else 'quantize'} takes no gate")
    if QUANTIZE[o.quantize] == "block" and shape[-1] % 128:
        raise ValueError(f"{op}: quantize='block' needs rows of whole blocks of 128 columns, got {shape[-1]} columns")
    if o.twice and (o.offset or bias is not None):
        raise ValueError(f"{op}: rounding='twice' takes no {'offset' if o.offset else 'bias'}")
    if o.dtype is not None and (o.dtype not in check.FLOATS or (o.dtype == torch.float64 and x.dtype != o.dtype)):
        accepted = "float32, float16 or bfloat16 (float64 for float64 x)"
        raise ValueError(f"{op}: out_dtype must be {accepted}, got {o.dtype}")

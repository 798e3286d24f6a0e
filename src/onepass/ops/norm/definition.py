"""The definition of the norms: the tests' oracle, what a compiler gets, and what runs on a CPU and without Triton."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import recording
from onepass.core.launch import INTERPRET
from onepass.core.sums import BLOCK, row_sum

# standard deviations from zero up to which torch's backward is exact: 2⁻¹⁴ over half an ulp
FAR_ROWS = {torch.float32: 2.0**10, torch.float64: 2.0**39}
# elements of x that a CPU computes at a time: its caches then hold the results in between
AT_ONCE = 1 << 17


class Options(NamedTuple):
    """The options of a norm; each is an argument of the registered operators.

    Attributes:
        eps: added to the variance or the mean of squares.
        offset: added to the weight.
        has_mean: a layer norm; else an RMS norm.
        stable: normalise s/max(s).
        twice: round the normalised row, then its product with the weight.
        gate_first: the gate multiplies s; else y.
        sigmoid: the gate's activation is the sigmoid, not silu.
        dtype: of y; None: that of x.
        quantize: index into QUANTIZE.
    """

    eps: float
    offset: float
    has_mean: bool
    stable: bool
    twice: bool
    gate_first: bool
    sigmoid: bool
    dtype: torch.dtype | None
    quantize: int


QUANTIZE = (None, "row", "block")
# the last options of calls that have none: eager calls pass `(eps, offset, has_mean, stable, *NONE)`, since to make
# an `Options` takes the host half a microsecond
NONE = (False, False, False, None, 0)


# y, s, e4m3 codes, scales and statistics; or the gradients of x, gate, weight and bias, and that of x in a second dtype
Results = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Needs(NamedTuple):
    """Which gradients are needed: of x, the residual or both; of the gate, weight and bias."""

    need_x: bool
    need_z: bool
    need_w: bool
    need_b: bool


class Table(NamedTuple):
    """How rows take their weight: row i takes entry (i // repeat) % entries."""

    repeat: int
    entries: int


def table(shape: torch.Size, vector: Tensor | None) -> Table | None:
    """Return how the rows of x, of `shape`, take their entries of a weight.

    None if the weight does not broadcast to x, or differs in dimensions of x that are not neighbours.
    """
    if vector is None:
        return Table(1, 1)
    if not 1 <= vector.dim() <= len(shape) or vector.shape[-1] != shape[-1]:
        return None
    rows, weight_dims = shape[:-1], (1,) * (len(shape) - vector.dim()) + tuple(vector.shape[:-1])
    different = [d for d, size in enumerate(weight_dims) if size != 1]
    if not different:
        return Table(1, 1)
    first, last = different[0], different[-1] + 1
    if weight_dims[first:last] != tuple(rows[first:last]):
        return None
    return Table(math.prod(rows[last:]), math.prod(rows[first:last]))


def results(x: Tensor, residual: Tensor | None, o: Options) -> tuple[Tensor | None, ...]:
    """Return y, s, e4m3 codes and scales as empty tensors; None for those that the options leave out."""

    def rows(dtype: torch.dtype) -> Tensor:
        return torch.empty(x.shape, dtype=dtype, device=x.device)

    s = None if residual is None else rows(torch.promote_types(x.dtype, residual.dtype))
    if not o.quantize:
        return rows(o.dtype or x.dtype), s, None, None
    scales = (*x.shape[:-1], x.shape[-1] // 128 if QUANTIZE[o.quantize] == "block" else 1)
    return None, s, rows(torch.uint8), torch.empty(scales, dtype=torch.float32, device=x.device)


def to_e4m3(y: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Round y (..., N) to e4m3: (values, scales (..., N / columns) in fp32) with y ≈ values·scales.

    So many neighbouring columns share a scale: the largest |y| among them, or 2⁻⁴⁰ if that is larger, over 448.
    values = y · (448 / the largest), rounded to e4m3.
    """
    blocks = (*y.shape[:-1], y.shape[-1] // max(columns, 1), columns)
    f = y.float().reshape(blocks if y.shape[-1] else (*y.shape, 1))
    largest = f.abs().amax(-1, keepdim=True) if f.numel() else f.new_zeros((*f.shape[:-1], 1))
    largest = largest.clamp(min=2.0**-40)
    # both are tensors: to divide by a number, torch multiplies by its reciprocal, which rounds twice
    most = torch.full_like(largest, 448.0)
    values = (f * (most / largest)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return values.view(y.shape), (largest / most)[..., 0]


def _sigmoid(z: Tensor) -> Tensor:
    """Return sigmoid(z) with bits that depend on z alone: torch's sigmoid and silu have others in a loop's tail."""
    return torch.sigmoid(z) if z.requires_grad else z.neg().exp_().add_(1).reciprocal_()


def _mean(f: Tensor) -> Tensor:
    return f.mean(-1, keepdim=True) if f.is_cuda or f.shape[-1] <= BLOCK else row_sum(f) / f.shape[-1]


def _exact_mean(f: Tensor) -> Tensor:
    """Return the means of rows; that of a row of one value is this value if float64 holds the sum."""
    return _mean(f.double()).to(f.dtype)


def _rsqrt(v: Tensor) -> Tensor:
    # the gradient of rsqrt has its cube, which is 0 in fp32 for rows from 1e13 on
    return v.sqrt().reciprocal() if v.requires_grad or torch.compiler.is_compiling() else v.rsqrt()


def normalised(f: Tensor, eps: float, has_mean: bool, stable: bool = False) -> Tensor:
    """Return rows f (..., n) less their mean, over sqrt(var + eps·m²), or over sqrt(mean(f²) + eps).

    m is 1 or, if stable, max(f) where that is positive, else max|f|, and 1 for a row of zeros.
    """
    m: Tensor | float = 1.0
    if stable and f.numel():
        # in units of max|f| no row overflows or underflows; the norm of f is that of f / unit
        largest, magnitude = f.amax(-1, keepdim=True), f.abs().amax(-1, keepdim=True)
        unit = torch.where(magnitude > 0, magnitude, 1.0).detach()
        m = torch.where(largest > 0, largest, torch.where(magnitude > 0, magnitude, 1.0)) / unit
        f = f / unit
    if has_mean:
        f = f - (_exact_mean(f) if f.is_cpu and not torch.compiler.is_compiling() else _mean(f))
    return f * _rsqrt(_mean(f.square()) + eps * m * m)


def definition(
    s: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, o: Options, dtype: torch.dtype,
    normalise: Callable[..., Tensor] = normalised,
) -> Tensor:  # fmt: skip
    """Return y = (w + offset)·n + b of rows s = x (+ residual) normalised to n, where x has the dtype.

    With a gate z, n is that of s·a(z) if gate_first, else y is multiplied by a(z); a = silu or sigmoid. All is computed
    in fp32 or wider and rounded once; or n is rounded to the dtype of x, then its product with w.
    """
    wide = torch.promote_types(s.dtype, torch.float32)
    f, factor = s.to(wide), None
    if gate is not None:
        z = gate.to(wide)
        factor = _sigmoid(z) if o.sigmoid else z * _sigmoid(z)
    n = normalise(f if factor is None or not o.gate_first else f * factor, o.eps, o.has_mean, o.stable)
    if o.twice:
        n = n.to(dtype).to(wide)
    if weight is not None:
        n = n * (weight.to(wide) + o.offset)
        n = n.to(torch.promote_types(dtype, weight.dtype)).to(wide) if o.twice else n
    if bias is not None:
        n = n + bias.to(wide)
    return (n if factor is None or o.gate_first else n * factor).to(o.dtype or dtype)


def _oracle(has_mean: bool, eps: float | None) -> Callable[..., Any]:
    def norm(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None = None,
        gate: Tensor | None = None, groups: int = 1, eps: float | None = eps, offset: float = 0.0,
        stable: bool = False, rounding: str = "once", gate_first: bool = False, gate_act: str = "silu",
        quantize: str | None = None, out_dtype: torch.dtype | None = None,
    ) -> Any:  # fmt: skip
        """Return y, or its e4m3 values and scales, as the public function; with residual also the sum."""
        s = x if residual is None else x + residual
        eps = torch.finfo(torch.promote_types(s.dtype, torch.float32)).eps if eps is None else eps
        o = Options(eps, offset, has_mean, stable, rounding == "twice", gate_first, gate_act == "sigmoid", out_dtype, 0)
        parts: list[Any] = [s, gate, weight, bias]
        if groups > 1:
            parts = [None if t is None else t.unflatten(-1, (groups, s.shape[-1] // groups)) for t in parts]
        groups_of_s, z, w, b = parts
        y: Any = definition(groups_of_s, z, w, b, o, x.dtype).view(x.shape)
        if quantize is not None:
            y = to_e4m3(y, y.shape[-1] if quantize == "row" else 128)
        return y if residual is None else (y, s)

    return norm


layer_norm, rms_norm = _oracle(True, 1e-5), _oracle(False, None)


def _one_weight(*vectors: Tensor | None) -> bool:
    return all(v is None or v.dim() == 1 for v in vectors)


def _along(t: Tensor, s: Tensor) -> bool:
    """Return whether t differs along the first dimension of s."""
    return t.dim() == s.dim() and len(t) == len(s)


def _parts(rows: Sequence[Tensor | None], vectors: Sequence[Tensor | None]) -> Iterator[list[Any]]:
    """Yield parts of rows, the first of which is s, and of vectors along a first dimension; one vector is whole."""
    s: Any = rows[0]
    if _one_weight(*vectors):
        rows = [None if t is None else t.reshape(-1, s.shape[-1]) for t in rows]
        s = rows[0]
    height = max(1, AT_ONCE * len(s) // s.numel())
    if s.is_cuda or height >= len(s):
        yield [*rows, *vectors]
        return
    for i in range(0, len(s), height):
        yield [t[i : i + height] if t is not None and _along(t, s) else t for t in (*rows, *vectors)]


def forward(
    s: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, o: Options, dtype: torch.dtype,
    normalise: Callable[..., Tensor] = normalised,
) -> Tensor:  # fmt: skip
    """Return y of rows s, which are not empty, some at a time."""
    plain = normalise is normalised and gate is None and not o.stable and _one_weight(weight, bias)
    if plain and o.has_mean and not o.offset:
        # the operator that `native` calls: both give the same bits
        wide = torch.promote_types(s.dtype, torch.float32)
        w, b = (None if v is None else v.to(wide) for v in (weight, bias))
        return torch.native_layer_norm(s.to(wide), s.shape[-1:], w, b, o.eps)[0].to(o.dtype or dtype)
    y = torch.empty(s.shape, dtype=o.dtype or dtype, device=s.device)
    for part in _parts((s, gate, y), (weight, bias)):
        tensors: list[Any] = [t if t is None else t.detach().contiguous() for t in part]
        s_part, z, y_part, w, b = tensors
        y_part.copy_(definition(s_part, z, w, b, o, dtype, normalise))
    return y


def _plain_backward(g: Tensor, f: Tensor, w: Tensor | None, o: Options, wanted: Sequence[int]) -> dict[int, Tensor]:
    """Return the gradients of a norm without options, by argument: 0 is rows f (rows, n), 2 weight, 3 bias.

    Autograd takes three times as long, and every model trained on a CPU has such norms.
    """
    if o.has_mean:
        f = f - _exact_mean(f)
    rstd = _mean(f.square()).add_(o.eps).rsqrt_()
    n = f * rstd
    grads = {i: (g * n if i == 2 else g).sum(0) for i in wanted if i}
    if 0 in wanted:
        g = g if w is None else g * (w + o.offset)
        along = torch.linalg.vecdot(g, n)[:, None] / f.shape[-1]
        g = g - g.mean(-1, keepdim=True) if o.has_mean else g
        grads[0] = torch.addcmul(g, n, along, value=-1).mul_(rstd)
    return grads


def backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    o: Options, need: Needs,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of s, gate, weight and bias by autograd, some rows at a time; None for those not needed."""
    wide, o = torch.promote_types(s.dtype, torch.float32), o._replace(twice=False, dtype=None)
    inputs: list[Any] = [s, gate, weight, bias]
    wanted = [i for i, t in enumerate(inputs) if t is not None and need[i]]
    plain = gate is None and not o.stable and _one_weight(weight, bias)
    gradients: dict[int, list[Tensor]] = {i: [] for i in wanted}
    for part in _parts((s, gate, dy, ds), (weight, bias)):
        tensors: list[Any] = [t if t is None else t.to(wide).contiguous().detach() for t in part]
        s_part, z, g, ds_part, w, b = tensors
        if plain:
            grads = _plain_backward(g, s_part, w, o, wanted)
        else:
            with recording():
                leaves = [t.requires_grad_() for i, t in enumerate((s_part, z, w, b)) if i in wanted]
                of_leaves = torch.autograd.grad(definition(s_part, z, w, b, o, wide), leaves, g)
            grads = dict(zip(wanted, of_leaves, strict=True))
        for i in wanted:
            d: Any = grads[i] if i or ds_part is None else grads[i] + ds_part
            gradients[i].append(d if i > 1 else d.to(inputs[i].dtype))
    return tuple(_joined(gradients[i], t, s) if i in gradients else None for i, t in enumerate(inputs))


def _joined(parts: list[Tensor], like: Tensor, s: Tensor) -> Tensor:
    """Return a tensor's gradient: its parts' gradients joined, or the sum of its gradients for all parts of s."""
    if len(parts) > 1:
        parts = [torch.cat(parts) if _along(like, s) else torch.stack(parts).sum(0)]
    return parts[0].view(like.shape).to(like.dtype)


def native(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    options: tuple[Any, ...],
) -> Tensor | None:  # fmt: skip
    """Return the norm of a plain eager call by torch's operator on a CPU, differentiable; None where it is less exact.

    None for 16-bit layer norms, whose statistics and sums torch keeps in 16 bits (dw is 12 % off after 4096 rows), for
    layer norms with rows far from zero whose gradients are wanted, and for RMS norms with gradients: torch's takes the
    cube of 1/rms, which underflows from |x| of about 1e13 on.
    """
    if INTERPRET or not x.is_cpu or x.is_nested or residual is not None or gate is not None:
        return None
    eps, offset, has_mean, stable, *rest = options
    if stable or tuple(rest) != NONE or torch._C._is_any_autocast_enabled():
        return None
    if not isinstance(eps, (float, int)) or not eps >= 0 or not x.numel() or not x.dim() or x.dtype not in check.FLOATS:
        return None
    dtype, n_cols = x.dtype, x.shape[-1]
    for v in (weight, bias):
        if v is not None and not (isinstance(v, Tensor) and v.dtype == dtype and v.shape == (n_cols,) and v.is_cpu):
            return None
    if has_mean:
        # torch's second derivative fails for a bias without a weight, with an error that names neither
        if dtype.itemsize == 2 or (weight is None and bias is not None) or offset:
            return None
        y, mean, rstd = torch.native_layer_norm(x, (n_cols,), weight, bias, eps)
        return None if y.requires_grad and _any_far(mean, rstd) else y
    # above BLOCK columns torch's order of a sum depends on the number of rows and threads
    if bias is not None or n_cols > BLOCK or (offset and weight is not None):
        return None
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return None
    return torch.rms_norm(x.contiguous(), (n_cols,), weight, eps)


def _any_far(mean: Tensor, rstd: Tensor) -> bool:
    """Return whether a row lies too far from zero for the backward of torch's layer norm.

    Torch computes dx = r·g + b·x + c, where b is a difference of row sums and c is about −b·mean. With M = |mean|·r
    standard deviations to zero both differences cancel: u·M of b is lost, and u·M of that in b·x + c, where u is half
    an ulp: (M·u)² of dx. That is 2⁻²⁸ at the limit; a row of one value 10⁶ has M·u = 19, and no digit is right.
    """
    return bool(((mean * rstd).abs() > FAR_ROWS[mean.dtype]).any())

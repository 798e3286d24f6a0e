"""The torch path: torch's own operators where they keep the contract, else the formulas in fp32 or wider.

On a GPU, rows that are too wide for the kernels' options are normalised by the kernels of plain calls, so that the bits
of a row depend on this row alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.launch import INTERPRET, uses_triton
from onepass.core.sums import BLOCK, row_sum

from .options import NONE, Needs, Options, Table
from .reference import quantize, stable_scale

# standard deviations from zero up to which torch's backward is exact: 2⁻¹⁴ over half an ulp
FAR_ROWS = {torch.float32: 2.0**10, torch.float64: 2.0**39}

Coded = tuple[Tensor, Tensor] | None
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
ONE_WEIGHT, X_ALONE = Table(1, 1), Needs(True, False, False, False)


def native(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    options: tuple[Any, ...],
) -> Tensor | None:  # fmt: skip
    """Return the norm of a plain eager call by torch's operator on a CPU, differentiable; None where it is less exact.

    None for 16-bit layer norms, whose statistics and sums torch keeps in 16 bits (dw is 12 % off after 4096 rows), for
    layer norms with rows far from zero whose gradients are wanted, and for RMS norms with gradients: torch's takes the
    cube of 1/rms, which underflows from |x| of about 1e13 on.
    """
    if INTERPRET or not x.is_cpu or residual is not None or gate is not None:
        return None
    eps, offset, has_mean, stable, *others = options
    if stable or tuple(others) != NONE or torch._C._is_any_autocast_enabled():
        return None
    if not isinstance(eps, (float, int)) or not eps >= 0:
        return None
    if not x.numel() or not x.dim() or x.dtype not in check.FLOATS:
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


def _wide(t: Tensor) -> torch.dtype:
    """Return fp64 for fp64 t, fp32 for all others."""
    return torch.promote_types(t.dtype, torch.float32)


def _wide_weight(weight: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor | None:
    """Return weight + offset in `dtype`; None for None."""
    if weight is None:
        return None
    weight = weight.to(dtype)
    return weight + offset if offset else weight


def _sigmoid(z: Tensor) -> Tensor:
    """Return sigmoid(z), whose bits depend on z alone: torch's and its silu have others where a vector is not full."""
    return z.contiguous().neg().exp_().add_(1).reciprocal_()


def _is_plain(gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, o: Options) -> bool:
    """Return whether torch's operators have all that the call asks for, but perhaps the dtype of y and 8 bits."""
    one_weight = all(v is None or v.dim() == 1 for v in (weight, bias))
    return one_weight and gate is None and not o.twice and not (o.has_mean and o.offset)


def _by_kernels(rows: Tensor, weight: Tensor | None, bias: Tensor | None, o: Options) -> tuple[Tensor, Tensor]:
    """Return y and statistics of rows of any width on a GPU."""
    from . import launch

    y, *_, stats = launch.forward(rows, None, None, weight, bias, ONE_WEIGHT, o)
    assert y is not None
    assert stats is not None
    return y, stats


def forward(
    x: Tensor, s: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, o: Options
) -> tuple[Tensor, Coded, Tensor]:
    """Return y, (e4m3 values, scales) where the options ask for them, and statistics (1 to 3, ...): 1/σ, mean, ±m.

    s is x, or x + residual; it is not empty.
    """
    dtype = o.dtype or x.dtype
    # a plain call rounds a 16-bit layer norm to its own dtype first
    if _is_plain(gate, weight, bias, o) and (dtype == s.dtype or s.element_size() > 2):
        if uses_triton(s) and not o.stable:
            y, stats = _by_kernels(s, weight, bias, o._replace(quantize=0, dtype=dtype, keep_y=True))
        else:
            y, stats = _plain(s, weight, bias, o, dtype)
    else:
        y, stats = _with_options(x, s, gate, weight, bias, o, dtype)
    return y, quantize(y, 128 if o.quantize == 2 else s.shape[-1]) if o.quantize else None, stats


def _plain(
    s: Tensor, weight: Tensor | None, bias: Tensor | None, o: Options, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return y of `dtype`, contiguous, and statistics."""
    wide = _wide(s)
    w, b = _wide_weight(weight, o.offset, wide), None if bias is None else bias.to(wide)
    if o.has_mean and not o.stable:
        # the operator that `native` calls: both give the same bits
        y, mean, rstd = torch.native_layer_norm(s.to(wide), s.shape[-1:], w, b, o.eps)
        return y.to(dtype), torch.stack((rstd[..., 0], mean[..., 0]))
    y, stats = normalised(s.to(wide).contiguous(), o.eps, o.has_mean, o.stable)
    y = y if w is None else y.mul_(w)
    y = y if b is None else y.add_(b)
    return y.to(dtype), stats


def _with_options(
    x: Tensor, s: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, o: Options,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = _wide(s)
    rows = s.to(wide).contiguous()
    factor = None
    if gate is not None:
        z = gate.to(wide)
        factor = _sigmoid(z) if o.sigmoid else z * _sigmoid(z)
        if o.gate_first:
            rows = rows * factor
    if uses_triton(rows) and not o.stable:
        y, stats = _by_kernels(rows, None, None, o.alone())
    else:
        y, stats = normalised(rows, o.eps, o.has_mean, o.stable)
    w, b = _wide_weight(weight, o.offset, wide), _wide_weight(bias, 0.0, wide)
    if o.twice:
        y = y.to(x.dtype).to(wide)
    if w is not None:
        y = y * w
        if o.twice and weight is not None:
            y = y.to(torch.promote_types(x.dtype, weight.dtype)).to(wide)
    if b is not None:
        y = y + b
    if factor is not None and not o.gate_first:
        y = y * factor
    y = y.to(dtype)
    # autograd forbids in-place changes of a view that a Function returns, and of an argument
    return y.clone() if y.data_ptr() in (x.data_ptr(), s.data_ptr()) or y._is_view() else y, stats


def normalised(rows: Tensor, eps: float, has_mean: bool, stable: bool) -> tuple[Tensor, Tensor]:
    """Return rows (..., n), contiguous and in fp32 or wider, normalised, and the statistics (1 to 3, ...)."""
    n_cols = rows.shape[-1]
    if stable:
        m, magnitude = stable_scale(rows), rows.abs().amax(-1, keepdim=True)
        # work in units of max|x|: then no row overflows or underflows
        unit = torch.where(magnitude > 0, magnitude, torch.ones_like(magnitude))
        signed = torch.where(rows.amax(-1, keepdim=True) > 0, m, -m)
        rows = rows / unit
    means = []
    if has_mean:
        means = [row_sum(rows).div_(n_cols)]
        rows = rows - means[0]
    # the operations of torch.rms_norm, which `native` calls: both give the same bits
    var = row_sum(rows.square()).div_(n_cols)
    rstd = var.add_(eps * (m / unit).square() if stable else eps).rsqrt_()
    stats = [rstd / unit, means[0] * unit, signed] if stable else [rstd, *means]
    return rows * rstd, torch.stack([t[..., 0] for t in stats])


def backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None,
    bias: Tensor | None, o: Options, need: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx, dz, dw and db in the dtypes of s, gate, weight and bias, contiguous; None for those not needed."""
    dz = None
    if _is_plain(gate, weight, bias, o) and o[4:] == NONE:
        dx, dw, db = _plain_backward(dy, s, stats.view(len(stats), -1), weight, o, need)
    else:
        dx, dz, dw, db = _backward_with_options(dy, s, gate, stats, weight, bias, o, need)
    if dx is not None and ds is not None:
        dx = dx + ds
    results = zip((dx, dz, dw, db), (s, gate, weight, bias), strict=True)
    dx, dz, dw, db = (None if d is None or t is None else d.to(t.dtype).contiguous() for d, t in results)
    return dx, dz, dw, db


def _plain_backward(dy: Tensor, s: Tensor, stats: Tensor, weight: Tensor | None, o: Options, need: Needs) -> Gradients:
    """Return the needed ones of dx, dw and db in fp32 or wider; else None."""
    wide, n_cols = _wide(s), s.shape[-1]
    dy_rows, rows = dy.to(wide).reshape(-1, n_cols), s.to(wide).reshape(-1, n_cols)
    w = _wide_weight(weight, o.offset, wide)
    needs = need.x, need.weight, need.bias
    # on a GPU torch's kernel subtracts the mean first
    if o.has_mean and not o.stable and not (s.is_cpu and _any_far(stats[1], stats[0])):
        # torch computes db only if it gets a bias, whose values it does not read
        b = (stats.new_empty(n_cols) if w is None else w) if need.bias else None
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            dy_rows, rows, (n_cols,), stats[1], stats[0], w, b, needs
        )
    else:
        dx, dw, db = _formula(dy_rows, rows, stats, w, o, needs)
    return None if dx is None else dx.view(s.shape), dw, db


def _backward_with_options(
    dy: Tensor, s: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None, bias: Tensor | None, o: Options,
    need: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    wide = _wide(s)
    rows, g, w = s.to(wide), dy.to(wide), _wide_weight(weight, o.offset, wide)
    factor = slope = dx = dz = dw = None
    if gate is not None:
        z = gate.to(wide)
        sigmoid = _sigmoid(z)
        if o.sigmoid:
            factor, slope = sigmoid, sigmoid * (1 - sigmoid)
        else:
            factor, slope = z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
    gated_rows = rows * factor if factor is not None and o.gate_first else rows
    normed = gated_rows if not o.has_mean else gated_rows - stats[1, ..., None]
    normed = normed * stats[0, ..., None]
    if factor is not None and slope is not None and not o.gate_first:
        if need.gate:
            before_gate = normed if w is None else normed * w
            before_gate = before_gate if bias is None else before_gate + bias.to(wide)
            dz = g * before_gate * slope
        g = g * factor
    if need.weight and weight is not None:
        dw = (g * normed).sum_to_size(weight.shape)
    db = g.sum_to_size(bias.shape) if need.bias and bias is not None else None
    if need.x or (need.gate and o.gate_first):
        dx = _rows_gradient(g if w is None else g * w, gated_rows, stats, o)
        if factor is not None and slope is not None and o.gate_first:
            dz = dx * rows * slope if need.gate else None
            dx = dx * factor
    return dx if need.x else None, dz, dw, db


def _rows_gradient(g: Tensor, rows: Tensor, stats: Tensor, o: Options) -> Tensor:
    """Return the gradient of rows, given that of the normalised rows."""
    dx: Tensor | None = None
    if uses_triton(rows):
        from . import launch

        if launch.has_backward(rows, g, None, ONE_WEIGHT, o.stable):
            dx, *_ = launch.backward(g, None, rows, None, stats, None, None, ONE_WEIGHT, o.alone(), rows.dtype, X_ALONE)
    if dx is None:
        n_cols = g.shape[-1]
        dx, *_ = _formula(
            g.reshape(-1, n_cols), rows.reshape(-1, n_cols), stats.reshape(len(stats), -1), None, o,
            (True, False, False),
        )  # fmt: skip
    assert dx is not None
    return dx.view(rows.shape)


def _formula(
    dy: Tensor, x: Tensor, stats: Tensor, w: Tensor | None, o: Options, needs: tuple[bool, bool, bool]
) -> Gradients:
    """Return dx, dw and db of rows (rows, n) in fp32 or wider, by the formulas of README.md."""
    n_cols = x.shape[-1]
    rstd = stats[0, :, None]
    normed = (x - stats[1, :, None]).mul_(rstd) if o.has_mean else x * rstd
    dw = (dy * normed).sum(0) if needs[1] else None
    db = dy.sum(0) if needs[2] else None
    if not needs[0]:
        return None, dw, db
    g = dy if w is None else dy * w
    total = torch.linalg.vecdot(g, normed)[:, None]
    if o.has_mean:
        g = g - g.mean(-1, keepdim=True)
    dx = torch.addcmul(g, normed, total / n_cols, value=-1).mul_(rstd)
    if o.stable:
        # subtract the gradient of m, shared evenly by the positions that attain it
        signed = stats[2, :, None]
        attained = x == signed
        dx -= attained * (total / attained.sum(-1, keepdim=True).clamp_(min=1) * o.eps * (signed * rstd) * rstd)
    return dx, dw, db

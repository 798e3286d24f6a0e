"""The torch path: on a CPU, in float64 and without Triton. Torch's own kernels where it has them, else formulas.

Code that reads a row several times or widens it runs on groups of rows that fit a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from onepass.core.sums import row_sum

from .reference import stable_scale

# elements per group: 1 MiB in fp32
GROUP = 1 << 18
# up to |mean| = FAR·σ, fp32 rounds x/σ − mean/σ by at most 2⁻¹³, an eighth of a 16-bit ulp
FAR = 1024.0
# standard deviations from zero up to which torch's backward is exact: 2⁻¹⁴ over half an ulp
FAR_ROWS = {torch.float32: 2.0**10, torch.float64: 2.0**39}

Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return fp64 for fp64 x, fp32 for all others."""
    return torch.promote_types(x.dtype, torch.float32)


def _group_rows(x: Tensor) -> int:
    # on a GPU all rows are one group: each group costs launches
    return len(x) if x.is_cuda else min(len(x), max(1, GROUP // x.shape[-1]))


def _groups(x: Tensor) -> Iterator[slice]:
    step = _group_rows(x)
    return (slice(start, start + step) for start in range(0, len(x), step))


def wide_weight(weight: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor | None:
    """Return weight + offset in `dtype`; None for None."""
    if weight is None:
        return None
    weight = weight.to(dtype)
    return weight + offset if offset else weight


def forward(
    s: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y of `dtype`, contiguous, and statistics (1 to 3, ...): 1/σ, mean, ±m; s (..., n) is not empty."""
    wide, n = wide_dtype(s), s.shape[-1]
    w, b = wide_weight(weight, offset, wide), None if bias is None else bias.to(wide)
    if has_mean and not stable:
        if s.dtype != wide and s.is_cpu:
            ones = torch.ones(n, dtype=wide, device=s.device) if w is None else w
            y, mean, rstd = sixteen_bit_forward(s, ones, b, eps)
        else:
            y, mean, rstd = torch.native_layer_norm(s.to(wide), (n,), w, b, eps)
        return y.to(dtype), torch.stack((rstd.view(s.shape[:-1]), mean.view(s.shape[:-1])))
    rows = s.reshape(-1, n)
    # return y itself: autograd forbids in-place changes of a view that a Function returns
    y = torch.empty(s.shape, dtype=dtype, device=s.device)
    y_rows = y.view(-1, n)
    stats = torch.empty((1 + has_mean + stable, len(rows)), dtype=wide, device=s.device)
    room = s.new_empty((0 if has_mean else _group_rows(rows), n), dtype=wide)
    for group in _groups(rows):
        f, out = rows[group].to(wide), y_rows[group]
        if has_mean:
            f, stats[:, group] = stable_forward(f.contiguous(), eps)
        else:
            # the operations of torch.rms_norm, which `native` calls for small tensors: both give the same bits
            rstd = row_sum(torch.mul(f, f, out=room[: len(f)])).div_(n).add_(eps).rsqrt_()
            f, stats[0, group] = torch.mul(f, rstd, out=out if dtype == wide else None), rstd[:, 0]
        if w is not None:
            f.mul_(w)
        if b is not None:
            f.add_(b)
        if f is not out:
            out.copy_(f)
    return y, stats.view(len(stats), *s.shape[:-1])


def stable_forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised rows of x (rows, n) in fp32 or wider with `stable`, and the statistics (3, rows)."""
    m, magnitude = stable_scale(x), x.abs().amax(-1, keepdim=True)
    # work in units of max|x|: then no row overflows or underflows
    unit = torch.where(magnitude > 0, magnitude, torch.ones_like(magnitude))
    signed = torch.where(x.amax(-1, keepdim=True) > 0, m, -m)
    x = x / unit
    mean = row_sum(x).div_(x.shape[-1])
    x -= mean
    var = row_sum(x.square()).div_(x.shape[-1])
    rstd = (var + eps * (m / unit).square()).rsqrt()
    return x.mul_(rstd), torch.stack([(rstd / unit)[:, 0], (mean * unit)[:, 0], signed[:, 0]])


def backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, eps: float, offset: float,
    has_mean: bool, stable: bool, needs: Needs,
) -> Gradients:  # fmt: skip
    """Return the needed ones of dx (in the dtype of x), dw and db (in fp32 or wider), contiguous; else None."""
    wide, n = wide_dtype(x), x.shape[-1]
    w = wide_weight(weight, offset, wide)
    shape = x.shape
    dy, x, ds = dy.reshape(-1, n), x.reshape(-1, n), None if ds is None else ds.reshape(-1, n)
    layer_norm = has_mean and not stable
    if layer_norm and x.dtype == wide:
        dx, dw, db = _rows_backward(dy.to(wide), x, stats, w, eps, has_mean, stable, needs)
        return None if dx is None else (dx if ds is None else dx + ds).view(shape), dw, db
    if layer_norm and x.is_cpu and dy.dtype == x.dtype and (ds is None or not needs[0]):
        ones = torch.ones(n, dtype=wide, device=x.device) if w is None else w
        dx, dw, db = sixteen_bit_backward(dy, x, stats[1], stats[0], ones, eps, needs)
        return None if dx is None else dx.view(shape), dw, db
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    sums = [torch.zeros(n, dtype=wide, device=x.device) if need else None for need in needs[1:]]
    # dtypes differ when the residual is wider than y: dy has the dtype of y, x (the sum) the promoted one
    widen = _widener(x, wide), _widener(dy, wide)
    for group in _groups(x) if any(needs) else ():
        f, g = (into(t[group]) for into, t in zip(widen, (x, dy), strict=True))
        part, *totals = _rows_backward(g, f, stats[:, group], w, eps, has_mean, stable, needs)
        if dx is not None and part is not None:
            dx[group] = part if ds is None else part + ds[group]
        for total, more in zip(sums, totals, strict=True):
            if total is not None and more is not None:
                total += more
    return None if dx is None else dx.view(shape), sums[0], sums[1]


def _widener(t: Tensor, wide: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function that widens a group of rows of t into reused memory: fresh pages take longer than the sums."""
    if t.dtype == wide:
        return lambda rows: rows
    memory = torch.empty((_group_rows(t), t.shape[-1]), dtype=wide, device=t.device)
    return lambda rows: memory[: len(rows)].copy_(rows)


def sixteen_bit_forward(x: Tensor, w: Tensor, b: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, mean and 1/σ of layer norm on a CPU: x (..., n) and y in 16 bits, all else in fp32.

    w is required: torch's kernel keeps fp32 statistics of 16-bit rows only beside an fp32 weight. The kernel computes
    x/σ − mean/σ, which does not cancel to 0 in a constant row. Constant rows, and rows far from zero, are computed
    again in fp32.
    """
    n = x.shape[-1]
    y, mean, rstd = torch.native_layer_norm(x, (n,), w, b, eps)
    constant = rstd * math.sqrt(eps) > 0.99
    again = (mean * rstd).abs() > torch.full_like(mean, FAR).masked_fill_(constant, 0.0)
    if bool(again.any()):
        again = again.view(-1)
        y.view(-1, n)[again] = torch.layer_norm(x.reshape(-1, n)[again].float(), (n,), w, b, eps).to(y.dtype)
    return y, mean, rstd


def far_rows(mean: Tensor, rstd: Tensor, eps: float) -> Tensor | None:
    """Which rows (bool, any shape) lie too far from zero for the backward of torch's layer norm; None: none does.

    Torch computes dx = r·g + b·x + c, where b is a difference of row sums and c is about −b·mean. With M = |mean|·r
    standard deviations to zero both differences cancel: u·M of b is lost, and u·M of that in b·x + c, where u is half
    an ulp: (M·u)² of dx. That is 2⁻²⁸ at the limit; a row of one value 10⁶ has M·u = 19, and no digit is right.
    """
    if not mean.is_cpu:
        # torch's CUDA kernel subtracts the mean first, and the host would have to wait for the answer
        return None
    limit = FAR_ROWS[mean.dtype]
    # one look is enough where means are of order 1, as r ≤ 1/√eps; a NaN says nothing about the other rows
    low, high = torch.aminmax(mean)
    near = limit * math.sqrt(eps)
    if low.item() >= -near and high.item() <= near:
        return None
    far = (mean * rstd).abs() > limit
    return far if bool(far.any()) else None


def sixteen_bit_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, eps: float, needs: Needs
) -> Gradients:
    """Layer norm's backward on a CPU: dy and x (rows, n) in 16 bits, the rest in fp32; dw and db in fp32."""
    return _near_and_far(_sixteen_bit_near, dy, x, mean, rstd, w, eps, needs)


def _near_and_far(
    near: Callable[..., Gradients], dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, eps: float,
    needs: Needs,
) -> Gradients:  # fmt: skip
    """Layer norm's backward by `near`, which is torch's kernel, but for `far_rows`."""
    far = far_rows(mean, rstd, eps)
    if far is None:
        return near(dy, x, mean, rstd, w, needs)
    dx = torch.empty_like(x) if needs[0] else None
    vectors: list[Tensor | None] = [None, None]
    for rows, run in ((~far, near), (far, _formula)):
        d, *parts = run(dy[rows], x[rows], mean[rows], rstd[rows], w, needs)
        if dx is not None and d is not None:
            dx[rows] = d.to(x.dtype)
        for i, part in enumerate(parts):
            before = vectors[i]
            vectors[i] = part if part is None or before is None else before + part
    return dx, vectors[0], vectors[1]


def _formula(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, needs: Needs) -> Gradients:
    """Layer norm's backward by the formula in which nothing but x − mean cancels."""
    return rows_formula(dy.to(mean.dtype), x.to(mean.dtype), torch.stack((rstd, mean)), w, 0.0, True, False, needs)


def _sixteen_bit_near(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, needs: Needs) -> Gradients:
    # beside an fp32 weight torch's kernel gives an exact dx of 16-bit rows, but sums dw and db in 16 bits all the same
    if needs[1] or needs[2]:
        if x.numel() <= GROUP:
            dx, dw, db = _native_backward(dy.float(), x.float(), mean, rstd, w, needs)
            return None if dx is None else dx.to(x.dtype), dw, db
        dw, db = _widened_sums(dy, x, mean, rstd, w, needs[1:])
    else:
        dw = db = None
    dx = _native_backward(dy, x, mean, rstd, w, (True, False, False))[0] if needs[0] else None
    return dx, dw, db


def _widened_sums(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    sums = [torch.zeros_like(w) if need else None for need in needs]
    widen_dy, widen_x = _widener(dy, w.dtype), _widener(x, w.dtype)
    for group in _groups(x):
        g, f = widen_dy(dy[group]), widen_x(x[group])
        _, *part = _native_backward(g, f, mean[group], rstd[group], w, (False, *needs))
        for total, more in zip(sums, part, strict=True):
            if total is not None and more is not None:
                total += more
    return sums[0], sums[1]


def _native_backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, needs: Needs) -> Gradients:
    # torch computes db only if it gets a bias, whose values it does not read
    b = (mean.new_empty(x.shape[-1]) if w is None else w) if needs[2] else None
    return torch.ops.aten.native_layer_norm_backward(  # type: ignore[no-any-return]
        dy, x, x.shape[-1:], mean, rstd, w, b, needs
    )


def _rows_backward(
    dy: Tensor, x: Tensor, stats: Tensor, w: Tensor | None, eps: float, has_mean: bool, stable: bool, needs: Needs
) -> Gradients:
    """Return `backward`'s gradients for tensors (rows, n) in fp32 or wider, without ds."""
    if has_mean and not stable:
        return _near_and_far(_native_backward, dy, x, stats[1], stats[0], w, eps, needs)
    return rows_formula(dy, x, stats, w, eps, has_mean, stable, needs)


def rows_formula(
    dy: Tensor, x: Tensor, stats: Tensor, w: Tensor | None, eps: float, has_mean: bool, stable: bool, needs: Needs
) -> Gradients:
    """Return dx, dw and db of rows (rows, n) in fp32 or wider, by the formulas of README.md."""
    n_cols = x.shape[-1]
    rstd = stats[0, :, None]
    n = (x - stats[1, :, None]).mul_(rstd) if has_mean else x * rstd
    dw = (dy * n).sum(0) if needs[1] else None
    db = dy.sum(0) if needs[2] else None
    if not needs[0]:
        return None, dw, db
    g = dy if w is None else dy * w
    total = torch.linalg.vecdot(g, n)[:, None]
    if has_mean:
        g = g - g.mean(-1, keepdim=True)
    dx = torch.addcmul(g, n, total / n_cols, value=-1).mul_(rstd)
    if stable:
        # subtract the gradient of m, shared evenly by the positions that attain it
        signed = stats[2, :, None]
        attained = x == signed
        dx -= attained * (total / attained.sum(-1, keepdim=True).clamp_(min=1) * eps * (signed * rstd) * rstd)
    return dx, dw, db

"""The Lion update without Triton: by tiles on a CPU, in one pass by torch.compile, and plainly for every option."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from onepass.ops._shared.arguments import accumulator

from .definition import Row, dequantize, narrow_, quantize_, reference, vector, widen

# elements per thread of a tile; a tile takes all steps before the next one, so its few megabytes stay in cache
TILE = 1 << 19
# smaller tensors are updated together: one gather costs less than a handful of calls for each
SMALL = 1 << 15
# elements gathered at a time: they stay in cache, and torch copies fewer than 32768 on one thread, without waiting
GATHERED = SMALL - 1
# lengths are multiples of LANES: `addr` rounds differently in the scalar code after its vector loop
LANES = 64


def plain_(
    p: Tensor, g: Tensor, m: Tensor, extra: Tensor | None, row: Row, scales: Tensor | None = None, *,
    differentiable: bool = False, mean: Callable[[Tensor], Tensor] = torch.mean,
) -> None:  # fmt: skip
    """Update one tensor in place by the reference: any layout, any option, tensor hyperparameters without a sync.

    With `scales`, m holds int8 codes. `mean` is that of `reference`. `differentiable` leaves tensors unchanged that
    autograd saved.
    """
    codes = m
    if scales is not None:
        m = dequantize(codes, scales)
    dtype = accumulator(p, g, m)
    # autograd saves factors of products; clone them, as the writes below are in place
    p_now, m_now = (p.clone(), m.clone()) if differentiable else (p, m)
    new_p, new_m = reference(widen(p_now, extra, dtype), g.to(dtype), m_now.to(dtype), row, mean)
    narrow_(p, extra, new_p)
    if scales is None:
        m.copy_(new_m)
    else:
        quantize_(new_m, codes, scales)


@functools.cache
def one_pass(cautious_decay: bool) -> Callable[..., None]:
    """Return the compiled update of (p, g, m, extra, hyper), vectors, in place.

    hyper: lr, weight decay, β1, (1 − β1)·factor, β2, (1 − β2)·factor in the compute dtype. The first call with each
    combination of dtypes takes seconds and needs a C++ compiler. Other lengths and hyperparameters reuse the code.
    """

    def update_(p: Tensor, g: Tensor, m: Tensor, extra: Tensor | None, hyper: Tensor) -> None:
        plain_(p, g, m, extra, Row(*hyper.unbind(), cautious_decay=cautious_decay))  # type: ignore[misc, arg-type]

    return torch.compile(update_, dynamic=True)


# sign(u) is clamp(u·SCALE, ±CLIP) / CLIP, which keeps nan. SCALE lifts the smallest denormal number above CLIP; only
# gradients beyond 1e21 (fp32) overflow
_SCALE = {torch.float32: 2.0**56, torch.float64: 2.0**300}
_CLIP = {torch.float32: 2.0**-96, torch.float64: 2.0**-774}


def _advance_(p: Tensor, g: Tensor, m: Tensor, row: Row, u: Tensor) -> None:
    """Update fp32 or fp64 vectors of a multiple of LANES elements, small enough for the cache; u is workspace.

    Four passes over them: `addr` with a vector of one element computes a·x + b·y in one. Like `_fused_sgd_` it leaves
    out a product with 0, which must turn inf into nan as in `reference`.
    """
    scale, clip = _SCALE[p.dtype], _CLIP[p.dtype]
    one, wide, wide_u = p.new_ones(1), m.unsqueeze(0), u.unsqueeze(0)
    beta, alpha = row.beta1 * scale or 1.0, row.rest1 * row.factor * scale
    torch.addr(wide if row.beta1 else wide * 0.0, one, g, beta=beta, alpha=alpha, out=wide_u)
    (wide if row.beta2 else wide.mul_(0.0)).addr_(one, g, beta=row.beta2 or 1.0, alpha=row.rest2 * row.factor)
    u.clamp_(-clip, clip)
    decay = row.weight_decay * clip or 1e-300  # too small for finite p to show
    if row.cautious_decay:
        u.add_(p * (u.sign() * p.sign() > 0), alpha=decay)
        decay = 0.0
    # p ← p − lr·(update + decay·p), in one pass
    torch._fused_sgd_(
        [p], [u], [], weight_decay=decay, momentum=0.0, lr=row.lr / clip, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False,
    )  # fmt: skip
    # _fused_sgd_ leaves the version counter unchanged, which autograd checks
    torch.autograd.graph.increment_version([p])


def _batches(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield runs of tensors that hold at most GATHERED elements together."""
    first = filled = 0
    for i, n in enumerate(sizes):
        if filled + n > GATHERED:
            yield slice(first, i)
            first, filled = i, 0
        filled += n
    yield slice(first, len(sizes))


# update vectors (parameter, gradient, momentum and, if there is one, extra) in place
Advance = Callable[..., None]


def _in_tiles(row: Row, workspace: Tensor) -> Advance:
    def tile_(p: Tensor, g: Tensor, m: Tensor, extra: Tensor | None = None) -> None:
        wide_p, wide_m = widen(p, extra, workspace.dtype), m.to(workspace.dtype)
        _advance_(wide_p, g.to(workspace.dtype), wide_m, row, workspace[: p.numel()])
        narrow_(p, extra, wide_p)
        narrow_(m, None, wide_m)

    return tile_


def _compiled(row: Row, dtype: torch.dtype) -> Advance:
    update = one_pass(bool(row.cautious_decay))
    rest1, rest2 = row.rest1 * row.factor, row.rest2 * row.factor
    hyper = torch.tensor([row.lr, row.weight_decay, row.beta1, rest1, row.beta2, rest2], dtype=dtype, device="cpu")
    return lambda p, g, m, extra=None: update(p, g, m, extra, hyper)


def _together_(columns: Sequence[list[Tensor]], advance: Advance, grain: int) -> None:
    """Gather short vectors into one of a multiple of `grain` elements, update it, and copy the parts back."""
    sizes = [p.numel() for p in columns[0]]
    buffers = [c[0].new_empty(min(GATHERED, sum(sizes)) + grain) for c in columns]
    for batch in _batches(sizes):
        filled = sum(sizes[batch])
        gathered = [buffer[:filled] for buffer in buffers]
        for part, column in zip(gathered, columns, strict=True):
            torch.cat(column[batch], out=part)
        # elements behind the last tensor are updated too and then ignored
        advance(*(buffer[: filled + -filled % grain] for buffer in buffers))
        for j, column in enumerate(columns):
            if j != 1:  # all but the gradient
                torch.split_with_sizes_copy(gathered[j], sizes[batch], out=column[batch])


def update_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], extras: Sequence[Tensor], row: Row,
    *, compiled: bool = False,
) -> None:  # fmt: skip
    """Update CPU tensors of one param group and one dtype combination in place.

    A parameter and its gradient, momentum and extra must share dense strides. `extras`, the remainders, may be empty.
    `compiled` updates in one pass over memory and needs a C++ compiler.
    """
    grain = LANES * torch.get_num_threads()
    tile = TILE * torch.get_num_threads()
    sizes = [p.numel() for p in params]
    dtype = accumulator(params[0], grads[0], exp_avgs[0])
    n_workspace = GATHERED if compiled else min(tile, max(*sizes, GATHERED))
    n_workspace = min(n_workspace, sum(sizes)) + grain
    in_tiles = advance = _in_tiles(row, params[0].new_empty(n_workspace, dtype=dtype))
    if compiled:
        advance, tile = _compiled(row, dtype), max(sizes)
    columns = [c for c in (params, grads, exp_avgs, extras) if c]
    short = [[vector(c[i]) for i, n in enumerate(sizes) if 0 < n < SMALL] for c in columns]
    for i, n in enumerate(sizes):
        if n < SMALL:
            continue
        n_whole, vectors = n - n % grain, [vector(c[i]) for c in columns]
        for tiles in zip(*(torch.split(v[:n_whole], tile) for v in vectors), strict=True):
            advance(*tiles)
        if n_whole < n:
            for column, v in zip(short, vectors, strict=True):
                column.append(v[n_whole:])
    if short[0]:
        _together_(short, in_tiles, grain)

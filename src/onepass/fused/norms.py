"""RMS norm of all tokens with their scores, or of chosen tokens: by kernels or torch, without checks and autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.ops.routing.rows import as_bytes, on_triton

from . import torch_path


def fits_one_program(d: int) -> bool:
    """Return whether one program can hold a row of d columns."""
    return d <= 4096


def norm_forward(
    x: Tensor, indices: Tensor | None, weight: Tensor | None, vectors: Tensor | None, eps: float, score_eps: float,
    dtype: torch.dtype, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return the RMS norm y (batch, m, d) of all tokens or of those in indices (batch, m), scores, and statistics.

    Scores are (batch, m) for a vector (d,), (R, batch, m) for vectors (R, d), None for None. `mask` (batch, n) is for
    calls without indices: a token that is False there counts as zeros, whatever it holds, and has no gradient.
    """
    if on_triton(x, weight, vectors):
        from . import kernels_norm

        return kernels_norm.forward(  # type: ignore[no-any-return]
            x, indices, as_bytes(mask), weight, vectors, eps, score_eps, dtype
        )  # fmt: skip
    # a caller's autocast would round the scores to 16 bits and thereby change the choice of tokens
    with torch.autocast(x.device.type, enabled=False):
        return torch_path.norm_forward(x, indices, mask, weight, vectors, eps, score_eps, dtype)


def norm_backward_into(
    partials: Tensor | None, dy: Tensor, x: Tensor, indices: Tensor | None, weight: Tensor | None,
    vectors: Tensor | None, stats: Tensor, scores: Tensor | None, ds: Tensor | None, need_x: bool,
    explore_grad: Tensor | None = None, stride: int = 1, mask: Tensor | None = None, residual: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Return dx for each row of :func:`norm_forward`; write partials of the weight's and the vectors' gradients.

    They fill the first columns of `partials`, which is None where they are not needed. `explore_grad`
    (batch, ⌈tokens / stride⌉) is added to ds at each `stride`-th token, for the first vector alone.
    `residual`, in the shape of dx and contiguous, is added to dx.
    """
    if on_triton(x, weight, vectors):
        from . import kernels_norm

        (dx,) = kernels_norm.backward(
            dy, x, indices, as_bytes(mask), weight, vectors, stats, scores, ds, explore_grad, stride, need_x, partials,
            residual,
        )  # fmt: skip
        return dx  # type: ignore[no-any-return]
    dx, grads = torch_path.norm_backward(
        dy, x, indices, mask, weight, vectors, stats, scores, ds, explore_grad, stride, need_x, partials is not None
    )  # fmt: skip
    if partials is not None and grads is not None:
        partials[:, : grads.numel()] = grads.view(1, -1)
    return dx if dx is None or residual is None else (dx + residual).to(dx.dtype)


def norm_partials(x: Tensor, rows: int, weight: Tensor | None, vectors: Tensor | None, more: int = 0) -> Tensor:
    """Return the buffer of partials for :func:`norm_backward_into`; its sum over rows is both gradients.

    `more` columns come after those, for the norms of other rows.
    """
    width = x.shape[-1] + (0 if vectors is None else vectors.numel()) + more
    if not on_triton(x, weight, vectors):
        return torch.empty((1, width), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    from . import kernels_norm

    return torch.empty((kernels_norm.programs(x, rows, x.shape[-1]), width), dtype=torch.float32, device=x.device)


__all__ = ["fits_one_program", "norm_backward_into", "norm_forward", "norm_partials"]

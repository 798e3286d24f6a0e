"""The addition of gated rows and its gradients, by kernels or by torch, without checks and autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core.launch import uses_triton

from . import torch_path


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
    if not indices.numel() or not y.numel():
        return ()
    batch, k = indices.shape[0], indices.shape[-1]
    indices, update = indices.reshape(batch, -1, k), update.reshape(batch, -1, k, y.shape[-1])
    gates = None if gates is None else gates.reshape(batch, -1, k)
    if on_triton(y, update, gates):
        from . import kernels_triton

        kernels_triton.add_rows(
            y, update.contiguous(), None if gates is None else gates.contiguous(), indices.contiguous(), shift
        )
        return ()
    update = update if shift is None else update - shift
    for r in range(indices.shape[1]):
        torch_path.add_rows(y, update[:, r], None if gates is None else gates[:, r], indices[:, r], len(y) // batch)
    return ()


def scatter_backward(
    dy: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, need_u: bool, need_g: bool,
    shift: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of update and gates, None where not needed; dy is that of the result of :func:`add_rows`."""
    need_g = need_g and gates is not None
    if not indices.numel() or not dy.numel():
        return (
            update.new_zeros(update.shape) if need_u else None,
            gates.new_zeros(gates.shape) if need_g and gates is not None else None,
        )
    batch, d = indices.shape[0], dy.shape[-1]
    u, i = update.reshape(batch, -1, d).contiguous(), indices.reshape(batch, -1).contiguous()
    g = None if gates is None else gates.reshape(batch, -1).contiguous()
    if on_triton(dy, update, gates):
        from . import kernels_triton

        du, dg = kernels_triton.add_backward(dy.reshape(batch, -1, d), u, g, i, need_u, need_g, shift)
    else:
        rows = dy.reshape(-1, d)
        u = u if shift is None else u - shift
        du, dg = torch_path.scatter_backward(rows, u, g, i, len(rows) // batch, need_u, need_g)
    return (
        None if du is None else du.view(update.shape),
        None if dg is None or gates is None else dg.view(gates.shape),
    )

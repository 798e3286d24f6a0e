"""The definitions in plain torch: the oracle of the tests."""

from __future__ import annotations

import torch
from torch import Tensor


def _wide(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def score(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return s[..., t] = <x_t, v> / sqrt(mean(x_t²) + eps); with vectors (R, d) s[..., r, t]."""
    wide = _wide(x, weight)
    f = x.to(wide)
    inverse = (f.square().mean(-1) + eps).rsqrt()
    v = weight.to(wide)
    s = (f * v).sum(-1) * inverse if weight.dim() == 1 else (f @ v.mT).mT * inverse[..., None, :]
    return s.to(_wide(x))


def present(indices: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return which indices name a token, and the indices with 0 in place of the others."""
    found = (indices >= 0) & (indices < n)
    return found, indices.where(found, 0)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return y[b, j] = x[b, i_j], zeros where i_j names no token."""
    if not x.shape[1]:
        # an empty sum: zeros that autograd can trace back to x
        return x.sum() * x.new_zeros((*indices.shape, x.shape[-1]))
    found, columns = present(indices.flatten(1), x.shape[1])
    rows = x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))
    return rows.where(found[..., None], 0).view(*indices.shape, x.shape[-1])


def scatter_add(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> Tensor:
    """Return y after y[b, i_j] += gates[b, j]·update[b, j] for each i_j that names a token; one rounding per route."""
    batch = indices.shape[0]
    n = y.numel() // max(1, batch * y.shape[-1])
    if not n or not indices.numel():
        return y.clone()
    out = y.view(batch, n, -1) if y.dim() == 2 else y
    wide = _wide(y, update) if gates is None else _wide(y, update, gates)
    routes = indices.shape[1] if indices.dim() == 3 else 1
    by_route = indices.view(batch, routes, -1)
    moved = update.view(batch, routes, -1, update.shape[-1]).to(wide)
    if gates is not None:
        moved = moved * gates.view(batch, routes, -1, 1).to(wide)
    for r in range(routes):
        found, columns = present(by_route[:, r], n)
        rows = columns[..., None].expand(-1, -1, y.shape[-1])
        out = out.to(wide).scatter_add(1, rows, moved[:, r].where(found[..., None], 0)).to(y.dtype)
    return out.view(y.shape)

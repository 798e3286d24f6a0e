"""`light_heavy`: the two branches of a routed feed-forward as one autograd node, for plain eager PyTorch.

    y = down(gelu(up(normed)))          y_i += gate_i · down'(gelu(up'(rms_norm(x_i))))

Matrix products are torch's. What the node saves over their composition: the gathered tokens are normalised as they are
read, the way back adds in place, weights are cast once and together, their gradients leave the product in their own
dtype, and the host starts some thirty kernels without a node and a dispatch for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.launch import uses_triton

from . import torch_path
from .op import _add_rows, _scatter_backward
from .op_fork import Fork, as_forward_did, norm_forward
from .row_sums import RowSums


class Weights(NamedTuple):
    """Of one branch: two linear layers (hidden, dim) and (dim, hidden), biases or None."""

    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def _cast(weights: tuple[Tensor | None, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Each as `dtype`: as it is, or all copied by one kernel."""
    there = [t for t in weights if t is not None]
    if all(t.dtype == dtype for t in there):
        return weights
    if uses_triton(there[0]) and all(t.is_contiguous() and t.dtype != dtype for t in there):
        from . import kernels_cast

        return kernels_cast.cast(*weights, dtype)  # type: ignore[no-any-return]
    return tuple(None if t is None else t.to(dtype) for t in weights)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Dyᵀ·x in the dtype of the weight, straight from the product's fp32 sums where torch can."""
    if dtype == dy.dtype:
        return torch.mm(dy.t(), x)
    if dy.is_cuda and dtype == torch.float32:
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return torch.mm(dy.t(), x).to(dtype)


class Probe(NamedTuple):
    """What `onepass.nn.explore` asks of a backward: each `every`-th token, its weight, the mask."""

    every: int
    strength: float
    mask: Tensor | None


def _push(dy: Tensor, probe: Probe) -> Tensor:
    """The gradient of the scores of probed tokens: the longer dy is there, the higher they should be."""
    scale = -probe.strength * probe.every
    if not uses_triton(dy):
        return torch_path.probe(dy, probe.mask, probe.every, scale)
    from . import kernels_probe

    mask = None if probe.mask is None else probe.mask.contiguous().view(torch.uint8)
    return kernels_probe.probe(dy, mask, probe.every, scale)  # type: ignore[no-any-return]


def _branch_backward(
    dy: Tensor, x: Tensor, u: Tensor, h: Tensor, up: Tensor, down: Tensor, needs: tuple[bool, ...],
    dtypes: tuple[torch.dtype | None, ...], sums: RowSums, slot: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, up and down; those of their biases go to `sums`, slots `slot` and `slot` + 1."""
    need_x, need_up, need_up_bias, need_down, _ = needs
    d_down = _weight_gradient(dy, h, dtypes[2]) if need_down and dtypes[2] is not None else None
    sums.of(slot + 1, dy)
    dx = d_up = None
    if need_x or need_up or need_up_bias:
        du = sums.gelu_backward(slot, torch.mm(dy, down), u)
        d_up = _weight_gradient(du, x, dtypes[0]) if need_up and dtypes[0] is not None else None
        dx = torch.mm(du, up) if need_x else None
    return dx, d_up, d_down


class _LightHeavy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, normed: Tensor, slot: Tensor, probe: Tensor | None, x: Tensor, gates: Tensor, indices: Tensor,
        heavy_norm: Tensor | None, eps: float, asked: Probe | None, *weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        d, dtype = x.shape[-1], normed.dtype
        cast = _cast(weights, dtype)
        tokens = normed.view(-1, d)
        u = _linear(tokens, cast[0], cast[1])
        h = F.gelu(u)
        # no view of its rows is returned: autograd forbids writing to one that a Function made
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        rows = _linear(h, cast[2], cast[3], out=y.view(-1, d))
        chosen, _, stats = norm_forward(x, indices, heavy_norm, None, eps, 0.0, dtype)
        heavy_u = _linear(chosen.view(-1, d), cast[4], cast[5])
        heavy_h = F.gelu(heavy_u)
        update = _linear(heavy_h, cast[6], cast[7]).view(chosen.shape)
        _add_rows(rows, update, gates, indices)
        ctx.save_for_backward(
            tokens, u, h, chosen, heavy_u, heavy_h, update, stats, x, gates, indices, heavy_norm,
            cast[0], cast[2], cast[4], cast[6],
        )  # fmt: skip
        ctx.dtypes = tuple(None if w is None else w.dtype for w in (*weights, heavy_norm))
        ctx.asked = asked
        return y

    @staticmethod
    @as_forward_did
    def backward(ctx: Any, grads_out: tuple[Tensor | None, ...]) -> Any:
        (dy,) = grads_out
        assert dy is not None
        (
            tokens, u, h, chosen, heavy_u, heavy_h, update, stats, x, gates, indices, heavy_norm,
            up, down, heavy_up, heavy_down,
        ) = ctx.saved_tensors  # fmt: skip
        need_normed, need_slot, need_probe, _, need_gates, _, need_norm, _, _, *needs = ctx.needs_input_grad
        dtypes, d, hidden, heavy_hidden = ctx.dtypes, dy.shape[-1], u.shape[1], heavy_u.shape[1]
        dy = dy.contiguous()
        # biases of the light branch, of the heavy one, weight of its norm
        widths = [hidden, d, heavy_hidden, d, d]
        wanted = (needs[1], needs[3], needs[5], needs[7], need_norm)
        sums = RowSums(dy, len(tokens), [w if need else 0 for w, need in zip(widths, wanted, strict=True)])
        need_chosen = need_slot or need_norm
        need_update = need_chosen or any(needs[4:])
        d_update, d_gates = _scatter_backward(dy, update, gates, indices, need_update, need_gates)
        heavy: tuple[Tensor | None, ...] = (None, None, None)
        d_slot = None
        if need_update:
            heavy = _branch_backward(
                d_update.view(-1, d), chosen.view(-1, d), heavy_u, heavy_h, heavy_up, heavy_down,
                (need_chosen, *needs[4:]), dtypes[4:8], sums, 2,
            )  # fmt: skip
            if heavy[0] is not None:
                d_slot = sums.norm_backward(
                    4, heavy[0].view(chosen.shape), x, indices, heavy_norm, stats, need_slot
                )  # fmt: skip
        light = _branch_backward(
            dy.view(-1, d), tokens, u, h, up, down, (need_normed, *needs[:4]), dtypes[:4], sums, 0
        )  # fmt: skip
        push = _push(dy, ctx.asked) if ctx.asked is not None and need_probe else None
        vectors = zip(sums.finish(), (dtypes[1], dtypes[3], dtypes[5], dtypes[7], dtypes[8]), strict=True)
        up_bias, down_bias, heavy_up_bias, heavy_down_bias, d_norm = (
            None if v is None else v.to(t) for v, t in vectors
        )
        return (
            light[0].view(dy.shape) if light[0] is not None else None, d_slot, push, None,
            d_gates if need_gates else None, None, d_norm, None, None, light[1], up_bias, light[2], down_bias,
            heavy[1], heavy_up_bias, heavy[2], heavy_down_bias,
        )  # fmt: skip


# what Function.apply does beyond this concerns torch.func, which never gets here
_light_heavy: Callable[..., Tensor] = super(torch.autograd.Function, _LightHeavy).apply


def light_heavy(
    fork: Fork, x: Tensor, gates: Tensor, indices: Tensor, light: Weights, heavy: Weights,
    heavy_norm: Tensor | None, eps: float, probe: Probe | None = None,
) -> Tensor:  # fmt: skip
    """Both branches and their gated sum, of x's shape and the dtype of `fork.normed`; see the module's docstring.

    Under the conditions of :func:`fork`; indices (batch, k) with k ≥ 1, unique within a row. With a `probe` (the fork
    has one too) backward pushes the scores of probed tokens up by how much longer dy is there than on average.
    """
    fork.choice.indices = indices
    return _light_heavy(
        fork.normed, fork.slot, fork.probe, x.detach(), gates, indices, heavy_norm, eps, probe, *light, *heavy
    )


__all__ = ["Probe", "Weights", "light_heavy"]

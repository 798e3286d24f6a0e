"""`fork`: one read of the tokens for the light branch's norm and the router's scores, one sum of their gradients.

Plain eager PyTorch only: its gradient for the tokens that a heavy branch takes comes in through a slot, a stand-in that
holds no memory, and joins the rest in place. Elsewhere the same is a norm, `score` and `gather`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.eager import once
from onepass.core.launch import replayed
from onepass.ops.routing.rows import add_rows

from .norms import norm_backward, norm_forward


class Choice:
    """Which tokens were chosen, for each slot: told to the fork once the routers have decided."""

    indices: tuple[Tensor, ...] = ()


class Fork(NamedTuple):
    """What :func:`fork` returns.

    Attributes:
        normed: ``(batch, n, dim)`` of the dtype asked for: RMS-normalised, times the weight.
        scores: ``(batch, n)``, or ``(batch, R, n)`` for vectors ``(R, dim)``, fp32 (fp64 for fp64).
        slots: for each k asked for ``(batch, k, dim)`` without memory of its own: the gradient given to it is added to
            that of the tokens that `choice.indices` names.
        choice: set its `indices`, ``(batch, k)`` for each slot, before backward.
    """

    normed: Tensor
    scores: Tensor
    slots: tuple[Tensor, ...]
    choice: Choice


Backward = Callable[[Any, tuple[Tensor | None, ...]], Any]


def as_forward_did(name: str) -> Callable[[Backward], Callable[..., Any]]:
    """For a Function's backward, given its gradients as a tuple: once, and in forward's dtypes, not in a caller's."""

    def decorate(backward: Backward) -> Callable[..., Any]:
        def outside_autocast(ctx: Any, *grads: Tensor | None) -> Any:
            if torch._C._is_any_autocast_enabled():
                device = next((g.device.type for g in grads if g is not None), "cpu")
                with torch.autocast(device, enabled=False):
                    return backward(ctx, grads)
            return backward(ctx, grads)

        return once(name, outside_autocast, leaves=True)

    return decorate


_add_chosen = replayed(add_rows)


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, vectors: Tensor, eps: float, score_eps: float,
        dtype: torch.dtype, ks: tuple[int, ...], choice: Choice, mask: Tensor | None,
    ) -> Any:  # fmt: skip
        normed, scores, stats = norm_forward(x, None, weight, vectors, eps, score_eps, dtype, mask)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, vectors, stats, scores, mask)
        ctx.choice = choice
        slots = [
            torch.empty_strided((x.shape[0], k, x.shape[2]), (0, 0, 0), dtype=x.dtype, device=x.device) for k in ks
        ]
        return normed, scores, *slots

    @staticmethod
    @as_forward_did("a routed block's norm and scores")
    def backward(ctx: Any, grads_out: tuple[Tensor | None, ...]) -> Any:
        dn, ds, *d_slots = grads_out
        x, weight, vectors, stats, scores, mask = ctx.saved_tensors
        need_x, need_w, need_v = ctx.needs_input_grad[:3]
        if dn is None:
            dn = torch.zeros_like(x)
        of_scores, known = (vectors, scores) if ds is not None else (None, None)
        dx, grads = norm_backward(
            dn.contiguous(), x, None, weight, of_scores, stats, known, None if ds is None else ds.contiguous(), need_x,
            (need_w and weight is not None) or (need_v and ds is not None), mask,
        )  # fmt: skip
        if dx is not None:
            # dx is ours alone: no tensor of the size of x for what the few chosen tokens add
            for i, d_slot in enumerate(d_slots):
                if d_slot is not None:
                    _add_chosen(dx.view(-1, x.shape[-1]), d_slot, None, ctx.choice.indices[i])
        dw = grads[0].to(weight.dtype) if need_w and weight is not None and grads is not None else None
        dv = None
        if need_v and ds is not None and grads is not None:
            dv = grads[1:].to(vectors.dtype).view(vectors.shape)
        return dx, dw, dv, None, None, None, None, None, None


# what Function.apply does beyond this concerns torch.func, which never gets here
_fork: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Fork).apply


def fork(
    x: Tensor, weight: Tensor | None, vectors: Tensor, *, eps: float, score_eps: float, dtype: torch.dtype,
    ks: tuple[int, ...], mask: Tensor | None = None,
) -> Fork:  # fmt: skip
    """RMS norm of ``x`` ``(batch, n, dim)``, in `dtype`, and its scores as :func:`score` gives them; see `Fork`.

    Tokens where the mask ``(batch, n)`` is False count as zeros, whatever they hold.

    Callers make sure that `core.eager.plain` and `fits_one_program` hold, and that the arguments are checked.
    """
    choice = Choice()
    weight = None if weight is None else weight.contiguous()
    normed, scores, *slots = _fork(x, weight, vectors.contiguous(), eps, score_eps, dtype, ks, choice, mask)
    return Fork(normed, scores, tuple(slots), choice)


__all__ = ["Choice", "Fork", "as_forward_did", "fork"]

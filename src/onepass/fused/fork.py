"""`fork`: one read of the tokens for the light branch's norm and the router's scores, one sum of their gradients.

Plain eager PyTorch only: the gradient of the tokens that a heavy branch takes arrives through a slot, a tensor without
memory, and is added in place to the rest. Other calls use a norm, `score` and `gather`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.eager import fast_apply, once
from onepass.core.launch import replayed
from onepass.ops.routing.rows import add_rows

from .norms import norm_backward, norm_forward


class Choice:
    """The chosen tokens of each slot; the caller sets them once the routers have decided."""

    indices: tuple[Tensor, ...] = ()


class Fork(NamedTuple):
    """What :func:`fork` returns.

    Attributes:
        normed: ``(batch, n, dim)`` in the requested dtype: RMS-normalised, times the weight.
        scores: ``(batch, n)``, or ``(batch, R, n)`` for vectors ``(R, dim)``, fp32 (fp64 for fp64).
        slots: one tensor ``(batch, k, dim)`` without memory for each requested k: its gradient is added to that of the
            tokens in `choice.indices`.
        choice: set its `indices`, ``(batch, k)`` for each slot, before backward.
    """

    normed: Tensor
    scores: Tensor
    slots: tuple[Tensor, ...]
    choice: Choice


Backward = Callable[[Any, tuple[Tensor | None, ...]], Any]


def as_forward_did(name: str) -> Callable[[Backward], Callable[..., Any]]:
    """Decorate a Function's backward, which gets its gradients as a tuple: no autocast, no second derivative."""

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
            # add in place, as this node alone holds dx: the few chosen rows need no second tensor of the size of x
            for i, d_slot in enumerate(d_slots):
                if d_slot is not None:
                    _add_chosen(dx.view(-1, x.shape[-1]), d_slot, None, ctx.choice.indices[i])
        dw = grads[0].to(weight.dtype) if need_w and weight is not None and grads is not None else None
        dv = None
        if need_v and ds is not None and grads is not None:
            dv = grads[1:].to(vectors.dtype).view(vectors.shape)
        return dx, dw, dv, None, None, None, None, None, None


_fork: Callable[..., tuple[Tensor, ...]] = fast_apply(_Fork)


def fork(
    x: Tensor, weight: Tensor | None, vectors: Tensor, *, eps: float, score_eps: float, dtype: torch.dtype,
    ks: tuple[int, ...], mask: Tensor | None = None,
) -> Fork:  # fmt: skip
    """Return the RMS norm of ``x`` ``(batch, n, dim)`` in `dtype`, its scores as :func:`score`, and slots; see `Fork`.

    Tokens where the mask ``(batch, n)`` is False count as zeros, whatever they hold.

    Callers guarantee that `core.eager.plain` and `fits_one_program` hold, and that the arguments are checked.
    """
    choice = Choice()
    weight = None if weight is None else weight.contiguous()
    normed, scores, *slots = _fork(x, weight, vectors.contiguous(), eps, score_eps, dtype, ks, choice, mask)
    return Fork(normed, scores, tuple(slots), choice)


__all__ = ["Choice", "Fork", "as_forward_did", "fork"]

"""`fork`: one read of the tokens for the light branch's norm and the router's scores, one sum of their gradients.

Plain eager PyTorch only: its gradient for the tokens that the heavy branch takes comes in through `slot`, a stand-in
that holds no memory, and joins the rest in place. Elsewhere the same is a norm, `score` and `gather`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import torch_path
from .op import _add_rows, _on_triton


class Choice:
    """Which tokens were chosen: told to the fork once the router has decided."""

    indices: Tensor


class Fork(NamedTuple):
    """What :func:`fork` returns.

    Attributes:
        normed: ``(batch, n, dim)`` of the dtype asked for: RMS-normalised, times the weight.
        scores: ``(batch, n)``, or ``(batch, R, n)`` for vectors ``(R, dim)``, fp32 (fp64 for fp64).
        slot: ``(batch, k, dim)`` without memory of its own: the gradient given to it is added to that of the tokens
            that `choice.indices` names.
        probe: ``(batch, ⌈n / every⌉)``, likewise, or None: the gradient given to it is added to that of the scores
            of each `every`-th token as far as the vectors are concerned, not x.
        choice: set its `indices` ``(batch, k)`` before backward.
    """

    normed: Tensor
    scores: Tensor
    slot: Tensor
    probe: Tensor | None
    choice: Choice


def fits(d: int) -> bool:
    """Whether a program can hold a row of d columns."""
    return d <= 4096


def norm_forward(
    x: Tensor, indices: Tensor | None, weight: Tensor | None, vectors: Tensor | None, eps: float, score_eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """RMS norm of all tokens or of those that indices (batch, m) name → y, scores (batch, R, m), statistics."""
    if _on_triton(x, weight, vectors):
        from . import kernels_norm

        return kernels_norm.forward(x, indices, weight, vectors, eps, score_eps, dtype)  # type: ignore[no-any-return]
    return torch_path.norm_forward(x, indices, weight, vectors, eps, score_eps, dtype)


def norm_backward(
    dy: Tensor, x: Tensor, indices: Tensor | None, weight: Tensor | None, vectors: Tensor | None, stats: Tensor,
    scores: Tensor | None, ds: Tensor | None, need_x: bool, need_w: bool, push: Tensor | None = None, every: int = 1,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of :func:`norm_forward`: dx for each of its rows; (1 + R, d) of weight and vectors.

    `push` (batch, tokens / every) is more of ds at each `every`-th token, for the vectors alone.
    """
    if not _on_triton(x, weight, vectors):
        return torch_path.norm_backward(
            dy, x, indices, weight, vectors, stats, scores, ds, push, every, need_x, need_w
        )  # fmt: skip
    from . import kernels_norm

    d, grads = x.shape[-1], 1 + (0 if vectors is None else len(vectors))
    parts = None
    if need_w:
        rows = kernels_norm.programs(x, dy.shape[0] * dy.shape[1], d)
        parts = torch.empty((rows, grads * d), dtype=torch.float32, device=x.device)
    (dx,) = kernels_norm.backward(dy, x, indices, weight, vectors, stats, scores, ds, push, every, need_x, parts)
    return dx, None if parts is None else parts.sum(0).view(grads, d)


def as_forward_did(backward: Callable[[Any, tuple[Tensor | None, ...]], Any]) -> Callable[..., Any]:
    """A Function's backward, given its gradients as a tuple: once, and in the dtypes of forward, not of a caller's."""

    @once_differentiable
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        device = next((g.device.type for g in grads if g is not None), "cpu")
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return backward(ctx, grads)
        return backward(ctx, grads)

    return run


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, vectors: Tensor, eps: float, score_eps: float,
        dtype: torch.dtype, k: int, every: int, choice: Choice,
    ) -> Any:  # fmt: skip
        normed, scores, stats = norm_forward(x, None, weight, vectors.view(-1, x.shape[-1]), eps, score_eps, dtype)
        assert scores is not None
        if vectors.dim() == 1:
            scores = scores.view(x.shape[:2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, vectors, stats, scores)
        ctx.choice, ctx.every = choice, every
        batch, n, d = x.shape
        slot = torch.empty_strided((batch, k, d), (0, 0, 0), dtype=x.dtype, device=x.device)
        if not every:
            return normed, scores, slot, None
        probe = torch.empty_strided((batch, -(-n // every)), (0, 0), dtype=scores.dtype, device=x.device)
        return normed, scores, slot, probe

    @staticmethod
    @as_forward_did
    def backward(ctx: Any, grads_out: tuple[Tensor | None, ...]) -> Any:
        dn, ds, dslot, push = grads_out
        x, weight, vectors, stats, scores = ctx.saved_tensors
        need_x, need_w, need_v = ctx.needs_input_grad[:3]
        if dn is None:
            dn = torch.zeros_like(x)
        if ds is None and push is not None:
            ds = torch.zeros_like(scores)
        with_scores = ds is not None
        shape = (x.shape[0], -1, x.shape[1])
        dx, grads = norm_backward(
            dn.contiguous(), x, None, weight, vectors.view(-1, x.shape[-1]) if with_scores else None, stats,
            scores.view(shape) if with_scores else None, ds.reshape(shape).contiguous() if ds is not None else None,
            need_x, (need_w and weight is not None) or (need_v and with_scores), push, ctx.every,
        )  # fmt: skip
        if dx is not None and dslot is not None:
            # dx is ours alone: no tensor of the size of x for what the few chosen tokens add
            _add_rows(dx.view(-1, x.shape[-1]), dslot, None, ctx.choice.indices)
        dw = grads[0].to(weight.dtype) if need_w and weight is not None and grads is not None else None
        dv = grads[1:].to(vectors.dtype).view(vectors.shape) if need_v and with_scores and grads is not None else None
        return dx, dw, dv, None, None, None, None, None, None


# what Function.apply does beyond this concerns torch.func, which never gets here
_fork: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]] = super(torch.autograd.Function, _Fork).apply


def fork(
    x: Tensor, weight: Tensor | None, vectors: Tensor, *, eps: float, score_eps: float, dtype: torch.dtype, k: int,
    every: int = 0,
) -> Fork:  # fmt: skip
    """RMS norm of ``x`` ``(batch, n, dim)``, in `dtype`, and its scores as :func:`score` gives them; see `Fork`.

    With `every` > 0 there is a probe.
    Only for calls that `core.eager.plain` grants and widths that `fits` grants; the arguments have been checked.
    """
    choice = Choice()
    weight = None if weight is None else weight.contiguous()
    normed, scores, slot, probe = _fork(x, weight, vectors.contiguous(), eps, score_eps, dtype, k, every, choice)
    return Fork(normed, scores, slot, probe, choice)


__all__ = ["Choice", "Fork", "as_forward_did", "fits", "fork", "norm_backward", "norm_forward"]

"""`soft_topk`: checks, registration with the dispatcher, autograd, the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.bind import bind
from onepass.core.launch import as_rows, uses_triton
from onepass.core.register import register, register_backward, register_fake
from onepass.ops._shared import arguments

from . import sharding, torch_path
from .torch_gates import KINDS


def _check(scores: Tensor, k: Tensor | float, eps: Tensor | float, mask: Tensor | None, kind: object) -> None:
    arguments.rows("soft_topk", "scores", scores)
    arguments.positive("soft_topk", "k", k, scores)
    arguments.positive("soft_topk", "eps", eps, scores)
    arguments.mask("soft_topk", mask, scores)
    if kind not in KINDS:
        raise ValueError(f"soft_topk: kind must be one of {', '.join(KINDS)}; got {kind!r}")


def _in_kernels(scores: Tensor, kind: int) -> bool:
    if not uses_triton(scores):
        return False
    from . import kernels_triton

    return kernels_triton.holds(scores, kind)


def forward(
    scores: Tensor,
    k: Tensor | None,
    eps: Tensor | None,
    mask: Tensor | None,
    k_value: float,
    eps_value: float,
    kind: int,
) -> tuple[Tensor, Tensor]:
    """Return gates and solution (..., 2), without checks and autograd, for operators built on them."""
    if _in_kernels(scores, kind):
        from . import kernels_triton

        y, state = kernels_triton.forward(
            as_rows(scores), arguments.per_row(k, scores), arguments.per_row(eps, scores),
            arguments.mask_rows(mask, scores), k_value, eps_value, kind, scores.shape,
        )  # fmt: skip
        return y, state
    rows = arguments.torch_rows(scores, mask)
    k_rows = arguments.torch_column(k, k_value, scores, rows)
    y, state = torch_path.soft_forward(rows, k_rows, arguments.torch_column(eps, eps_value, scores, rows), kind)
    return arguments.from_rows(y, scores), state.view(*scores.shape[:-1], 2)


def backward(
    gy: Tensor,
    scores: Tensor,
    state: Tensor,
    k: Tensor | None,
    eps: Tensor | None,
    mask: Tensor | None,
    eps_value: float,
    kind: int,
    need_scores: bool,
    need_k: bool,
    need_eps: bool,
    into: Tensor | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of scores, k and eps, None where not needed, from the gates' gradient and the solution.

    With `into`, contiguous and like scores, the gradient of the scores is written there.
    """
    if _in_kernels(scores, kind):
        from . import kernels_backward

        ds, dk, deps = kernels_backward.backward(
            as_rows(gy), as_rows(scores), state.contiguous(), arguments.per_row(eps, scores),
            arguments.mask_rows(mask, scores), eps_value, kind, need_scores, need_eps, into,
        )  # fmt: skip
    else:
        rows = arguments.torch_rows(scores, mask)
        eps_rows = arguments.torch_column(eps, eps_value, scores, rows)
        ds, dk, deps = torch_path.soft_backward(
            gy.reshape(rows.shape).to(rows.dtype), rows, state.reshape(len(rows), 2), eps_rows, kind, need_eps
        )
        ds = ds if into is None else into.copy_(ds.view(into.shape))
    return (
        ds.to(scores.dtype).view(scores.shape) if need_scores else None,
        arguments.to_shape(dk, k, scores) if need_k and k is not None else None,
        arguments.to_shape(deps, eps, scores) if need_eps and eps is not None else None,
    )


def backward_chosen(
    g: Tensor,
    indices: Tensor,
    scores: Tensor,
    state: Tensor,
    eps: Tensor | None,
    mask: Tensor | None,
    eps_value: float,
    kind: int,
    need_scores: bool,
    need_eps: bool,
    into: Tensor | None = None,
) -> tuple[Any, ...]:
    """As `backward`, of scores and eps, where only the gates at `indices` (..., k) have a gradient, g (..., k).

    Indices are distinct within a row, or -1: those have none.
    """
    if not _in_kernels(scores, kind):
        g = torch.where(indices >= 0, g, 0.0).to(scores.dtype)
        gy = scores.new_zeros(scores.shape).scatter_add_(-1, indices.clamp(min=0).long(), g)
        ds, _, deps = backward(gy, scores, state, None, eps, mask, eps_value, kind, need_scores, False, need_eps, into)
        return ds, deps
    from . import kernels_chosen

    k = indices.shape[-1]
    ds, deps = kernels_chosen.backward(
        g.reshape(-1, k), indices.contiguous().view(-1, k), as_rows(scores), state.contiguous(),
        arguments.per_row(eps, scores), arguments.mask_rows(mask, scores), eps_value, kind, need_scores, need_eps, into,
    )  # fmt: skip
    return (
        ds.view(scores.shape) if need_scores else None,
        arguments.to_shape(deps, eps, scores) if need_eps and eps is not None else None,
    )


forward_op = register("soft_topk", forward, sharding.forward)
backward_op = register_backward("soft_topk_backward", backward, sharding.backward, of=("scores", "k", "eps"))


@register_fake(forward_op)
def _(
    scores: Tensor,
    k: Tensor | None,
    eps: Tensor | None,
    mask: Tensor | None,
    k_value: float,
    eps_value: float,
    kind: int,
) -> tuple[Tensor, Tensor]:
    _check(scores, k_value if k is None else k, eps_value if eps is None else eps, mask, KINDS[kind])
    state = scores.new_empty((*scores.shape[:-1], 2), dtype=arguments.accumulator(scores))
    return scores.new_empty(scores.shape), state


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, k, eps, mask, _, eps_value, kind = inputs
    ctx.save_for_backward(scores, output[1], k, eps, mask)
    ctx.options = eps_value, kind
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, run: Any, gy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if gy is None:
        return (None,) * 7
    scores, state, k, eps, mask = ctx.saved_tensors
    needs = (
        ctx.needs_input_grad[0],
        k is not None and ctx.needs_input_grad[1],
        eps is not None and ctx.needs_input_grad[2],
    )
    grads = run(gy, scores, state, k, eps, mask, *ctx.options, *needs)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None)


_call = bind(
    name="soft_topk", forward=forward, forward_op=forward_op, backward=backward, backward_op=backward_op,
    save=_save, gradients=_gradients,
)  # fmt: skip


def soft_topk(
    scores: Tensor,
    k: Tensor | float,
    *,
    eps: Tensor | float = 0.3,
    mask: Tensor | None = None,
    kind: str = "capped_exp",
) -> Tensor:
    r"""Return a differentiable top-k of each row: gates in [0, 1] that sum to ``k`` over the last dimension.

    .. math:: y_i = \varphi\!\left(\frac{s_i + c}{\varepsilon}\right), \qquad
              c \text{ such that } \sum_i y_i = k

    ============== ============================== =======================================================
    ``kind``       φ(u)                           known as
    ============== ============================== =======================================================
    ``capped_exp`` min(1, eᵘ)                     coordinate descent (CoLT5, ALIGNER) at convergence
    ``sigmoid``    1/(1 + e⁻ᵘ)                    SOFT top-k, entropic optimal transport
    ``laplace``    CDF of the Laplace distribution LapSum
    ``clamp``      clamp(u + ½, 0, 1)             budget sparsemax; exact zeros and ones
    ============== ============================== =======================================================

    A safeguarded Newton method solves for the threshold: exactly for ``capped_exp`` and ``clamp``, whose active sets
    are finite, to rounding for the others. One implicit backward gives the gradients of all inputs.

    Args:
        scores: ``(..., n)``, fp32, fp16, bf16 or fp64, any strides, any n. Computed in fp32 (fp64 for fp64).
        k: how many to choose, > 0, fractions allowed: a number or a tensor that broadcasts to ``scores.shape[:-1]``.
        eps: temperature, > 0: a number or a tensor that broadcasts to ``scores.shape[:-1]``. Small eps gives gates near
            0 or 1. The default is a third of the deviation of scores with unit variance, as `onepass.nn.Router` has it.
        mask: bool, broadcasts to ``scores``; True = may be chosen. Masked entries get gate 0 and gradient 0,
            but for rows with a NaN, below.
        kind: the gate function, see above.

    Returns:
        Gates with the shape and dtype of ``scores``. A row with at most ``k`` valid entries has 1 on all of them and
        zero gradients; a row without valid entries is 0. Scores of -inf count as masked. Scores of +inf are saturated;
        if there are more than k, they share k evenly. A NaN among the valid scores makes all gates of its row NaN,
        the masked ones as well; a NaN among the masked scores changes nothing.

    Gates are within 1e-4 of those of float64 for the same scores and for ``k`` and ``eps`` rounded to fp32, also for k
    near n (tested up to n - ½). fp32 rounds k to steps of 1/64 at 200 000.

    Gradients flow to ``scores`` and to tensor ``k`` and ``eps`` (in their own shape and dtype), and are the same bit
    for bit from run to run.

    Raises:
        TypeError: scores is not a floating-point tensor, mask is not bool, or k or eps is not a number or real tensor.
        ValueError: shapes don't broadcast, devices differ, kind is unknown, or k or eps is not > 0. Tensors k and eps
            on a GPU are not checked, as the host would have to wait: there k ≤ 0 or eps ≤ 0 gives NaN rows.
        NotImplementedError: for second derivatives and forward-mode derivatives.

    Source: CoLT5 (arXiv 2303.09752), ALIGNER (2211.01267), SOFT (2002.06504), LapSum (2503.06242).

    Example:
        >>> import torch, onepass
        >>> y = onepass.soft_topk(torch.tensor([3.0, 1.0, 2.0, -1.0]), 2, eps=0.5)
        >>> [round(v, 3) for v in y.tolist()], round(y.sum().item(), 3)
        ([1.0, 0.119, 0.879, 0.002], 2.0)
    """
    _check(scores, k, eps, mask, kind)
    k_tensor, k_value = arguments.split_count(k, scores)
    eps_tensor, eps_value = arguments.split(eps)
    return _call(scores, k_tensor, eps_tensor, mask, k_value, eps_value, KINDS.index(kind))  # type: ignore[no-any-return]


__all__ = ["KINDS", "backward", "backward_chosen", "backward_op", "forward", "forward_op", "soft_topk"]

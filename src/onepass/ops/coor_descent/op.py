"""`coor_descent`: checks, registration with the dispatcher, autograd, the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.bind import bind
from onepass.core.launch import as_rows, uses_triton
from onepass.core.register import register, register_backward, register_fake
from onepass.ops._shared import arguments

from . import sharding, torch_path


def _check(
    scores: Tensor,
    k: Tensor | float,
    mask: Tensor | None,
    n_iters: int,
    eps: float,
    eps_init: float | None,
    eps_decay: float,
) -> None:
    arguments.scores("coor_descent", scores)
    arguments.whole("coor_descent", "n_iters", n_iters, 1)
    arguments.positive("coor_descent", "k", k, scores)
    for name, value in (("eps", eps), ("eps_init", eps if eps_init is None else eps_init), ("eps_decay", eps_decay)):
        arguments.number("coor_descent", name, value, arguments.LARGEST)
    arguments.mask("coor_descent", mask, scores)


def _in_kernels(scores: Tensor) -> bool:
    if not uses_triton(scores):
        return False
    from . import kernels_triton

    return kernels_triton.holds(scores)


def _forward(
    scores: Tensor,
    k: Tensor | None,
    mask: Tensor | None,
    k_value: float,
    n_iters: int,
    eps: float,
    eps_init: float,
    eps_decay: float,
    want_trace: bool,
) -> tuple[Tensor, Tensor]:
    if _in_kernels(scores):
        from . import kernels_triton

        y, trace = kernels_triton.forward(
            as_rows(scores), arguments.per_row(k, scores), arguments.mask_rows(mask, scores),
            k_value, n_iters, eps, eps_init, eps_decay, want_trace, scores.shape,
        )  # fmt: skip
        return y, trace
    rows = arguments.torch_rows(scores, mask)
    epsilons = torch_path.schedule(n_iters, eps, eps_init, eps_decay)
    y, trace = torch_path.forward(rows, arguments.torch_column(k, k_value, scores, rows), epsilons, want_trace)
    return arguments.from_rows(y, scores), trace.view(*scores.shape[:-1], trace.shape[-1])


def _backward(
    gy: Tensor,
    scores: Tensor,
    trace: Tensor,
    k: Tensor | None,
    mask: Tensor | None,
    k_value: float,
    n_iters: int,
    eps: float,
    eps_init: float,
    eps_decay: float,
    need_scores: bool,
    need_k: bool,
) -> tuple[Tensor | None, Tensor | None]:
    if _in_kernels(scores):
        from . import kernels_backward

        ds, dk = kernels_backward.backward(
            as_rows(gy), as_rows(scores), trace.contiguous(), arguments.per_row(k, scores),
            arguments.mask_rows(mask, scores), k_value, n_iters, eps, eps_init, eps_decay,
        )  # fmt: skip
    else:
        rows = arguments.torch_rows(scores, mask)
        k_rows = arguments.torch_column(k, k_value, scores, rows)
        epsilons = torch_path.schedule(n_iters, eps, eps_init, eps_decay)
        trace = trace.reshape(len(rows), 2 * n_iters)
        ds, dk = torch_path.backward(gy.reshape(rows.shape).to(rows.dtype), rows, trace, k_rows, epsilons)
    return (
        ds.to(scores.dtype).view(scores.shape) if need_scores else None,
        arguments.to_shape(dk, k, scores) if need_k and k is not None else None,
    )


forward_op = register("coor_descent", _forward, sharding.forward)
backward_op = register_backward("coor_descent_backward", _backward, sharding.backward, of=("scores", "k"))


@register_fake(forward_op)
def _(
    scores: Tensor, k: Tensor | None, mask: Tensor | None, k_value: float, n_iters: int, *rest: Any
) -> tuple[Tensor, Tensor]:
    *schedule, want_trace = rest
    _check(scores, k_value if k is None else k, mask, n_iters, *schedule)
    shape = (*scores.shape[:-1], 2 * n_iters if want_trace else 0)
    return scores.new_empty(scores.shape), scores.new_empty(shape, dtype=arguments.accumulator(scores))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, k, mask, *options, _ = inputs
    ctx.save_for_backward(scores, output[1], k, mask)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, run: Any, gy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if gy is None:
        return (None,) * 9
    scores, trace, k, mask = ctx.saved_tensors
    needs = (ctx.needs_input_grad[0], k is not None and ctx.needs_input_grad[1])
    grads = run(gy, scores, trace, k, mask, *ctx.options, *needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 7


_call = bind(
    name="coor_descent", forward=_forward, forward_op=forward_op, backward=_backward, backward_op=backward_op,
    save=_save, gradients=_gradients,
)  # fmt: skip


def _wants_trace(scores: Tensor, k: Tensor | None) -> bool:
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and (scores.requires_grad or (k is not None and k.requires_grad))


def coor_descent(
    scores: Tensor,
    *,
    n_iters: int,
    k: Tensor | float,
    eps: float = 0.1,
    eps_init: float | None = None,
    eps_decay: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Return the gates after exactly ``n_iters`` steps of coordinate descent towards a soft top-k of each row.

    With :math:`b = -s` at the start, each step does

    .. math:: a \leftarrow \varepsilon_t\,(\log k - \operatorname{logsumexp}((s + b)/\varepsilon_t)), \qquad
              b \leftarrow -\operatorname{relu}(s + a),

    then ``eps`` decays: :math:`\varepsilon_1 = \max(\text{eps\_init}, \text{eps})`,
    :math:`\varepsilon_{t+1} = \max(\varepsilon_t \cdot \text{eps\_decay}, \text{eps})`. The gates are
    :math:`y = \exp((s + a + b)/\varepsilon_{T+1})`.

    This is the published operator, step for step. It has not converged for small ``eps``: at T = 20, eps = 0.03 a row
    of 4096 normal scores sums to 0.77 k (eps from 4, decay 0.7) or to 2.1 k and more (constant eps). For gates that sum
    to ``k`` use :func:`onepass.soft_topk`.

    Args:
        scores: ``(..., n)``, fp32, fp16, bf16 or fp64, any strides, any n. Computed in fp32 (fp64 for fp64).
        n_iters: number of steps T ≥ 1.
        k: how many to choose, > 0: a number or a tensor that broadcasts to ``scores.shape[:-1]``.
        eps: final temperature, a number > 0.
        eps_init: first temperature; default ``eps``.
        eps_decay: factor on the temperature after every step, the last included.
        mask: bool, broadcasts to ``scores``; True = may be chosen. Masked entries get gate 0 and gradient 0.

    Returns:
        Gates in [0, 1] with the shape and dtype of ``scores``. Scores of -inf count as masked, those of
        +inf as saturated; a NaN among the valid scores makes its row NaN.

    Gradients flow to ``scores`` and a tensor ``k``. Backward keeps the scores and 2T numbers per row; it repeats no
    step.

    Raises:
        TypeError: scores is not a floating-point tensor, mask is not bool, or an option is not a number.
        ValueError: shapes don't broadcast, devices differ, n_iters < 1, k, eps, eps_init or eps_decay is not > 0, or
            one of the last three is infinite. A tensor k on a GPU is not checked: k ≤ 0 gives NaN rows.
        NotImplementedError: for second derivatives and forward-mode derivatives.

    Source: Wright, Coordinate descent algorithms (arXiv 1502.04759); CoLT5 (2303.09752); ε-scaling as in 2304.04947.

    Example:
        >>> import torch, onepass
        >>> y = onepass.coor_descent(torch.tensor([3.0, 1.0, 2.0, -1.0]), n_iters=20, k=2, eps=0.5)
        >>> [round(v, 3) for v in y.tolist()]
        [1.0, 0.12, 0.89, 0.002]
    """
    _check(scores, k, mask, n_iters, eps, eps_init, eps_decay)
    k_tensor, k_value = arguments.split_count(k, scores)
    first = float(eps if eps_init is None else eps_init)
    return _call(  # type: ignore[no-any-return]
        scores, k_tensor, mask, k_value, n_iters, float(eps), first, float(eps_decay), _wants_trace(scores, k_tensor)
    )

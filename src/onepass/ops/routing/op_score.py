"""`score`: registration with the dispatcher, autograd, the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.bind import bind
from onepass.core.launch import uses_triton
from onepass.core.register import register, register_backward, register_fake

from . import arguments, sharding, torch_path


def _vectors(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 2 else weight[None]


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    vectors = _vectors(weight)
    if uses_triton(x) and x.numel():
        from . import kernels_score

        scores, inverse = kernels_score.forward(x, vectors.contiguous(), eps)
    else:
        scores, inverse = torch_path.score_forward(x, vectors, eps)
    return (scores if weight.dim() == 2 else scores[:, 0]).contiguous(), inverse


def _backward(
    ds: Tensor, x: Tensor, weight: Tensor, scores: Tensor, inverse: Tensor, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    vectors = _vectors(weight)
    shape = (x.shape[0], len(vectors), x.shape[1])
    ds, scores, inverse = ds.reshape(shape).contiguous(), scores.reshape(shape).contiguous(), inverse.contiguous()
    if uses_triton(x) and x.numel():
        from . import kernels_score

        dx, dw = kernels_score.backward(ds, x, vectors.contiguous(), scores, inverse, need_x, need_w)
    else:
        dx, dw = torch_path.score_backward(ds, x, vectors, scores, inverse, need_x, need_w)
    return dx, None if dw is None else dw.view(weight.shape)


forward_op = register("routing_score", _forward, sharding.score)
backward_op = register_backward("routing_score_backward", _backward, sharding.score_backward, of=("x", "weight"))


@register_fake(forward_op)
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    arguments.score(x, weight, eps)
    dtype = torch.promote_types(x.dtype, torch.float32)
    shape = (x.shape[0], *weight.shape[:-1], x.shape[1])
    return x.new_empty(shape, dtype=dtype), x.new_empty(x.shape[:2], dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], inputs[1], *output)


def _gradients(ctx: Any, run: Any, ds: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if ds is None:
        return None, None, None
    need_x, need_w = ctx.needs_input_grad[:2]
    dx, dw = run(ds, *ctx.saved_tensors, need_x, need_w)
    return dx if need_x else None, dw if need_w else None, None


_call = bind(
    name="score", forward=_forward, forward_op=forward_op, backward=_backward, backward_op=backward_op,
    save=_save, gradients=_gradients,
)  # fmt: skip


def score(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    r"""Score every token: the dot product of its RMS-normalised row with a learned vector, in one read of ``x``.

    .. math:: s_t = \Big\langle \frac{x_t}{\sqrt{\mathrm{mean}(x_t^2) + \varepsilon}}, v\Big\rangle

    With a random v of length 1, scores have a standard deviation of 1 at every width.

    Args:
        x: ``(batch, n, dim)``, fp32, fp16, bf16 or fp64, any strides.
        weight: v, ``(dim,)``, or ``(R, dim)`` with R ≤ 16 for the scores of R routes from one read of ``x``.
        eps: ε, ≥ 0.

    Returns:
        ``(batch, n)``, or ``(batch, R, n)`` for R vectors, fp32 (fp64 for fp64 x).

    Gradients of ``x`` and ``weight`` come from one pass over x, the same bit for bit from run to run; only those that
    are needed are computed. A token whose score gets a gradient of exactly 0, such as a masked one, adds nothing to
    the gradient of the vectors whatever it holds, NaN included.

    Raises:
        TypeError: x or weight is not a floating-point tensor.
        ValueError: shapes don't fit, R is out of range, eps < 0, or the tensors are on different devices.
        NotImplementedError: for second and forward-mode derivatives.

    Source: CoLT5 (arXiv:2303.09752) scores with the raw dot product; the normalisation keeps ε of the gates meaningful.

    Example:
        >>> import torch
        >>> from onepass.ops.routing.op import score
        >>> score(torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), torch.tensor([1.0, 0.0]))
        tensor([[0.8485, 0.0000]])
    """
    arguments.score(x, weight, eps)
    return _call(x, weight, float(eps))  # type: ignore[no-any-return]

"""`coor_descent`: its declaration and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.eager import plain
from onepass.core.launch import import_later, uses_triton
from onepass.ops._shared import arguments
from onepass.ops._shared.declare import COUNT, MASK, ROWS, Role, declare

from . import definition

_kernels = import_later(".kernels", __package__)


def _way(scores: Tensor, *_: Any) -> Any:
    return _kernels() if uses_triton(scores) and _kernels().holds(scores) else definition


_call, forward, backward, forward_op, backward_op = declare(
    "coor_descent",
    {"scores": ROWS, "k": COUNT, "mask": MASK, "n_iters": Role(int), "eps": Role(float), "eps_init": Role(float),
     "eps_decay": Role(float), "want_trace": Role(bool)},
    _way, state=lambda n_iters, *rest: 2 * n_iters if rest[-1] else 0,
)  # fmt: skip


def _wants_trace(scores: Tensor, k: Tensor | float) -> bool:
    if torch.compiler.is_exporting() or not (torch.compiler.is_compiling() or plain(scores)):
        return True  # a recorded program may be differentiated later
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (scores, k))


def coor_descent(
    scores: Tensor, *, n_iters: int, k: Tensor | float, eps: float = 0.1, eps_init: float | None = None,
    eps_decay: float = 1.0, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r"""Return the gates after exactly ``n_iters`` steps of coordinate descent towards a soft top-k of each row.

    With :math:`b = -s` at the start, each step does

    .. math:: a \leftarrow \varepsilon_t\,(\log k - \operatorname{logsumexp}((s + b)/\varepsilon_t)), \qquad
              b \leftarrow -\operatorname{relu}(s + a),

    then ``eps`` decays: :math:`\varepsilon_1 = \max(\text{eps\_init}, \text{eps})`,
    :math:`\varepsilon_{t+1} = \max(\varepsilon_t \cdot \text{eps\_decay}, \text{eps})`. The gates are
    :math:`y = \exp((s + a + b)/\varepsilon_{T+1})`.

    This is the published operator, step for step. At small ``eps`` it has not converged; :func:`onepass.soft_topk` has.

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

    Gradients flow to ``scores`` and a tensor ``k``. Backward repeats no step: it keeps the scores and 2T numbers a row.

    Raises:
        TypeError: scores is not a floating-point tensor, mask is not bool, or an option is not a number.
        ValueError: shapes don't broadcast, devices differ, n_iters < 1, k, eps, eps_init or eps_decay is not > 0, or
            one of the last three is infinite. A tensor k on a GPU is not checked: k ≤ 0 gives NaN rows.
        NotImplementedError: for second derivatives and forward-mode derivatives.

    Source: Wright, Coordinate descent algorithms (arXiv 1502.04759); CoLT5 (2303.09752); CoDA (2304.04947).

    Example:
        >>> import torch, onepass
        >>> y = onepass.coor_descent(torch.tensor([3.0, 1.0, 2.0, -1.0]), n_iters=20, k=2, eps=0.5)
        >>> [round(v, 3) for v in y.tolist()]
        [1.0, 0.12, 0.89, 0.002]
    """
    arguments.whole("coor_descent", "n_iters", n_iters, 1)
    eps_init = eps if eps_init is None else eps_init
    for name, value in (("eps", eps), ("eps_init", eps_init), ("eps_decay", eps_decay)):
        arguments.number("coor_descent", name, value, arguments.LARGEST)
    return _call(scores, k, mask, n_iters, float(eps), float(eps_init), float(eps_decay), _wants_trace(scores, k))  # type: ignore[no-any-return]

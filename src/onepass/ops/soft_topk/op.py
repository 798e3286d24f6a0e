"""`soft_topk`: its declaration, the gradient of chosen entries, the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.launch import as_rows, import_later, uses_triton
from onepass.ops._shared import arguments
from onepass.ops._shared.declare import COUNT, MASK, PER_ROW, ROWS, Role, declare

from . import definition
from .definition import KINDS as KINDS

_kernels = import_later(".kernels", __package__)


def _way(scores: Tensor, *numbers: Any) -> Any:
    return _kernels() if uses_triton(scores) and _kernels().holds(scores, numbers[-1]) else definition


_call, forward, backward, forward_op, backward_op = declare(
    "soft_topk", {"scores": ROWS, "k": COUNT, "eps": PER_ROW, "mask": MASK, "kind": Role(int)}, _way,
    state=lambda kind: 2,
)  # fmt: skip


def backward_chosen(
    g: Tensor, indices: Tensor, scores: Tensor, state: Tensor, eps: Tensor | None, mask: Tensor | None,
    eps_value: float, kind: int, need_scores: bool, need_eps: bool, into: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of scores and eps where only the gates at `indices` (..., k) have a gradient, g (..., k).

    Indices are distinct within a row; -1 stands for no entry.
    """
    if _way(scores, kind) is definition:
        g = torch.where(indices >= 0, g, 0.0).to(scores.dtype)
        gy = scores.new_zeros(scores.shape).scatter_add_(-1, indices.clamp(min=0).long(), g)
        needs = need_scores, False, need_eps
        ds, _, deps = backward(gy, scores, None, eps, mask, state, 1.0, eps_value, kind, *needs)
        return ds if into is None or ds is None else into.copy_(ds), deps
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


def soft_topk(
    scores: Tensor, k: Tensor | float, *, dim: int = -1, eps: Tensor | float = 0.3, mask: Tensor | None = None,
    kind: str = "capped_exp",
) -> Tensor:  # fmt: skip
    r"""Return a differentiable top-k of each row: gates in [0, 1] that sum to ``k`` over one dimension.

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
        scores: ``(..., n)``, or 0-d, fp32, fp16, bf16 or fp64, any strides, any n. Computed in fp32 (fp64 for fp64).
        k: how many to choose, > 0, fractions allowed: a number or a tensor that broadcasts to ``scores.shape[:-1]``.
        dim: the dimension of rows. Where it is not the last, ``scores.shape[:-1]`` is the shape without it.
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
    if kind not in KINDS:
        raise ValueError(f"soft_topk: kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if dim != -1 or (isinstance(scores, Tensor) and not scores.dim()):
        rows, mask, back = arguments.along("soft_topk", dim, scores, mask)
        return back(soft_topk(rows, k, eps=eps, mask=mask, kind=kind))
    return _call(scores, k, eps, mask, KINDS.index(kind))  # type: ignore[no-any-return]

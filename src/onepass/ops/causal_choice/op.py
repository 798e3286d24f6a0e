"""`causal_choice`: argument checks, registration with the dispatcher, autograd, the public function."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.bind import bind
from onepass.core.launch import cdiv, uses_triton
from onepass.core.register import register, register_fake

from . import torch_path

# past tokens from which a threshold is taken
MEMORY = 2048


class CausalChoice(NamedTuple):
    """What :func:`causal_choice` returns; both are ``(batch, min(k, n))``."""

    indices: Tensor
    gates: Tensor


def _check(scores: Tensor, mask: Tensor | None, k: int, eps: float, block: int, memory: int) -> None:
    check.floating("causal_choice", "scores", scores)
    if scores.dim() != 2:
        raise ValueError(f"causal_choice: scores must be (batch, n), got {tuple(scores.shape)}")
    for name, value in (("k", k), ("block", block), ("memory", memory)):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"causal_choice: {name} must be an int, got {type(value).__name__}")
    if k < 0:
        raise ValueError(f"causal_choice: k must be ≥ 0, got {k}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"causal_choice: eps must be a number, got {type(eps).__name__}")
    if not 0 < eps < math.inf:
        raise ValueError(f"causal_choice: eps must be finite and > 0, got {eps}")
    check_sizes("causal_choice", block, memory)
    if mask is not None:
        check.tensor("causal_choice", "mask", mask)
        if mask.dtype != torch.bool:
            raise TypeError(f"causal_choice: mask must be bool (True = real token), got {mask.dtype}")
        if mask.shape != scores.shape:
            raise ValueError(f"causal_choice: mask must be {tuple(scores.shape)} as scores, got {tuple(mask.shape)}")
        check.same_device("causal_choice", "mask", mask, "scores", scores)


def check_sizes(who: str, block: int, memory: int) -> None:
    """Refuse sizes of block and memory that no choice can have."""
    if block < 1:
        raise ValueError(f"{who}: block must be ≥ 1, got {block}")
    if memory < block or memory % block:
        raise ValueError(f"{who}: memory must be a positive multiple of block = {block}, got {memory}")


def _fused(scores: Tensor, block: int, memory: int) -> bool:
    if not uses_triton(scores):
        return False
    from . import kernels_triton

    return kernels_triton.fits(block, memory)


def forward(
    scores: Tensor, mask: Tensor | None, k: int, eps: float, block: int, memory: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(gates, indices, thresholds, starts), the last two for `backward`.

    Without checks and autograd, for nodes that go on from there; 1 ≤ k ≤ n, batch ≥ 1.
    """
    if _fused(scores, block, memory):
        from . import kernels_triton

        return kernels_triton.forward(scores, mask, k, eps, block, memory)
    return torch_path.forward(scores, mask, k, eps, block, memory)


def backward(
    g_gates: Tensor, scores: Tensor, mask: Tensor | None, gates: Tensor, indices: Tensor, thresholds: Tensor,
    starts: Tensor, eps: float, block: int, memory: int,
) -> Tensor:  # fmt: skip
    """Gradient of the scores, from that of the gates and what `forward` returned."""
    if _fused(scores, block, memory):
        from . import kernels_triton

        return kernels_triton.backward(g_gates, scores, mask, gates, thresholds, starts, eps, block)
    return torch_path.backward(g_gates, scores, mask, gates, indices, thresholds, eps, block)


forward_op = register("causal_choice", forward)
backward_op = register("causal_choice_backward", backward)


@register_fake(forward_op)
def _(
    scores: Tensor, mask: Tensor | None, k: int, eps: float, block: int, memory: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, n = scores.shape
    blocks = cdiv(n, block)
    return (
        scores.new_empty((batch, k)),
        scores.new_empty((batch, k), dtype=torch.int64),
        scores.new_empty((batch, block + blocks - 1), dtype=torch.promote_types(scores.dtype, torch.float32)),
        scores.new_empty((batch, blocks + 1), dtype=torch.int32),
    )


@register_fake(backward_op)
def _(
    g_gates: Tensor, scores: Tensor, mask: Tensor | None, gates: Tensor, indices: Tensor, thresholds: Tensor,
    starts: Tensor, eps: float, block: int, memory: int,
) -> Tensor:  # fmt: skip
    return scores.new_empty(scores.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, mask, _, *ctx.options = inputs
    ctx.save_for_backward(scores, mask, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, run: Any, g_gates: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    ds = None if g_gates is None else run(g_gates, *ctx.saved_tensors, *ctx.options)
    return ds, None, None, None, None, None


_call = bind(
    name="causal_choice", forward=forward, forward_op=forward_op, backward=backward, backward_op=backward_op,
    save=_save, gradients=_gradients, n_public=2, replay=True,
)  # fmt: skip


def choose(scores: Tensor, k: int, eps: float, block: int, memory: int, mask: Tensor | None) -> CausalChoice:
    """What causal_choice does once its arguments are checked."""
    batch, n = scores.shape
    k = min(k, n)
    if k == 0 or batch == 0:
        gates = scores.new_zeros((batch, k))
        return CausalChoice(gates.long(), gates)
    gates, indices = _call(scores, mask, k, float(eps), block, memory)
    return CausalChoice(indices, gates)


def causal_choice(
    scores: Tensor,
    k: int,
    *,
    eps: float = 0.3,
    block: int = 128,
    memory: int = MEMORY,
    mask: Tensor | None = None,
) -> CausalChoice:
    r"""At most k tokens of each row, each chosen and gated by what is known when it is read.

    Token i of block b has for threshold the score that the share k/n of the past exceeds:

    .. math::
        t_i = \text{the score of rank } \lfloor \tfrac kn\,|P_b| \rfloor \text{ (from 0) among } P_b,\qquad
        g_i = \sigma\!\big((s_i - t_i)/\varepsilon\big)

    where P_b are the real tokens in the last ``memory`` tokens before block b; in the first block, those before i
    itself. Tokens above their threshold (without a past: all) are taken in the order in which they arrive, as long as
    the number taken up to the end of block b stays within ⌈k·(tokens up to there)/n⌉.

    The gradient is that of a threshold which keeps its share of the past: from the second block on it follows the
    mean of the scores before the block, weighted by the slopes σ′((s − t)/ε) of their gates.

    Args:
        scores: ``(batch, n)``, fp32, fp16, bf16 or fp64, any strides.
        k: how many to choose, an int ≥ 0; at most n are.
        eps: temperature ε of the gates, a finite number > 0.
        block: tokens that share a threshold, ≥ 1.
        memory: how far back it looks, in tokens; a multiple of block.
        mask: ``(batch, n)`` bool, True at real tokens; others are never chosen and count in no threshold.

    Returns:
        ``CausalChoice(indices, gates)``, each ``(batch, min(k, n))``: columns in ascending order, int64, then −1;
        gates of the scores' dtype, then 0. NaN counts as +inf in a threshold, and is never chosen.

    Raises:
        TypeError: scores is no floating-point tensor, a size no int, eps no number, mask not bool.
        ValueError: a size or eps is out of range, or shapes don't fit.
        NotImplementedError: a second derivative, or a forward-mode one, is asked for.

    Source: expert choice made causal, after Mixture-of-Depths (arXiv:2404.02258).

    Example:
        >>> import torch
        >>> from onepass.ops.causal_choice.op import causal_choice
        >>> causal_choice(torch.tensor([[1.0, 0.0, 3.0, 2.0, 5.0, 4.0]]), 3, block=2, memory=4).indices
        tensor([[0, 2, 4]])
    """
    _check(scores, mask, k, eps, block, memory)
    return choose(scores, k, eps, block, memory, mask)


__all__ = ["MEMORY", "CausalChoice", "backward", "backward_op", "causal_choice", "check_sizes", "choose", "forward"]

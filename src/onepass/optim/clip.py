"""Clip gradients by their norm without writing them: the next step of the optimizer multiplies by the coefficient."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onepass.core import check
from onepass.optim.lion import Lion
from onepass.optim.sharded import whole

_MAX_NORMS: dict[tuple[torch.device, float], Tensor] = {}


def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor], max_norm: float | Tensor, *, optimizer: Lion | None = None,
    grad_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r"""Clip the gradients of a `Lion` by their total norm; its next step does the multiplication.

    .. math:: ‖g‖ = \sqrt{\sum g_i^2}, \qquad g \leftarrow g·\min(1, max\_norm / (‖g‖ + 10^{-6}))

    This reads the gradients once and leaves `p.grad` unchanged; `torch.nn.utils.clip_grad_norm_` reads them twice and
    writes them. The coefficient lasts until the next `step` has used it, or until `zero_grad`. On CUDA this is one
    kernel launch per gradient dtype. It returns the same bits each time, and the host does not wait for the device.

    Args:
        parameters: all parameters of the optimizer, or all that have gradients: the coefficient applies to every one.
        max_norm: smaller norms change nothing; a number ≥ 0 or a 0-dim tensor.
        optimizer: the `Lion` whose step clips, wrapped or not; by default, the only one that has these parameters.
        grad_scale: the scale of a GradScaler (`scaler.scale(torch.ones((), device=...))`), if its `unscale_` was not
            called; the norm is then that of the unscaled gradients.

    Returns:
        The norm of all gradients before clipping, a 0-dim tensor on their device: fp32, fp64 for fp64 gradients.

    Raises:
        TypeError: `optimizer` is not a `Lion`.
        ValueError: `max_norm` is negative; no `Lion` or several have these parameters; a parameter with a gradient is
            not the optimizer's, or one of the optimizer's is missing.
        RuntimeError: the optimizer steps inside backward (`release_gradients`), before all gradients exist.

    Example:
        >>> import torch
        >>> from onepass.optim import Lion, clip_grad_norm
        >>> w = torch.tensor([3.0, -4.0], requires_grad=True)
        >>> optimizer = Lion([w], lr=0.1)
        >>> (w * w).sum().backward()
        >>> clip_grad_norm([w], 1.0)
        tensor(10.)
        >>> optimizer.step()
        >>> optimizer.state[w]["exp_avg"]
        tensor([ 0.0060, -0.0080])
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not isinstance(max_norm, Tensor):
        check.not_negative("clip_grad_norm", "max_norm", max_norm)
    if grad_scale is not None:
        check.tensor("clip_grad_norm", "grad_scale", grad_scale)
    owner = _owner(params) if optimizer is None else getattr(optimizer, "optimizer", optimizer)  # a wrapper's steps
    if not isinstance(owner, Lion):
        raise TypeError(f"clip_grad_norm: optimizer must be an onepass.optim.Lion, got {type(owner).__name__}")
    _check_complete(owner, params)
    if owner.releasing:
        raise RuntimeError(
            "clip_grad_norm: release_gradients steps inside backward, before the norm of all gradients is known; "
            "clip by value in a hook, or don't release"
        )
    with torch.no_grad():
        norm, owner.clip_coefficient = _norm(owner, params, max_norm, grad_scale)
    return norm


if not TYPE_CHECKING:  # torch.compiler.disable has no types
    # torch.compile must not trace state that one step keeps for the next
    clip_grad_norm = torch.compiler.disable(clip_grad_norm)


def _parameters(optimizer: Lion) -> list[Tensor]:
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    # `map` and `is_` compare in C; sets of a thousand ids take seven times as long
    return len(a) == len(b) and all(map(is_, a, b))


def _owner(params: list[Tensor]) -> Lion:
    def matches(lion_params: list[Tensor]) -> bool:
        return _same(lion_params, params) or not set(map(id, params)).isdisjoint(map(id, lion_params))

    # valuerefs copies the list in one call: another thread may build a Lion meanwhile
    owners = [o for ref in Lion.instances.valuerefs() if (o := ref()) is not None and matches(_parameters(o))]
    if len(owners) != 1:
        raise ValueError(
            f"clip_grad_norm: {len(owners) or 'no'} onepass.optim.Lion {'have' if owners else 'has'} these parameters; "
            "give the one to clip for as optimizer="
        )
    return owners[0]


def _check_complete(optimizer: Lion, params: list[Tensor]) -> None:
    if _same(optimizer_params := _parameters(optimizer), params):
        return
    optimizer_ids, given_ids = set(map(id, optimizer_params)), set(map(id, params))
    if any(id(p) not in optimizer_ids and p.grad is not None for p in params):
        raise ValueError("clip_grad_norm: parameters with gradients are not the optimizer's; its step can't clip them")
    if any(id(p) not in given_ids and p.grad is not None for p in optimizer_params):
        raise ValueError("clip_grad_norm: the optimizer has more parameters with gradients than given; give them all")


def _norm(
    optimizer: Lion, params: list[Tensor], max_norm: float | Tensor, grad_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    work, live = optimizer.current_work()
    if not live:
        return torch.zeros((), device=params[0].device if params else None), None
    if work.all_fused:
        norms = work.norm(optimizer, live, _on_device(max_norm, live[0].device), grad_scale)
        if norms is not None:
            return norms[1], norms[2]
    norm = torch.linalg.vector_norm(torch.stack([_norm_of(g).to(live[0].device) for g in live]))
    if grad_scale is not None:
        norm = norm / grad_scale.to(norm.device)
    limit = max_norm.to(norm.device) if isinstance(max_norm, Tensor) else max_norm
    return norm, (limit / (norm + 1e-6)).clamp(max=1.0)


def _norm_of(g: Tensor) -> Tensor:
    return whole(torch.linalg.vector_norm(g, dtype=torch.float32 if g.dtype.itemsize == 2 else None))


def _on_device(max_norm: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(max_norm, Tensor):
        return max_norm.to(device, torch.float32)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # a graph needs memory of its own: a cached tensor is shared
        return torch.full((), float(max_norm), dtype=torch.float32, device=device)
    key = (device, float(max_norm))
    if key not in _MAX_NORMS:
        if len(_MAX_NORMS) > 64:  # it changes each step
            _MAX_NORMS.clear()
        _MAX_NORMS[key] = torch.full((), float(max_norm), dtype=torch.float32, device=device)
    return _MAX_NORMS[key]

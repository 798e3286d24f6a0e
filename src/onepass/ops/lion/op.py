"""The Lion step as one mutating op over lists of tensors: argument checks, registration, the choice of path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from onepass.core.launch import uses_triton
from onepass.core.register import NAMESPACE

from . import torch_path
from .storage import KAHAN, NONE, REMAINDER, STOCHASTIC
from .table import KERNEL_DTYPES, Columns, Plan, Scalars, pack_rows
from .torch_path import Row

MODES = {"none": NONE, "remainder": REMAINDER, "kahan": KAHAN}


def _check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    extras: Sequence[Tensor],
    groups: Sequence[int],
    hyper: Tensor,
    kind: str,
) -> None:
    if kind not in MODES:
        raise ValueError(f"lion_: kind must be one of {', '.join(MODES)}, got {kind!r}")
    n_extras = 0 if kind == "none" else len(params)
    if not len(params) == len(grads) == len(exp_avgs) or len(extras) != n_extras:
        raise ValueError(
            f"lion_: every parameter needs a gradient, a momentum and, unless kind is 'none', an extra tensor; got "
            f"{len(params)} params, {len(grads)} grads, {len(exp_avgs)} exp_avgs, {len(extras)} extras (kind {kind!r})"
        )
    if hyper.dim() != 2 or hyper.shape[1] != 8:
        raise ValueError(f"lion_: hyper must be (number of groups, 8), got {tuple(hyper.shape)}")
    if len(groups) != len(params) or not all(0 <= k < len(hyper) for k in groups):
        raise ValueError(
            f"lion_: groups must name a row of hyper, 0 to {len(hyper) - 1}, for each of {len(params)} params, got "
            f"{list(groups)}"
        )
    for i, (p, *others) in enumerate(zip(params, grads, exp_avgs, *([extras] if extras else []), strict=True)):
        if kind == "remainder" and p.dtype != torch.bfloat16:
            raise TypeError(f"lion_: kind 'remainder' takes bfloat16 parameters, got {p.dtype} (params[{i}])")
        wanted = torch.int16 if kind == "remainder" else p.dtype
        if extras and extras[i].dtype != wanted:
            raise TypeError(f"lion_: extras[{i}] must be {wanted} (kind {kind!r}), got {extras[i].dtype}")
        for name, t in zip(("grads", "exp_avgs", "extras"), others, strict=False):
            if t.shape != p.shape or t.device != p.device:
                raise ValueError(
                    f"lion_: {name}[{i}] must be {tuple(p.shape)} on {p.device} like its parameter, got "
                    f"{tuple(t.shape)} on {t.device}"
                )


def _strides(t: Tensor) -> list[tuple[int, int]]:
    # skip dimensions of size 1: their strides do not matter
    return [(stride, n) for stride, n in zip(t.stride(), t.shape, strict=True) if n != 1]


def same_dense_layout(p: Tensor, *others: Tensor | None) -> bool:
    """Return whether all fill their memory in the same order without gaps: the update then treats them as vectors."""
    tensors = [p, *(t for t in others if t is not None)]
    if all(t.is_contiguous() for t in tensors):
        return True
    strides = _strides(p)
    covered = 1
    for stride, n in sorted(strides):
        if stride != covered:
            return False
        covered *= n
    return all(_strides(t) == strides for t in tensors)


def split_complex(t: Tensor) -> Tensor:
    """Return the real view of a complex tensor (a copy of a lazy conjugate); other tensors as they are."""
    return torch.view_as_real(t.resolve_conj().resolve_neg()) if t.is_complex() else t


def update_list_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    extras: Sequence[Tensor],
    mode: int,
    row: Row,
) -> None:
    """Update one param group on the torch path: dense CPU tensors tile by tile, all others tensor by tensor."""
    batches: dict[object, list[int]] = {}
    for i, (param, grad, exp_avg) in enumerate(zip(params, grads, exp_avgs, strict=True)):
        extra = extras[i] if extras else None
        if param.device.type == "cpu" and same_dense_layout(param, grad, exp_avg, extra):
            batches.setdefault((param.dtype, grad.dtype, exp_avg.dtype), []).append(i)
            continue
        torch_path.plain_(
            param, grad, exp_avg, extra, mode, lr=row.lr, weight_decay=row.weight_decay, betas=(row.beta1, row.beta2),
            factor=row.factor, cautious=None, cautious_weight_decay=bool(row.cautious_decay),
        )  # fmt: skip
    for where in batches.values():
        p, g, m, e = ([c[i] for i in where] if c else [] for c in (params, grads, exp_avgs, extras))
        torch_path.update_(p, g, m, e, mode, row)


def _step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    extras: Sequence[Tensor],
    groups: Sequence[int],
    hyper: Tensor,
    kind: str,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update `params`, `exp_avgs` and `extras` in place; a non-zero `found_inf` skips the update.

    hyper is (number of groups, 8), the first fields of `Row`, on the CPU or on the parameters' device. `groups[i]` is
    the row of `params[i]`. Gradients are divided by `grad_scale`.
    """
    _check(params, grads, exp_avgs, extras, groups, hyper, kind)
    code = MODES[kind]
    columns = [[split_complex(t) for t in c] for c in (params, grads, exp_avgs)]
    extra: list[Tensor | None] = [*extras] if extras else [None] * len(params)
    fused = [
        i
        for i, (p, g, m) in enumerate(zip(*columns, strict=True))
        if all(uses_triton(t) and t.dtype in KERNEL_DTYPES for t in (p, g, m)) and same_dense_layout(p, g, m, extra[i])
    ]
    if fused:
        p, g, m = ([c[i] for i in fused] for c in columns)
        e = [extra[i] for i in fused]
        cautious_decay = True  # assumed: reading hyper from the device would wait for it
        if hyper.device.type == "cpu":
            rows = pack_rows([Row(*r) for r in hyper.tolist()])
            cautious_decay = bool(hyper[:, 7].any())
        else:
            places = [(k, field) for k in range(len(hyper)) for field in range(8)]
            rows = pack_rows([Row(*[0.0] * 8)] * len(hyper), places, list(hyper.reshape(-1).unbind()))
        own = [groups[i] for i in fused]
        plan = Plan(Columns(p, g, m, e, [None] * len(fused)), [code] * len(fused), own, None, cautious_decay)
        plan.refresh(g)
        plan.step(rows, Scalars(grad_scale, None, found_inf))
        torch.autograd.graph.increment_version([*p, *m, *(t for t in e if t is not None)])
    taken = set(fused)
    rest = [i for i in range(len(params)) if i not in taken]
    if not rest or (found_inf is not None and bool(found_inf)):
        return
    for k, values in enumerate(hyper.tolist()):
        row = Row(*values)
        if grad_scale is not None:
            row = row._replace(factor=row.factor / float(grad_scale))
        own = [i for i in rest if groups[i] == k]
        if own:
            p, g, m = ([c[i] for i in own] for c in columns)
            update_list_(p, g, m, [extras[i] for i in own] if extras else [], code, row)


_schema = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] extras, int[] groups, Tensor hyper, "
    "str kind, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
)
lion_ = custom_op(f"{NAMESPACE}::lion_", _step, mutates_args=("params", "exp_avgs", "extras"), schema=_schema)


@lion_.register_fake
def _(*arguments: Any, **scalars: Any) -> None:
    _check(*arguments[:7])


__all__ = ["KAHAN", "MODES", "NONE", "REMAINDER", "STOCHASTIC", "Row", "lion_", "same_dense_layout", "split_complex"]

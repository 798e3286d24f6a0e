"""The layout of a step of `onepass.optim.Lion`: which tensor takes which path, kept between steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onepass.core.launch import uses_triton
from onepass.ops.lion.definition import Row, split_complex
from onepass.ops.lion.table import KERNEL_DTYPES, Columns, Plan, Rows, Scalars, pack_rows
from onepass.ops.lion.torch_path import plain_, update_
from onepass.optim.options import cautious_factor, may_vary, numbers, path_options, row_of
from onepass.optim.sharded import global_mean, is_sharded, shards
from onepass.optim.state import SCALE_KEY, check_placements, check_places, prepare_state
from onepass.optim.watch import Layouts, Objects

_grad = attrgetter("grad")


def _strides(t: Tensor) -> list[tuple[int, int]]:
    # without dimensions of size 1, whose strides do not matter
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


def _may_be_turned(p: Tensor) -> bool:
    """Return whether a transpose in place could leave p's shape as it is: two of its dimensions are equal."""
    sizes = [n for n in p.shape if n > 1]
    return len(set(sizes)) < len(sizes)


class Work:
    """The tensors of a step, sorted by path.

    It keeps parameters and states, but no gradients: they may be freed between steps.
    """

    def __init__(self, optimizer: Optimizer, grads: Sequence[Tensor | None], *, part: bool = False) -> None:
        """Sort the tensors; `grads` are of all parameters, group by group. `part`: ignore parameters without one."""
        groups = optimizer.param_groups
        self.param_lists = [Objects(group["params"]) for group in groups]
        self.path_options = list(map(path_options, groups))
        self.params: list[Tensor] = []  # parameters with a gradient
        self.idle: list[Tensor] = []
        self.groups: list[int] = []
        states: list[dict[str, Any]] = []
        remainders: list[Tensor | None] = []
        flat = ((p, k) for k, group in enumerate(groups) for p in group["params"])
        for (p, k), g in zip(flat, grads, strict=True):
            if g is None:
                if not part:
                    self.idle.append(p)
                continue
            if g.layout != torch.strided:
                raise RuntimeError(f"Lion does not support sparse gradients, got {g.layout}; write sparse=False")
            state = optimizer.state[p]
            remainders.append(state["remainder"] if prepare_state(state, p, groups[k]) else None)
            check_places(p, g, state)
            self.params.append(p)
            self.groups.append(k)
            states.append(state)
        momenta, scales = [s["exp_avg"] for s in states], [s.get(SCALE_KEY) for s in states]
        self.state_lists = [
            (key, Objects([s.get(key) for s in optimizer.state.values()]))
            for key, tensors in (("exp_avg", momenta), ("remainder", remainders), (SCALE_KEY, scales))
            if any(t is not None for t in tensors)
        ]
        live = [g for g in grads if g is not None]
        self.sharded = any(map(is_sharded, self.params))
        columns = Columns(self.params, (), momenta, remainders, scales)
        if self.sharded:
            self.placed = [t for column in columns for t in column if is_sharded(t)]
            self.shards = Objects(shards(self.placed))
            for p, m in zip(columns.params, columns.exp_avgs, strict=True):
                check_placements(p, m)
            live = shards(live)
            columns = Columns(*map(shards, columns))
            columns = columns._replace(scales=[None if s is None else s.view(-1) for s in columns.scales])
        # this rank's shards of the tensors
        self.columns = columns
        self.grad_layouts = Layouts(live)
        self.param_layouts = Layouts(columns.params)
        self.squares = [p for p in columns.params if _may_be_turned(p)]
        self.square_layouts = Layouts(self.squares)
        self._sort(optimizer, live)

    def _sort(self, optimizer: Optimizer, live: list[Tensor]) -> None:
        columns = self.columns._replace(grads=live)
        self.fused: list[int] = []
        self.tiled: dict[object, list[int]] = {}
        self.plain: list[int] = []
        for j, (p, g, m, e, s) in enumerate(zip(*columns, strict=True)):
            group = optimizer.param_groups[self.groups[j]]
            vectors = same_dense_layout(p, g, m, e)
            vectors = vectors and not group["differentiable"] and not g.is_conj() and not g.is_neg()
            kernel_dtypes = all(t.dtype in KERNEL_DTYPES for t in (p, g, m))
            triton = vectors and kernel_dtypes and not group["foreach"] and group["fused"] is not False
            # a kernel averages its own shard, but the cautious mean is that of all shards
            triton = triton and not (is_sharded(self.params[j]) and cautious_factor(group) is not None)
            if triton and all(map(uses_triton, (p, g, m))) and (group["fused"] or group["foreach"] is None):
                self.fused.append(j)
                continue
            if group["fused"] and p.is_cuda and not (vectors and kernel_dtypes):
                raise RuntimeError(
                    "`fused=True` requires dense parameters of supported dtypes with gradients laid out alike, got a "
                    f"parameter {p.dtype} {tuple(p.shape)} of strides {p.stride()} with a gradient {g.dtype} of "
                    f"strides {g.stride()}"
                )
            simple = vectors and cautious_factor(group) is None and s is None
            if simple and p.device.type == "cpu" and group["foreach"] is None:
                self.tiled.setdefault((self.groups[j], e is None, p.dtype, g.dtype, m.dtype), []).append(j)
            else:
                self.plain.append(j)
        self.all_fused = len(self.fused) == len(self.params)
        self.plan = self._make_plan(optimizer, columns) if self.fused else None
        self._packed: tuple[list[tuple[Any, ...]], Rows] | None = None

    def _make_plan(self, optimizer: Optimizer, columns: Columns) -> Plan:
        indices = self.fused
        cautious = [cautious_factor(group) is not None for group in optimizer.param_groups]
        groups = [self.groups[j] for j in indices]
        decay = any(group["cautious_weight_decay"] for group in optimizer.param_groups)
        return Plan(columns.take(indices), groups, [cautious[k] for k in groups], decay)

    def gradients(self, optimizer: Optimizer, placed: dict[int, Tensor] | None) -> list[Tensor] | None:
        """Return the current gradients; None if more than values and addresses changed, so that a new Work is needed.

        `placed`: the result of `placed_gradients` for DTensors.
        """
        groups = optimizer.param_groups
        if len(groups) != len(self.param_lists):
            return None
        for group, params, options in zip(groups, self.param_lists, self.path_options, strict=True):
            if not params.same_objects(group["params"]) or path_options(group) != options:
                return None
        states = optimizer.state.values()
        for key, objects in self.state_lists:
            try:
                current = list(map(itemgetter(key), states))
            except KeyError:
                current = [s.get(key) for s in states]
            if not objects.same_objects(current):
                return None
        live: list[Any] = list(map(_grad, self.params)) if placed is None else [placed.get(id(p)) for p in self.params]
        if self.idle and any(p.grad is not None for p in self.idle):
            return None
        if not self.sharded:
            return live if self._unchanged(live) else None
        return live if self.shards.same_objects(shards(self.placed)) and self._unchanged(shards(live)) else None

    def _unchanged(self, live: list[Tensor]) -> bool:
        """Return whether parameters and gradients have the same layouts as before, and momenta the same addresses."""
        if self.plan is not None and self.plan.states_moved():
            return False
        moved = self.plan is None or self.plan.params_moved()
        if moved or not self.all_fused:
            return self.grad_layouts.unchanged(live) and self.param_layouts.unchanged(self.columns.params)
        # without a move, a square matrix may still have been transposed in place. Any other new layout at the same
        # address reinterprets memory and keeps the gradient: too rare for a check of all parameters at each step
        return self.grad_layouts.unchanged(live) and (not self.squares or self.square_layouts.unchanged(self.squares))

    def run(self, optimizer: Optimizer, live: list[Tensor], clip: Tensor | None = None) -> None:
        """Update all parameters; `clip` multiplies the gradients."""
        groups = optimizer.param_groups
        live = shards(live) if self.sharded else live
        scalars = Scalars(getattr(optimizer, "grad_scale", None), clip, getattr(optimizer, "found_inf", None))
        rows = self._rows(groups)  # a bad option of any group raises before any parameter changes
        if self.plan is not None:
            self.plan = self._current_plan(self.plan, optimizer, live)
            self.plan.step(rows, scalars, any(group["capturable"] for group in groups))
            # kernels write without raising the version counters that autograd checks
            torch.autograd.graph.increment_version(self.params)
        if not self.all_fused and not (scalars.found_inf is not None and bool(scalars.found_inf)):
            self._run_torch(groups, self.columns._replace(grads=live), _factor(scalars))

    def _rows(self, groups: Sequence[dict[str, Any]]) -> Rows:
        """Return the hyperparameters of all groups, packed again only if a number changed."""
        current = list(map(numbers, groups))
        varying = any(map(may_vary, current))
        if varying or self._packed is None or current != self._packed[0]:
            rows = pack_rows([*map(row_of, groups)])
            self._packed = None if varying else (current, rows)
            return rows
        return self._packed[1]

    def _current_plan(self, plan: Plan, optimizer: Optimizer, live: list[Tensor]) -> Plan:
        """Return the plan, or a new one, with the current addresses."""
        fused_grads = live if self.all_fused else [live[j] for j in self.fused]
        if plan.refresh(fused_grads):
            return plan
        plan = self._make_plan(optimizer, self.columns._replace(grads=live))
        plan.refresh(fused_grads)
        return plan

    def norm(
        self, optimizer: Optimizer, live: list[Tensor], max_norm: Tensor, grad_scale: Tensor | None
    ) -> Tensor | None:
        """Return (sum of squares, norm, clip coefficient), one launch per dtype, where the kernels take all tensors.

        None for shards and several devices: plain torch adds up the norms of all ranks and devices.
        """
        if self.sharded or self.plan is None:
            return None
        self.plan = plan = self._current_plan(self.plan, optimizer, live)
        if len({launch.device for launch in plan.launches}) != 1:
            return None
        device = plan.launches[0].device
        scale = Scalars(grad_scale).to(device)[0]
        return plan.norm(self._rows(optimizer.param_groups), max_norm.to(device), scale)

    def _run_torch(self, groups: Sequence[dict[str, Any]], columns: Columns, factor: float | Tensor | None) -> None:
        for indices in self.tiled.values():
            group = groups[self.groups[indices[0]]]
            params, gradients, exp_avgs = ([split_complex(c[j]) for j in indices] for c in columns[:3])
            extras = [e for e in (columns.extras[j] for j in indices) if e is not None]
            # plain numbers, because tensors of hyperparameters may be on another device
            row = Row._make(map(float, _scaled(row_of(group), factor)))
            update_(params, gradients, exp_avgs, extras, row, compiled=bool(group["fused"]))
        for j in self.plain:
            group = groups[self.groups[j]]
            p, g, m = (split_complex(c[j]) for c in columns[:3])
            row = _scaled(row_of(group), factor)
            row = Row._make(t.to(p.device) if isinstance(t, Tensor) else t for t in row)
            mean = partial(global_mean, self.params[j]) if is_sharded(self.params[j]) else torch.mean
            plain_(
                p, g, m, columns.extras[j], row, columns.scales[j], differentiable=group["differentiable"], mean=mean
            )


def _factor(scalars: Scalars) -> float | Tensor | None:
    """Return the factor of the gradients; a number if reading it does not wait for a device. None: no factor."""
    scale, clip = scalars.grad_scale, scalars.clip
    if scale is None and clip is None:
        return None
    if all(t is None or t.device.type == "cpu" for t in (scale, clip)):
        return (1.0 if clip is None else float(clip)) / (1.0 if scale is None else float(scale))
    if scale is None:
        return clip
    return scale.reciprocal() if clip is None else clip / scale.to(clip.device)


def _scaled(row: Row, factor: float | Tensor | None) -> Row:
    return row if factor is None else row._replace(factor=row.factor * factor)

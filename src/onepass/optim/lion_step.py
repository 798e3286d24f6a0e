"""How a step of `onepass.optim.Lion` is laid out: which tensor takes which path, remembered between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.core.launch import uses_triton
from onepass.ops.lion.op import KAHAN, NONE, REMAINDER, Row, lion_, same_dense_layout, split_complex, update_list_
from onepass.ops.lion.table import Plan, rows_to_bytes
from onepass.ops.lion.torch_path import foreach_, plain_

if TYPE_CHECKING:
    from onepass.optim.lion import Lion

MODE_NAMES = {NONE: "none", REMAINDER: "remainder", KAHAN: "kahan"}
EXTRA_KEYS = {NONE: "", REMAINDER: "remainder", KAHAN: "kahan_comp"}
# the options that decide the path; lr, betas and weight_decay may change at any step
ROUTING = (
    "foreach", "fused", "differentiable", "capturable", "cautious", "cautious_weight_decay", "low_precision",
    "state_dtype",
)  # fmt: skip


def cautious_factor(group: dict[str, Any]) -> float | None:
    """What updates that disagree with the gradient are multiplied by; None when nothing is."""
    value = group["cautious"]
    factor = (0.0 if value else 1.0) if isinstance(value, bool) else float(value)
    return None if factor == 1.0 else factor


def peak_lr(group: dict[str, Any]) -> float:
    """The learning rate at which a group with decouple_lr decays by exactly weight_decay."""
    for key in ("max_lr", "peak_lr", "initial_lr"):
        value = group.get(key)
        if value is not None and float(value) > 0:
            return float(value)
    raise ValueError("decouple_lr=True needs a positive peak learning rate: give the param group a 'peak_lr'")


def hyperparameters(group: dict[str, Any]) -> tuple[float | Tensor, float | Tensor]:
    """(lr, weight decay relative to lr); a tensor only where reading it would wait for a device."""
    lr, wd = group["lr"], group["weight_decay"]
    if not (group["differentiable"] or torch.compiler.is_compiling()):
        lr, wd = (float(t) if isinstance(t, Tensor) and t.device.type == "cpu" else t for t in (lr, wd))
    if group["decouple_lr"]:
        wd = wd / peak_lr(group)
    return lr, wd


def row_of(group: dict[str, Any]) -> tuple[Row, list[tuple[int, Tensor]]]:
    """The group's row for the kernels, and (column, tensor) for what only the device knows."""
    lr, wd = hyperparameters(group)
    on_device = [(column, t) for column, t in ((0, lr), (1, wd)) if isinstance(t, Tensor)]
    beta1, beta2 = group["betas"]
    return Row(
        0.0 if isinstance(lr, Tensor) else float(lr), 0.0 if isinstance(wd, Tensor) else float(wd),
        beta1, 1.0 - beta1, beta2, 1.0 - beta2, -1.0 if group["maximize"] else 1.0,
        1.0 if group["cautious_weight_decay"] else 0.0,
    ), on_device  # fmt: skip


def local(t: Tensor) -> Tensor:
    """Shard of a DTensor that this rank holds; any other tensor as it is."""
    to_local: Callable[[], Tensor] | None = getattr(t, "to_local", None)
    return t if to_local is None else to_local()


def check_placements(p: Tensor, g: Tensor, m: Tensor) -> None:
    """A momentum or gradient placed unlike its parameter would update the wrong elements."""
    placements = [getattr(t, "placements", None) for t in (p, g, m)]
    if placements[1] != placements[0] or placements[2] != placements[0]:
        raise ValueError(
            f"Lion: a DTensor parameter, its gradient and its exp_avg must have equal placements, got {placements[0]}, "
            f"{placements[1]} and {placements[2]}; redistribute the gradient"
        )


def signature(groups: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """What must stay the same for a layout to hold."""
    return [[g[key] for key in ROUTING] for g in groups]


class Work:
    """The tensors of a step, sorted by path.

    Holds parameters and states, never gradients: those may be freed between steps.
    """

    def __init__(self, optimizer: Lion, flat: list[Tensor], grads: list[Tensor | None]) -> None:
        self.flat = flat
        self.mask = [g is not None for g in grads]
        self.signature = signature(optimizer.param_groups)
        self.cautious = [cautious_factor(group) is not None for group in optimizer.param_groups]
        self.where: list[int] = []  # places of updated parameters in flat
        self.groups: list[int] = []
        self.states: list[dict[str, Any]] = []
        self.modes: list[int] = []
        i = 0
        for k, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                g = grads[i]
                if g is not None:
                    if g.layout != torch.strided:
                        raise RuntimeError(f"Lion does not support sparse gradients, got one of layout {g.layout}")
                    self.where.append(i)
                    self.groups.append(k)
                    state, mode = optimizer.prepare_state(p, group)
                    self.states.append(state)
                    self.modes.append(mode)
                i += 1
        self.all_states = list(optimizer.state.values())
        self.exp_avgs = [s["exp_avg"] for s in self.states]
        self.extras: list[Tensor | None] = [
            s[EXTRA_KEYS[mode]] if mode else None for s, mode in zip(self.states, self.modes, strict=True)
        ]
        self.any_extra = any(self.modes)
        live = [g for g in grads if g is not None]
        self.dtypes = [g.dtype for g in live]
        self.strides = None if all(g.is_contiguous() for g in live) else [g.stride() for g in live]
        self.sharded = any(hasattr(flat[i], "to_local") for i in self.where)
        self._sort(optimizer, live)

    def _sort(self, optimizer: Lion, live: list[Tensor]) -> None:
        columns = self._local_columns(live)
        self.fused: list[int] = []
        self.foreach: dict[object, list[int]] = {}
        self.listed: dict[object, list[int]] = {}
        self.plain: list[int] = []
        for j, (p, g, m, e) in enumerate(zip(*columns, strict=True)):
            group = optimizer.param_groups[self.groups[j]]
            simple = not group["differentiable"] and cautious_factor(group) is None
            vectors = simple and same_dense_layout(p, g, m, e) and (not p.is_complex() or not g.is_conj())
            triton = vectors and not group["foreach"] and group["fused"] is not False
            if triton and all(map(uses_triton, (p, g, m))) and (group["fused"] or group["foreach"] is None):
                self.fused.append(j)
                continue
            if group["fused"] and p.is_cuda and not (simple and vectors):
                raise RuntimeError(
                    "`fused=True` requires dense parameters of supported dtypes with gradients laid out alike, and no "
                    f"`cautious`; got a parameter {p.dtype} {tuple(p.shape)} of strides {p.stride()} with a gradient "
                    f"{g.dtype} of strides {g.stride()}"
                )
            one_type = p.dtype == g.dtype == m.dtype and p.dtype in (torch.float32, torch.float64)
            decay_simple = not group["cautious_weight_decay"]
            if simple and decay_simple and one_type and (group["foreach"] or (p.is_cuda and group["foreach"] is None)):
                self.foreach.setdefault((self.groups[j], p.device, p.dtype), []).append(j)
            elif vectors and p.device.type == "cpu" and group["foreach"] is None:
                self.listed.setdefault((self.groups[j], self.modes[j]), []).append(j)
            else:
                self.plain.append(j)
        self.plan: Plan | None = None
        if self.fused:
            self._make_plan([[c[j] for j in self.fused] for c in columns], len(optimizer.param_groups))

    def _make_plan(self, columns: list[list[Any]], n_groups: int) -> None:
        params, grads, exp_avgs, extras = columns
        self.plan = Plan(
            params,
            grads,
            exp_avgs,
            extras,
            [self.modes[j] for j in self.fused],
            [self.groups[j] for j in self.fused],
            n_groups,
        )
        self.updated = params
        self.all_fused = len(self.fused) == len(self.where) and not self.sharded

    def _local_columns(self, live: list[Tensor]) -> list[list[Any]]:
        params = [self.flat[i] for i in self.where]
        if not self.sharded:
            return [params, live, self.exp_avgs, self.extras]
        for p, g, m, k in zip(params, live, self.exp_avgs, self.groups, strict=True):
            check_placements(p, g, m)
            if self.cautious[k] and hasattr(p, "to_local"):
                raise ValueError(
                    "Lion: cautious needs a mean over all shards, which DTensor parameters don't have here yet"
                )
        return [[None if t is None else local(t) for t in c] for c in (params, live, self.exp_avgs, self.extras)]

    def fits(self, optimizer: Lion, flat: list[Tensor], grads: list[Tensor | None]) -> bool:
        """Tell whether everything but values and addresses is as it was."""
        if len(flat) != len(self.flat) or not all(map(is_, flat, self.flat)):
            return False
        if [g is not None for g in grads] != self.mask or signature(optimizer.param_groups) != self.signature:
            return False
        states = optimizer.state
        if len(states) != len(self.all_states) or not all(map(is_, states.values(), self.all_states)):
            return False
        try:
            if not all(map(is_, [s["exp_avg"] for s in self.states], self.exp_avgs)):
                return False
        except KeyError:
            return False
        if self.any_extra and not all(
            mode == NONE or s.get(EXTRA_KEYS[mode]) is e
            for s, mode, e in zip(self.states, self.modes, self.extras, strict=True)
        ):
            return False
        live = [g for g in grads if g is not None]
        if [g.dtype for g in live] != self.dtypes:
            return False
        if self.strides is None:
            try:
                return all(map(torch.Tensor.is_contiguous, live))
            except RuntimeError:  # the gradients are sparse now
                return False
        return [g.stride() for g in live] == self.strides

    def run(self, optimizer: Lion, grads: list[Tensor | None]) -> None:
        """Update everything."""
        live = [g for g in grads if g is not None]
        groups = optimizer.param_groups
        grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        columns = self._local_columns(live)
        if self.plan is not None:
            self._run_fused(groups, columns, grad_scale, found_inf)
        if not (self.foreach or self.listed or self.plain) or (found_inf is not None and bool(found_inf)):
            return
        scale = None if grad_scale is None else 1.0 / float(grad_scale)
        for own in self.foreach.values():
            params, gradients, exp_avgs = ([split_complex(c[j]) for j in own] for c in columns[:3])
            row, on_device = row_of(groups[self.groups[own[0]]])
            if on_device:
                self.run_plain(groups, columns, own, scale)
            else:
                foreach_(params, gradients, exp_avgs, _scaled(row, scale))
        for own in self.listed.values():
            mode = self.modes[own[0]]
            params, gradients, exp_avgs = ([split_complex(c[j]) for j in own] for c in columns[:3])
            row, _ = row_of(groups[self.groups[own[0]]])
            update_list_(
                params, gradients, exp_avgs, [columns[3][j] for j in own] if mode else [], mode, _scaled(row, scale)
            )
        self.run_plain(groups, columns, self.plain, scale)

    def run_plain(self, groups: Any, columns: list[list[Any]], where: list[int], scale: float | None) -> None:
        """Tensor by tensor, from the definition."""
        for j in where:
            group = groups[self.groups[j]]
            lr, wd = hyperparameters(group)
            p, g, m = (split_complex(c[j]) for c in columns[:3])
            plain_(
                p, g, m, columns[3][j], self.modes[j], lr=lr, weight_decay=wd, betas=group["betas"],
                factor=(-1.0 if group["maximize"] else 1.0) * (1.0 if scale is None else scale),
                cautious=cautious_factor(group), cautious_weight_decay=group["cautious_weight_decay"],
                differentiable=group["differentiable"],
            )  # fmt: skip

    def _run_fused(
        self, groups: Any, columns: list[list[Any]], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        rows, positions, scalars = [], [], []
        for k, group in enumerate(groups):
            row, on_device = row_of(group)
            rows.append(row)
            for column, t in on_device:
                positions.append(8 * k + column)
                scalars.append(t)
        own: Any = columns if self.all_fused else [[c[j] for j in self.fused] for c in columns]
        options: dict[str, Any] = {
            "device_rows": (positions, scalars), "grad_scale": grad_scale, "found_inf": found_inf,
            "capturable": any(group["capturable"] for group in groups),
        }  # fmt: skip
        hyper = rows_to_bytes(rows)
        if self.plan is not None and not self.plan.run(own, hyper, **options):
            self._make_plan(own, len(groups))
            self.plan.run(own, hyper, **options)
        # autograd saves parameters; a raw write must not pass it by
        torch.autograd.graph.increment_version(self.updated)


def _scaled(row: Row, scale: float | None) -> Row:
    return row if scale is None else row._replace(factor=row.factor * scale)


def compiled_step(optimizer: Lion) -> None:
    """One op per 16-bit mode, so that torch.compile sees one opaque call; plain torch where options need it."""
    groups = optimizer.param_groups
    lists: dict[int, tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[int]]] = {}
    rows = []
    for k, group in enumerate(groups):
        row, on_device = row_of(group)
        values: list[Any] = list(row)
        for column, t in on_device:
            values[column] = t
        rows.append(values)
        for p in group["params"]:
            g = p.grad
            if g is None:
                continue
            if g.layout != torch.strided:
                raise RuntimeError(f"Lion does not support sparse gradients, got one of layout {g.layout}")
            state, mode = optimizer.prepare_state(p, group)
            key = EXTRA_KEYS[mode]
            if group["differentiable"] or cautious_factor(group) is not None:
                lr, wd = hyperparameters(group)
                plain_(
                    split_complex(p), split_complex(g), split_complex(state["exp_avg"]), state.get(key), mode,
                    lr=lr, weight_decay=wd, betas=group["betas"], factor=-1.0 if group["maximize"] else 1.0,
                    cautious=cautious_factor(group), cautious_weight_decay=group["cautious_weight_decay"],
                    differentiable=group["differentiable"],
                )  # fmt: skip
                continue
            own = lists.setdefault(mode, ([], [], [], [], []))
            own[0].append(p)
            own[1].append(g)
            own[2].append(state["exp_avg"])
            if key:
                own[3].append(state[key])
            own[4].append(k)
    for mode, (params, grads, exp_avgs, extras, index) in lists.items():
        if any(isinstance(v, Tensor) for row in rows for v in row):
            device = params[0].device
            hyper = torch.stack([torch.as_tensor(v, dtype=torch.float32, device=device) for r in rows for v in r])
            hyper = hyper.reshape(len(rows), -1)
        else:
            hyper = torch.tensor(rows, dtype=torch.float64)
        lion_(params, grads, exp_avgs, extras, index, hyper, MODE_NAMES[mode])

"""The options of Lion: check them, and derive from them what applies to a parameter."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from onepass.ops.lion.definition import Row
from onepass.optim.sharded import is_sharded, scale_shape

LOW_PRECISION = ("auto", "none", "remainder")
STATE_DTYPES = (None, torch.float32, torch.bfloat16, "int8")
COMPLEX_STATE = {torch.float32: torch.complex64}
# momenta of smaller parameters (gains, biases) have the parameter's dtype: int8 would save little
SMALL_INT8 = 4096

_path_options = itemgetter(
    "foreach", "fused", "differentiable", "capturable", "cautious", "cautious_weight_decay", "low_precision",
    "state_dtype",
)  # fmt: skip
# the options of a group that may change at any step
numbers = itemgetter("lr", "weight_decay", "betas", "decouple_lr", "maximize", "cautious_weight_decay", "cautious")
_FIXED = (float, int)


def path_options(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return the options of a group that decide a tensor's path, with their types: cautious=1.0 is off, True is on."""
    options = _path_options(group)
    return options, *map(type, options)


def may_vary(values: tuple[Any, ...]) -> bool:
    """Return whether equal `numbers` may give another row later.

    Tensors, arrays and lists may be written to; with decouple_lr the row also depends on the peak learning rate.
    """
    lr, weight_decay, betas, decouple_lr, *_ = values
    # called at each step for each group: four written-out checks take a third of the time of a loop
    return decouple_lr or not (
        isinstance(lr, _FIXED) and isinstance(weight_decay, _FIXED)
        and isinstance(betas, tuple) and len(betas) == 2 and isinstance(betas[0], _FIXED)
        and isinstance(betas[1], _FIXED)
    )  # fmt: skip


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, Tensor)


def betas_of(group: dict[str, Any]) -> tuple[float, float]:
    """Return the betas of a group; tensors raise, because reading them would wait for a device."""
    betas = group["betas"]
    if not hasattr(betas, "__len__") or len(betas) != 2 or not all(map(_is_number, betas)):
        raise ValueError(f"Invalid betas: {betas}; Lion takes two numbers")
    return betas[0], betas[1]


def check_options(group: dict[str, Any]) -> None:
    """Raise an error for options out of range, in the words of torch.optim."""
    for name, words in (("lr", "learning rate"), ("weight_decay", "weight_decay value")):
        value = group[name]
        if not (isinstance(value, Tensor) or _is_number(value)):
            raise TypeError(f"Invalid {words}: {value!r}; a number or a tensor of one element is accepted")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        if not value >= 0.0:
            raise ValueError(f"Invalid {words}: {value}; {name} must be ≥ 0")
    for i, beta in enumerate(betas_of(group)):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}; betas must be ≥ 0 and < 1")
    cautious_factor(group)
    for name, accepted in (("state_dtype", STATE_DTYPES), ("low_precision", LOW_PRECISION)):
        if group[name] not in accepted:
            raise ValueError(f"Invalid {name}: {group[name]!r}; accepted: {accepted}")
    if group["fused"]:
        if group["differentiable"]:
            raise RuntimeError("`fused` does not support `differentiable`")
        if group["foreach"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if group["differentiable"]:
        if group["low_precision"] not in ("auto", "none"):
            raise ValueError(f"low_precision={group['low_precision']!r} is not differentiable; auto and none are")
        if group["state_dtype"] == "int8":
            raise ValueError("state_dtype='int8' is not differentiable; None, torch.float32 and torch.bfloat16 are")


def check_parameters(group: dict[str, Any]) -> None:
    """Raise an error for parameters that the options of the group do not support."""
    for p in group["params"]:
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(f"Lion: parameters must be floating-point or complex tensors, got {p.dtype}")
        has_remainder(p, group)
        momentum_dtype(p, group)


def has_remainder(p: Tensor, group: dict[str, Any]) -> bool:
    """Return whether a remainder is stored beside a parameter: of bf16, unless that is declined."""
    if group["low_precision"] not in LOW_PRECISION or group["state_dtype"] not in STATE_DTYPES:
        check_options(group)  # the user set it after the constructor's check
    if group["low_precision"] == "remainder" and p.dtype == torch.float16:
        raise ValueError("low_precision='remainder' takes bfloat16 parameters, got float16; use bfloat16 or float32")
    return p.dtype == torch.bfloat16 and group["low_precision"] != "none" and not group["differentiable"]


def momentum_dtype(p: Tensor, group: dict[str, Any]) -> torch.dtype:
    """Return the dtype of the momentum of a parameter."""
    dtype: Any = group["state_dtype"] or p.dtype
    if p.is_complex() and dtype != p.dtype:
        if dtype not in COMPLEX_STATE:
            raise ValueError(f"state_dtype={dtype!r} has no complex form for a {p.dtype} parameter; None is accepted")
        return COMPLEX_STATE[dtype]
    if dtype == "int8":
        small = p.numel() < SMALL_INT8 or (is_sharded(p) and scale_shape(p) is None)
        return p.dtype if small else torch.int8
    return dtype  # type: ignore[no-any-return]


def cautious_factor(group: dict[str, Any]) -> float | None:
    """Return the factor of updates whose sign disagrees with the gradient; None without cautious updates."""
    value = group["cautious"]
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"Invalid cautious value: {value}; a bool or a factor in [0, 1] is accepted")
    # NumPy's bools are no subclass of bool
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
    factor = (0.0 if value else 1.0) if is_bool else float(value)
    return None if factor == 1.0 else factor


def peak_lr(group: dict[str, Any]) -> float:
    """Return the learning rate at which a group with decouple_lr decays by exactly weight_decay."""
    # with 'keep_peak_lr', set by compat for lion-pytorch, the peak of the constructor stays
    for key in ("peak_lr",) if "keep_peak_lr" in group else ("max_lr", "peak_lr", "initial_lr"):
        value = group.get(key)
        if value is not None and float(value) > 0:
            return float(value)
    raise ValueError("decouple_lr=True needs a positive peak learning rate: give the param group a 'peak_lr'")


def row_of(group: dict[str, Any]) -> Row:
    """Return the hyperparameters of a group; lr and decay are tensors where reading them would wait for a device."""
    lr, wd = group["lr"], group["weight_decay"]
    if not (group["differentiable"] or torch.compiler.is_compiling()):
        lr, wd = (float(t) if isinstance(t, Tensor) and t.device.type == "cpu" else t for t in (lr, wd))
    if group["decouple_lr"]:
        # relative to lr
        wd = wd / peak_lr(group)
    # shape () instead of (1,), which would give a 0-dim parameter a dimension
    lr, wd = (t.reshape(()) if isinstance(t, Tensor) else float(t) for t in (lr, wd))
    (beta1, beta2), cautious = betas_of(group), cautious_factor(group)
    return Row(
        lr, wd, beta1, 1.0 - beta1, beta2, 1.0 - beta2, -1.0 if group["maximize"] else 1.0,
        1.0 if group["cautious_weight_decay"] else 0.0, 1.0 if cautious is None else cautious,
    )  # fmt: skip

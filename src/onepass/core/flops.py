"""Formulas for `torch.utils.flop_counter`. Importing it imports Triton, so they wait until the user imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_formulas: dict[Any, Callable[..., int]] = {}


def flop_formula(op: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate the function that returns the multiplications and additions of `op` for the shapes of its arguments."""

    def decorate(formula: Callable[..., int]) -> Callable[..., int]:
        _formulas[op.overloadpacket] = formula
        return formula

    return decorate


def register_formulas() -> None:
    """Hand the formulas to the flop counter, and to those that count now, which have copied its list."""
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None or torch.compiler.is_compiling():
        return
    for op, formula in _formulas.items():
        if op not in module.flop_registry:
            module.register_flop_formula(op)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.update({op: module.flop_registry[op] for op in _formulas if op not in registry})

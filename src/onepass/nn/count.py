"""Checks of what modules are given, and how many of n tokens to choose: an int, or a share of n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onepass.ops.causal_choice.definition import fraction, rounded_share


def check_int(module: str, name: str, value: int, least: int = 1, most: int = 2**63 - 1) -> None:
    """Raise TypeError unless value is an int, ValueError unless it is in the range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{module}: {name} must be an int, got {type(value).__name__}")
    if not least <= value <= most:
        above = f" and ≤ {most}" if most < 2**63 - 1 else ""
        raise ValueError(f"{module}: {name} must be ≥ {least}{above}, got {value}")


def check_number(
    module: str, name: str, value: float, accepted: str = "", holds: Callable[[float], bool] = lambda value: True
) -> None:
    """Raise TypeError unless value is an int or a float; ValueError, naming what is `accepted`, unless holds(value)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{module}: {name} must be a number, got {type(value).__name__}")
    if not holds(value):
        raise ValueError(f"{module}: {name} must be {accepted}, got {value}")


def check_flag(module: str, name: str, value: bool) -> None:
    """Raise TypeError unless value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{module}: {name} must be a bool, got {type(value).__name__}")


def refuse_gone(module: str, gone: Any) -> None:
    """Raise TypeError for arguments that do not exist; for one that did, say what to write instead."""
    for name in gone:
        raise TypeError(f"{module}: unexpected argument {name}{_GONE.get(name, '')}")


_GONE = {
    "balance": "; it went with rows over several devices: leave it out",
    "score": "; scores are ⟨x/rms(x), v⟩: for cosines, parametrize weight to length 1",
}


def check_count(module: str, name: str, k: int | float) -> None:
    """Raise TypeError unless k is an int or a float, ValueError unless it is an int ≥ 1 or a float 0 < k ≤ 1."""
    if isinstance(k, bool) or not isinstance(k, (int, float)):
        raise TypeError(f"{module}: {name} must be an int or a float, got {type(k).__name__}")
    if (isinstance(k, int) and k < 1) or (isinstance(k, float) and not 0 < k <= 1):
        raise ValueError(f"{module}: {name} must be an int ≥ 1 or a share 0 < {name} ≤ 1 of n, got {k}")


def check_dtype(module: str, x: Tensor, linear: nn.Module | Tensor, name: str = "x") -> None:
    """Raise TypeError if tokens and the weights that multiply them have two dtypes, outside autocast."""
    # another class than nn.Linear, as that of quantised weights, may take any dtype
    weight = linear.weight if type(linear) is nn.Linear else linear if isinstance(linear, Tensor) else x
    if x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type):
        return
    raise TypeError(
        f"{module}: {name} is {x.dtype} and the weights are {weight.dtype}; convert one of them, as in "
        f"layer.to({x.dtype}), or call it under torch.autocast({x.device.type!r})"
    )


def count(k: int | float, n: int) -> int:
    """Return how many of n tokens k means: ``min(k, n)`` for an int, ``max(1, round(k·n))`` for a share, 0 if n = 0.

    A share is taken as the nearest fraction with a denominator of at most 2²⁰, and rounded in integers, halves to even.
    So kernels that count the real tokens of a padded row get the same number.
    """
    if isinstance(k, int) or n == 0:
        return min(int(k), n)
    if k == 1:
        return n
    return max(1, rounded_share(n, *fraction(k)))  # type: ignore[no-any-return]

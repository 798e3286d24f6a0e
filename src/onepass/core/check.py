"""Argument checks with the same wording for every operator: what was given, what is accepted."""

from __future__ import annotations

import numbers
import os
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def setting(name: str, *accepted: str) -> str:
    """Return the value of an environment variable, the first accepted one without it; raise ValueError for another."""
    value = os.environ.get(name) or accepted[0]
    if value not in accepted:
        raise ValueError(f"{name} must be {' or '.join(map(repr, accepted))}, got {value!r}")
    return value


def tensor(op: str, name: str, value: object) -> None:
    """Raise TypeError unless value is a dense tensor."""
    if not isinstance(value, Tensor):
        type_name = type(value).__name__
        hint = "; torch.fx.wrap keeps a function whole, Tracer.is_leaf_module a layer" if type_name == "Proxy" else ""
        raise TypeError(f"{op}: {name} must be a tensor, got {type_name}{hint}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else value.layout
        raise TypeError(f"{op}: {name} must be dense, got {kind}; pass {name}.to_dense() or to_padded_tensor()")


def floating(op: str, name: str, value: Tensor) -> None:
    """Raise TypeError unless value is a dense fp32, fp16, bf16 or fp64 tensor."""
    tensor(op, name, value)
    if value.dtype not in FLOATS:
        raise TypeError(
            f"{op}: {name} must be float32, float16, bfloat16 or float64, got {value.dtype}; pass {name}.float()"
        )


def real(op: str, name: str, value: object, wanted: str = "a number") -> None:
    """Raise TypeError unless value is a number; NumPy's scalars are numbers.Real."""
    if not isinstance(value, (float, int, numbers.Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be {wanted}, got {type(value).__name__}")


def not_negative(op: str, name: str, value: Any) -> None:
    """Raise TypeError unless value is a number, ValueError unless it is ≥ 0."""
    real(op, name, value, "a number ≥ 0")
    if not value >= 0:
        raise ValueError(f"{op}: {name} must be ≥ 0, got {value}")


def number(op: str, name: str, value: Any) -> float:
    """Return value as a float; raise TypeError unless it is a number."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    return float(value)


def same_device(op: str, name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError for two tensors on different devices."""
    if value.device != other.device:
        raise ValueError(f"{op}: {name} is on {value.device} but {other_name} is on {other.device}; move one of them")

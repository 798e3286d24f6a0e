"""Ten kinds of scores that a threshold search meets, from harmless to hostile."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NAMES = ("normal", "uniform", "cauchy", "constant", "ties", "bimodal", "exponential", "wide", "outlier", "sorted")


def draw(name: str, rows: int, cols: int, seed: int = 0) -> Tensor:
    """(rows, cols) in float64."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    uniform = torch.rand(rows, cols, generator=generator, dtype=torch.float64)
    if name == "outlier":
        normal[:, 0] = 1e5
    return {
        "normal": normal,
        "uniform": uniform,
        "cauchy": (math.pi * (uniform - 0.5)).tan(),
        "constant": torch.full_like(normal, 3.0),
        "ties": (2 * normal).round(),
        "bimodal": normal + 20 * (uniform > 0.8),
        "exponential": -(1 - uniform).log(),
        "wide": 1e4 * normal,
        "outlier": normal,
        "sorted": normal.sort(dim=-1).values,
    }[name]

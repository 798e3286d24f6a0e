"""Angles of far positions against 50 decimal digits."""

from __future__ import annotations

from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from onepass.ops.span_attention.op import rotary

PI = Decimal("3.14159265358979323846264338327950288419716939937510")
WIDTH = 64


def cos_and_sin(position: int, base: float) -> Tensor:
    """(WIDTH,) in float64: the cosines of all pairs, then the sines."""
    with localcontext() as context:
        context.prec = 50
        speeds = [(Decimal(base).ln() * Decimal(-2 * c) / WIDTH).exp() for c in range(WIDTH // 2)]
        angles = torch.tensor([float(position * speed % (2 * PI)) for speed in speeds], dtype=torch.float64)
    return torch.cat((angles.cos(), angles.sin()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("base", [100.0, 10_000.0, 500_000.0])
@pytest.mark.parametrize("position", [3, 2**20, 10**8, -(10**8), 10**9])
def test_angles(position: int, base: float, device: str) -> None:
    x = torch.zeros(1, 1, 1, WIDTH, device=device)
    x[..., : WIDTH // 2] = 1
    y = rotary(x, torch.tensor([position], device=device), base=base)[0, 0, 0].cpu()
    # in fp64 the angle rounds with its size, a few times; in fp32 less than a turn rounds twice, its cosine a few times
    limit = 4 * abs(position) * torch.finfo(torch.float64).eps + 2**-23 * (4 + 3)
    assert (y.double() - cos_and_sin(position, base)).abs().max() <= limit

"""What public implementations have got wrong, one test each."""

from __future__ import annotations

import pytest
import torch

from conftest import INTERPRET
from onepass import layer_norm, rms_norm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.skipif(INTERPRET, reason="nothing is compiled")
def test_no_compilation_per_number_of_rows(device: str) -> None:
    """A batch of another size is no other program; test_launch has Triton's."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x, w: rms_norm(x, w) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    w = torch.ones(10, device=device)
    for rows in (4, 7, 16, 32):
        compiled(torch.randn(rows, 10, device=device), w)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.skipif(INTERPRET, reason="bfloat16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cols", [1, 3, 51, 100, 768, 3000])
def test_rows_of_one_value_are_the_bias(device: str, dtype: torch.dtype, cols: int) -> None:
    """8 bits times 3000 are exact in fp32, so the mean is the value; a mean off by an ulp leaves 0.5 of it."""
    values = torch.cat([torch.arange(128.0, 256.0) * 2.0**e * sign for e in (-8, 0, 8) for sign in (1, -1)])
    x = values.clamp(-65504, 65504).to(device, dtype)[:, None].expand(-1, cols)
    b = torch.randn(cols).to(device, dtype)
    assert torch.equal(layer_norm(x, None, b), b.expand(x.shape))
    assert not layer_norm(x).any()

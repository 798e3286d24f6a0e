"""A routed block as an AOTInductor package: compiled ahead of time, run from Python for any batch and length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.export import Dim

from onepass.core.launch import INTERPRET
from onepass.nn import RoutedBlock

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.__version__.startswith("2.11."),
        reason="packages of torch 2.11 hand operators float64 for float32, and crash on a GPU, one nn.Linear included",
    ),
    pytest.mark.skipif(INTERPRET, reason="the package calls the registered operators, which are tested eagerly"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("causal", [False, True], ids=["best", "causal"])
def test_the_package_gives_the_bits_of_eager(causal: bool, device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = RoutedBlock(32, 1 / 8, heads=2, dim_head=16, window=16, causal=causal).to(device).eval()
    sample = torch.randn(2, 64, 32, device=device)
    with torch.no_grad():
        program = torch.export.export(block, (sample,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "block.pt2"))
        run = torch._inductor.aoti_load_package(package)
        for shape in ((2, 64), (3, 96), (1, 40)):
            x = torch.randn(*shape, 32, device=device)
            torch.testing.assert_close(run(x), block(x), rtol=0, atol=0)

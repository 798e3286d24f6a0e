"""What the torch path must keep on a device without kernels, and what its results allow afterwards."""

from __future__ import annotations

import pytest
import torch

from onepass import layer_norm, rms_norm
from onepass.core.launch import backend


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_without_kernels_on_a_gpu(norm, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ONEPASS_BACKEND=torch`."""
    x = torch.randn(600, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    expected = torch.autograd.grad(norm(x, w), (x, w), dy)
    monkeypatch.setattr(backend, "BACKEND", "torch")
    torch.testing.assert_close(torch.autograd.grad(norm(x, w), (x, w), dy), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_float64_in_a_cuda_graph(norm) -> None:
    """The torch path must not wait for the GPU: neither for the rows far from zero."""
    x = torch.randn(6, 64, device="cuda", dtype=torch.float64, requires_grad=True)
    w = torch.randn(64, device="cuda", dtype=torch.float64)
    expected = torch.autograd.grad(norm(x, w).square().sum(), x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(norm(x, w).square().sum(), x)
    graph.replay()
    torch.testing.assert_close(captured, expected)


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "call", [lambda x, r: layer_norm(x, residual=r, stable=True), lambda x, r: rms_norm(x, residual=r)]
)
def test_gradients_beside_an_fp64_residual(call, dtype: torch.dtype, rows: int) -> None:
    """The sum is fp64 then, and y with its gradient narrower than it."""
    x = torch.randn(rows, 8, dtype=dtype, requires_grad=True)
    residual = torch.randn(rows, 8, dtype=torch.float64, requires_grad=True)
    y, _ = call(x, residual)
    dy = torch.randn_like(y)
    dx, dr = torch.autograd.grad(y, (x, residual), dy)
    wide = (x.detach().double().requires_grad_(), residual.detach().requires_grad_())
    expected = torch.autograd.grad(call(*wide)[0], wide, dy.double())
    torch.testing.assert_close(dr, expected[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx, expected[0].to(dtype))

"""What the operators launch is replayed: for every width, and on a GPU with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fake_gpu import FakeGpu, counted
from onepass.core.launch import replay


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(replay, "_on_gpu", lambda x: True)
    return FakeGpu()


# one program or several for a row, teams that are launched one way or the other, forward and backward
_WIDTHS = [(64, 1024), (3, 5, 384), (9, 768), (2, 3000), (4, 5120), (4, 16384), (3, 40000), (2, 65536), (2, 262144)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", _WIDTHS, ids=str)
@pytest.mark.parametrize("name", ["weighted_sum", "layer_norm", "rms_norm", "stable", "residual"])
def test_the_operators_calls_are_replayed(
    gpu: FakeGpu, name: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but allocations, views and launches lies between their arguments and their results."""
    pytest.importorskip("triton")
    from onepass.ops._shared import kernels_partials
    from onepass.ops.norm import launch as norm_launch
    from onepass.ops.norm import plain as norm
    from onepass.ops.weighted_sum import kernels_triton, op

    def launch(kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, **options: Any) -> None:
        gpu.launch(grid, tensors, 1.0)

    for module in (norm_launch, kernels_triton, kernels_partials):
        monkeypatch.setattr(module, "launch", launch)
    for module in (norm_launch, kernels_triton):
        monkeypatch.setattr(module, "sm_count", lambda x: 132)
    monkeypatch.setattr(kernels_partials, "dependent_launch", lambda x: True)
    for module in (norm, op):
        monkeypatch.setattr(module, "uses_triton", lambda x: True)
    x, w, r = (torch.empty(size, dtype=dtype) for size in (shape, shape[-1], shape))
    if name == "weighted_sum":
        run, calls = counted(op._forward)
        back, back_calls = counted(op._backward)
        forward, backward = (x, w, None), (torch.empty(shape[:-1], dtype=dtype), x, w, True, True)
    else:
        has_mean, stable = name != "rms_norm", name == "stable"
        options, b = (1e-5, 0.0, has_mean, stable), torch.empty(shape[-1], dtype=dtype) if has_mean else None
        given = (x, r, w, b) if name == "residual" else (x, w, b)
        run, calls = counted(norm._forward_residual if name == "residual" else norm._forward)
        back, back_calls = counted(norm.backward)
        forward = (*given, *options)
        stats = torch.empty(1 + has_mean + stable, x.numel() // shape[-1])
        ds = torch.empty(shape, dtype=dtype) if name == "residual" else None
        backward = (r, ds, x, stats, w, dtype, *options, True, True, has_mean)
    for _ in range(5):
        run(*forward)
        back(*backward)
    assert (calls, back_calls) == ([2], [2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_on_a_gpu_give_the_same_bits(dtype: torch.dtype) -> None:
    from onepass import layer_norm, rms_norm, weighted_sum

    calls: list[Callable[..., Any]] = [
        lambda x, w, b, r: layer_norm(x, w, b),
        lambda x, w, b, r: layer_norm(x, w, b, residual=r),
        lambda x, w, b, r: rms_norm(x, w),
        lambda x, w, b, r: weighted_sum(x, w),
    ]
    for shape in ((64, 1024), (4, 40960), (5, 33)):
        for call in calls:
            first = None
            x, r = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
            w, b = (torch.randn(shape[-1], device="cuda", dtype=dtype) for _ in range(2))
            dy = torch.randn(shape, device="cuda", dtype=dtype)
            for _ in range(5):
                # other addresses every time
                inputs = [t.clone().requires_grad_() for t in (x, w, b, r)]
                y = call(*inputs)
                y = y[0] if isinstance(y, tuple) else y
                grads = torch.autograd.grad(y, inputs, dy.view(-1)[: y.numel()].view(y.shape), allow_unused=True)
                results = [y, *(g for g in grads if g is not None)]
                first = first or results
                assert all(torch.equal(a, c) for a, c in zip(first, results, strict=True))

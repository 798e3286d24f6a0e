"""torch's own norms as independent oracles, mixed dtypes, and what backward keeps in memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import layer_norm, rms_norm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_both_terms_of_the_sum_get_one_gradient() -> None:
    x, r = (torch.randn(5, 40, requires_grad=True) for _ in range(2))
    y, s = rms_norm(x, residual=r)
    seen = []
    for t in (x, r):
        t.register_hook(lambda g: seen.append(g.data_ptr()))
    (y.sum() + s.sum()).backward()
    assert len(set(seen)) == 1
    assert torch.equal(x.grad, r.grad)
    x.grad.zero_()
    assert r.grad.any(), "the .grad of two leaves must not share memory"


def _kept_bytes(run, *parameters: Tensor) -> int:
    """Bytes that are kept for backward; the parameters are there anyway."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = run()
    del out
    unique = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in saved}
    return sum(size for address, size in unique.items() if address not in {p.data_ptr() for p in parameters})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_backward_keeps(device: str, dtype: torch.dtype) -> None:
    rows, cols = 40, 64
    x, r = (torch.randn(rows, cols, device=device).to(dtype).requires_grad_() for _ in range(2))
    w, b = (torch.ones(cols, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    row = x.numel() * x.element_size()
    assert _kept_bytes(lambda: layer_norm(x, w, b), w, b) == row + 8 * rows
    assert _kept_bytes(lambda: layer_norm(x, w, b, stable=True), w, b) == row + 12 * rows
    assert _kept_bytes(lambda: layer_norm(x, w, b, residual=r), w, b) == row + 8 * rows
    assert _kept_bytes(lambda: rms_norm(x, w), w) == row + 4 * rows
    assert _kept_bytes(lambda: rms_norm(x)) == row + 4 * rows


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(8192, 1024), (4096, 8192), (512, 65536)])
def test_peak_memory_of_backward(rows: int, cols: int) -> None:
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w, b = (torch.ones(cols, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    dy = torch.randn_like(x)
    for _ in range(2):
        y = layer_norm(x, w, b)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(y, (x, w, b), dy)
        peak = torch.cuda.max_memory_allocated() - before
        del grads
    # several programs per multiprocessor for narrow rows: faster, at one more partial row each
    per_sm = 4 if cols <= 1024 else 2 if cols <= 3072 else 1
    programs = torch.cuda.get_device_properties(0).multi_processor_count * per_sm
    assert peak <= x.numel() * 2 + programs * cols * 8 + 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_default_eps_is_torchs(dtype: torch.dtype) -> None:
    """Which small x shows; other calls as torch's are in tests/ops/test_torchs_calls.py and tests/peers."""
    x, w = (1e-3 * torch.randn(5, 16)).to(dtype), torch.randn(16).to(dtype)
    equal = partial(torch.testing.assert_close, rtol=1e-6 if dtype != torch.bfloat16 else 1e-2, atol=1e-6)
    equal(rms_norm(x, [16]), F.rms_norm(x, [16]))
    equal(rms_norm(x, w), F.rms_norm(x, (16,), w))

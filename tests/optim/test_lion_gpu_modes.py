"""int8, cautious, clipping and releasing on CUDA: against the CPU, repeated, resumed, captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.optim import Lion, clip_grad_norm, release_gradients

pytestmark = pytest.mark.gpu

SHAPES = [(3, 4), (5,), (0,), (), (1023,), (1024,), (1025,), (130, 300), (1 << 20,), (999_999,)]
# no 16-bit numbers are an exact tie with these
BETAS = (0.9137, 0.99)


def make(dtype: torch.dtype, shapes: Any = SHAPES) -> list[Tensor]:
    return [torch.randn(s, device="cuda").to(dtype) for s in shapes]


LOW = [
    (torch.float32, {"state_dtype": "int8"}),
    (torch.bfloat16, {"state_dtype": "int8", "low_precision": "none"}),
    (torch.bfloat16, {"state_dtype": "int8", "low_precision": "remainder"}),
    (torch.float16, {"state_dtype": "int8"}),
    (torch.float32, {"cautious": True}),
    (torch.bfloat16, {"cautious": 0.25, "cautious_weight_decay": True}),
    (torch.bfloat16, {"cautious": True, "state_dtype": "int8"}),
]


@pytest.mark.parametrize(("dtype", "options"), LOW, ids=str)
def test_low_precision_and_cautious_are_the_cpus(dtype: torch.dtype, options: dict[str, Any]) -> None:
    a = [p.requires_grad_() for p in make(dtype, [*SHAPES, (5000,)])]
    b = [p.detach().cpu().requires_grad_() for p in a]
    fused, on_cpu = (Lion(x, lr=1e-2, weight_decay=0.1, betas=BETAS, **options) for x in (a, b))
    for _ in range(3):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.cpu()
        fused.step()
        on_cpu.step()
    assert fused._work is not None
    assert fused._work.all_fused
    for p, q in zip(a, b, strict=True):
        # fp32 may round a tie, or a code, to the other side; then the weight differs by the step
        differ = (p.cpu().double() - q.double()).abs() > 1e-5 + 2.0**-7 * q.double().abs() * (dtype != torch.float32)
        assert differ.sum() <= 1 + p.numel() // 500
        for key, value in on_cpu.state[q].items():
            other = fused.state[p][key].cpu()
            assert other.dtype == value.dtype
            if value.dtype in (torch.int8, torch.int64):
                assert (other != value).sum() <= p.numel() // 50


@pytest.mark.parametrize(("dtype", "options"), LOW, ids=str)
def test_low_precision_is_deterministic_resumes_and_does_not_depend_on_grouping(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    start = make(dtype, [(5000,), (77,), (300_001,)])

    def train(optimizer: Lion, params: list[Tensor], steps: range) -> None:
        for step in steps:
            for i, p in enumerate(params):
                generator = torch.Generator("cuda").manual_seed(100 * step + i)
                p.grad = torch.randn(p.shape, device="cuda", generator=generator).to(dtype)
            optimizer.step()

    results = []
    for grouping in ([[0, 1, 2]], [[0, 1, 2]], [[0], [1], [2]]):
        params = [p.clone().requires_grad_() for p in start]
        optimizer = Lion([{"params": [params[i] for i in g]} for g in grouping], lr=1e-3, weight_decay=0.1, **options)
        train(optimizer, params, range(3))
        if len(results) == 1:
            weights, state = [p.detach().clone().requires_grad_() for p in params], optimizer.state_dict()
            params, optimizer = weights, Lion(weights, lr=5.0)
            optimizer.load_state_dict(state)
        train(optimizer, params, range(3, 6))
        results.append([p.detach() for p in params] + [optimizer.state[p]["exp_avg"] for p in params])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clipping_is_torchs_waits_for_nothing_and_repeats_its_bits(dtype: torch.dtype) -> None:
    a = [p.requires_grad_() for p in make(dtype, [*SHAPES, (3_000_001,)])]
    optimizer = Lion(a, lr=1e-2, betas=BETAS, state_dtype=torch.float32)
    for p in a:
        p.grad = torch.randn_like(p)
    want = float(torch.nn.utils.get_total_norm([p.grad.double() for p in a if p.grad is not None]))
    first = clip_grad_norm(a, 2.0)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norms = []
        for _ in range(20):
            for p in a:
                assert p.grad is not None
                p.grad = p.grad.clone()
            norms.append(clip_grad_norm(a, 2.0))
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert abs(float(first) - want) < 1e-5 * want
    assert all(torch.equal(n, first) for n in norms)
    p = a[-1]
    assert p.grad is not None
    m = optimizer.state[p]["exp_avg"].double()
    assert torch.allclose(m, p.grad.double() * (2.0 / want) * (1 - 0.99**21), rtol=1e-4)


def test_clipping_with_grad_scaler_and_mixed_dtypes() -> None:
    a = [torch.zeros(1000, device="cuda", dtype=t, requires_grad=True) for t in (torch.float32, torch.float16)]
    optimizer = Lion(a, state_dtype=torch.float32, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    scale = scaler.scale(torch.ones((), device="cuda"))
    for p in a:
        p.grad = torch.full_like(p, 3.0 * 256)
    norm = clip_grad_norm(a, 1.0, grad_scale=scale)
    assert abs(float(norm) - 3.0 * 2000**0.5) < 1e-3
    scaler.step(optimizer)
    for p in a:
        m = optimizer.state[p]["exp_avg"]
        assert torch.allclose(m, torch.full_like(m, 0.01 / 2000**0.5), rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"state_dtype": "int8"}, {"cautious": True}])
def test_graph_with_clipping_and_every_mode(options: dict[str, Any]) -> None:
    a = [p.requires_grad_() for p in make(torch.bfloat16, [(5000,), (70,)])]
    b = [p.detach().clone().requires_grad_() for p in a]
    captured, eager = (Lion(x, lr=1e-2, capturable=c, **options) for x, c in ((a, True), (b, False)))
    for p in a:
        p.grad = torch.zeros_like(p)

    def grads() -> None:
        for p, q in zip(a, b, strict=True):
            q.grad = torch.randn_like(q)
            assert p.grad is not None
            p.grad.copy_(q.grad)

    def both(optimizer: Lion, params: list[Tensor]) -> None:
        clip_grad_norm(params, 0.5)
        optimizer.step()

    grads()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both(captured, a)
    torch.cuda.current_stream().wait_stream(stream)
    both(eager, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both(captured, a)
    for _ in range(4):
        grads()
        graph.replay()
        both(eager, b)
        for p, q in zip(a, b, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(captured.state[p]["exp_avg"], eager.state[q]["exp_avg"])


def test_released_gradients_take_less_memory_and_change_nothing() -> None:
    def build() -> tuple[torch.nn.Module, Lion]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(12))).cuda()
        return model, Lion(model.parameters(), lr=1e-3)

    x = torch.randn(8, 2048, device="cuda")
    peaks, models = [], []
    for released in (False, True):
        model, optimizer = build()
        if released:
            release_gradients(model, optimizer, bucket_bytes=1 << 24)
        for i in range(3):
            if i == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        models.append(model)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    # 12 gradients of 16 MiB against two of them and what backward itself needs
    assert peaks[0] > 12 << 24
    assert peaks[1] < 4 << 24

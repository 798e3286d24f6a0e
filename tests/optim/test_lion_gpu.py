"""Lion on CUDA beyond its values (tests/ops/lion has those): groups, waiting, memory, CUDA graphs, devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness import waiting_is_an_error
from lion_params import (
    BETAS,
    GPU_SHAPES,
    assert_same,
    assert_same_states,
    clones,
    make_params,
    set_grads,
    update_lists_,
)
from onepass.ops.lion.definition import Row
from onepass.optim import Lion, clip_grad_norm, release_gradients

pytestmark = pytest.mark.gpu


def on_gpu(dtype: torch.dtype, shapes: Any = GPU_SHAPES) -> list[Tensor]:
    return make_params(dtype, shapes, "cuda")


def test_fused_true_refuses_what_it_cannot_do() -> None:
    strided = torch.ones(4, 6, device="cuda")[:, ::2].requires_grad_()
    others = [torch.ones(3, device="cuda", dtype=t, requires_grad=True) for t in (torch.float64, torch.complex128)]
    for p in (strided, *others):
        p.grad = torch.ones_like(p, memory_format=torch.contiguous_format)
        with pytest.raises(RuntimeError, match="`fused=True` requires dense parameters of supported dtypes"):
            Lion([p], fused=True).step()
        Lion([p], lr=0.5).step()
        assert torch.equal(p, torch.full_like(p, 0.5))


def test_the_scalers_step_does_not_wait_with_fused() -> None:
    """Without it GradScaler reads found_inf itself; the kernel is taken either way."""
    for fused in (None, True):
        p = torch.ones(3000, device="cuda", requires_grad=True)
        optimizer = Lion([p], lr=0.25, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)

        def step(p: Tensor = p, optimizer: Lion = optimizer, scaler: Any = scaler) -> None:
            p.grad = scaler.scale(torch.ones_like(p))
            scaler.step(optimizer)
            scaler.update()

        step()
        with waiting_is_an_error():
            if fused:
                step()
            else:
                with pytest.raises(RuntimeError, match="synchroniz"):
                    step()
        assert optimizer.current_work()[0].all_fused


def test_no_extra_memory() -> None:
    params = on_gpu(torch.float32, [(1 << 22,)] * 8)
    set_grads(params)
    optimizer = Lion(params)
    torch.cuda.synchronize()
    # what was asked for: the allocator hands out up to a megabyte more with a large block
    key = "requested_bytes.all."
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()[key + "current"]
    optimizer.step()
    states = sum(p.numel() * 4 for p in params)
    assert torch.cuda.memory_stats()[key + "peak"] - before - states < 1 << 20


def test_states_follow_a_moved_model_through_their_state_dict() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = Lion(model.parameters(), lr=0.25)
    for device in ("cpu", "cuda", "cpu"):
        model.to(device)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if optimizer.state:
            with pytest.raises(ValueError, match=r"its state exp_avg on c.*load_state_dict"):
                optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        before = model.weight.detach().clone()
        optimizer.step()
        assert torch.equal(model.weight, before - 0.25)


def test_more_than_2_to_31_elements() -> None:
    n = 2**31 + 1025
    if torch.cuda.mem_get_info()[0] < 4 * 2 * n:
        pytest.skip("needs 18 GiB")
    p, g, m = (torch.zeros(n, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    g[-3:] = 1.0
    g[7] = -1.0
    update_lists_([p], [g], [m], [], [0], [Row(0.5, 0.0, 0.9, 0.1, 0.99, 0.01, 1.0, 0.0)])
    assert torch.equal(p[-4:].float().cpu(), torch.tensor([0.0, -0.5, -0.5, -0.5]))
    assert p[7] == 0.5
    assert p.count_nonzero() == 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_other_devices_are_guarded() -> None:
    params = [torch.ones(3, device=f"cuda:{i}", requires_grad=True) for i in (0, 1)]
    for p in params:
        p.grad = torch.ones_like(p)
    Lion(params, lr=0.5).step()
    for p in params:
        assert torch.equal(p.cpu(), torch.full((3,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clipping_is_torchs_waits_for_nothing_and_repeats_its_bits(dtype: torch.dtype) -> None:
    a = on_gpu(dtype, [*GPU_SHAPES, (3_000_001,)])
    optimizer = Lion(a, lr=torch.tensor(1e-2, device="cuda"), betas=BETAS, state_dtype=torch.float32)
    set_grads(a)
    want = float(torch.nn.utils.get_total_norm([p.grad.double() for p in a if p.grad is not None]))
    first = clip_grad_norm(a, 2.0)
    optimizer.step()
    norms = []
    with waiting_is_an_error():
        for i in range(20):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (i // 5)
            for p in a:
                assert p.grad is not None
                p.grad = p.grad.clone()
            norms.append(clip_grad_norm(a, 2.0))
            optimizer.step()
    assert abs(float(first) - want) < 1e-5 * want
    assert all(torch.equal(n, first) for n in norms)
    p = a[-1]
    assert p.grad is not None
    m = optimizer.state[p]["exp_avg"].double()
    assert torch.allclose(m, p.grad.double() * (2.0 / want) * (1 - 0.99**21), rtol=1e-4)


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
    assert_same([*models[0].parameters()], [*models[1].parameters()])
    # 12 gradients of 16 MiB against two of them and what backward itself needs
    assert peaks[0] > 12 << 24
    assert peaks[1] < 4 << 24


def captured_step(optimizer: Lion, params: list[Tensor], clip: bool = False) -> torch.cuda.CUDAGraph:
    """A graph of a step, after one on another stream; capturing changes no parameter."""

    def step() -> None:
        if clip:
            clip_grad_norm(params, 0.5)
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    before = clones(params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert_same(params, before)
    return graph


@pytest.mark.parametrize(
    ("dtype", "options", "clip"),
    [
        (torch.float32, {"weight_decay": 0.1}, False), (torch.bfloat16, {"weight_decay": 0.1}, False),
        (torch.bfloat16, {}, True), (torch.bfloat16, {"state_dtype": "int8"}, True),
        (torch.bfloat16, {"cautious": True}, True),
    ],
    ids=str,
)  # fmt: skip
def test_graph_replay_sees_the_schedulers_lr_and_clips(dtype: torch.dtype, options: dict[str, Any], clip: bool) -> None:
    a = on_gpu(dtype, [(5000,), (50, 7)])
    b = clones(a)
    captured, eager = (
        Lion([{"params": ps[:1]}, {"params": ps[1:], "lr": 3e-2}], lr=1e-2, capturable=c, **options)
        for ps, c in ((a, True), (b, False))
    )
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 0.5**i) for o in (captured, eager)]
    kept = [torch.zeros_like(p) for p in a]

    def grads() -> None:
        set_grads(b)
        for p, q, g in zip(a, b, kept, strict=True):
            assert q.grad is not None
            p.grad = g.copy_(q.grad)

    def step(optimizer: Lion, params: list[Tensor]) -> None:
        if clip:
            clip_grad_norm(params, 0.5)
        optimizer.step()

    grads()
    graph = captured_step(captured, a, clip)
    step(eager, b)
    for i in range(5):
        for scheduler in schedulers:
            scheduler.step()
        grads()
        if i == 3:
            step(captured, a)  # an eager step between replays must not disturb the graph's table, nor it this one's
        else:
            graph.replay()
        step(eager, b)
        assert_same(a, b)
        assert_same_states(captured, a, eager, b)


def test_capture_needs_capturable_and_a_first_step() -> None:
    for capturable in (False, True):
        p = torch.ones(3, device="cuda", requires_grad=True)
        p.grad = torch.ones(3, device="cuda")
        optimizer = Lion([p], capturable=capturable)
        if not capturable:
            optimizer.step()
        words = "take a step before" if capturable else "capturable is False"
        with pytest.raises(RuntimeError, match=words), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
        torch.cuda.synchronize()


def test_a_graph_outlives_the_launch_that_it_captured(cautious: bool) -> None:
    params = on_gpu(torch.float32, [(1000,), (5000,)])
    twins = clones(params)
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "cautious": cautious}
    captured, eager = Lion(params, capturable=True, **options), Lion(twins, **options)
    set_grads(params, twins)
    graph = captured_step(captured, params)
    eager.step()
    used = params[0].grad
    for _ in range(4):
        # without a gradient it is another launch; what the first one held is free to be given to others
        params[0].grad = twins[0].grad = None
        captured.step()
        eager.step()
        others = [torch.full((2,), 7, dtype=torch.int64, device="cuda") for _ in range(1000)]
        pinned = [torch.full((n,), -1, dtype=torch.int64).pin_memory() for n in (16, 32, 64, 128)]
        params[0].grad, twins[0].grad = used, None if used is None else used.clone()
        graph.replay()
        eager.step()
        assert_same(params, twins)
        assert all(bool((t == 7).all()) for t in others)
        assert all(bool((t == -1).all()) for t in pinned)

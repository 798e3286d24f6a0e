"""Lion's steps captured in CUDA graphs: what a replay reads, and how long that lives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.optim import Lion

pytestmark = pytest.mark.gpu


def make(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s, device="cuda").to(dtype) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_replay_sees_the_schedulers_lr(dtype: torch.dtype) -> None:
    a = [p.requires_grad_() for p in make(dtype, (1000,), (50, 7))]
    b = [p.detach().clone().requires_grad_() for p in a]
    captured = Lion([{"params": a[:1]}, {"params": a[1:], "lr": 3e-2}], lr=1e-2, weight_decay=0.1, capturable=True)
    eager = Lion([{"params": b[:1]}, {"params": b[1:], "lr": 3e-2}], lr=1e-2, weight_decay=0.1)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 0.5**i) for o in (captured, eager)]

    def grads() -> None:
        for p, q in zip(a, b, strict=True):
            q.grad = torch.randn_like(q)
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(q.grad)

    grads()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    eager.step()
    graph = torch.cuda.CUDAGraph()
    before = [p.detach().clone() for p in a]
    with torch.cuda.graph(graph):
        captured.step()
    for p, old in zip(a, before, strict=True):
        assert torch.equal(p, old), "capturing must not run"
    for i in range(5):
        for scheduler in schedulers:
            scheduler.step()
        grads()
        if i == 3:
            captured.step()  # an eager step between replays must not disturb the graph's table, nor it this one's
        else:
            graph.replay()
        eager.step()
        for p, q in zip(a, b, strict=True):
            assert torch.equal(p, q)


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


@pytest.mark.parametrize("cautious", [False, True])
def test_a_graph_outlives_the_launch_that_it_captured(cautious: bool) -> None:
    params = [p.requires_grad_() for p in make(torch.float32, (1000,), (5000,))]
    twins = [p.detach().clone().requires_grad_() for p in params]
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "cautious": cautious}
    captured, eager = Lion(params, capturable=True, **options), Lion(twins, **options)
    for p, q in zip(params, twins, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    captured.step()
    eager.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
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
        assert all(map(torch.equal, params, twins))
        assert all(bool((t == 7).all()) for t in others)
        assert all(bool((t == -1).all()) for t in pinned)


def test_float64_weights_have_float64_options() -> None:
    """1e-4 in fp32 is off by 2.5e-8 of it."""
    (p,) = make(torch.float64, (100,))
    start, g = p.clone(), torch.randn_like(p)
    optimizer = Lion(
        [p.requires_grad_()], lr=1e-4, weight_decay=torch.tensor(0.1, dtype=torch.float64), capturable=True
    )
    p.grad = g
    optimizer.step()
    expected = start - 1e-4 * (g.sign() + 0.1 * start)
    # four roundings of numbers that are no larger than the largest weight
    assert (p - expected).abs().max() <= 4 * torch.finfo(torch.float64).eps * start.abs().max()

"""`Gradients`: a step replayed from a CUDA graph is the step as written, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from onepass.train import data, loop
from onepass.train.captured import EAGER, Gradients
from onepass.train.run import Run
from train.tiny import config, write_texts

gpu = pytest.mark.gpu


def _training(path: Path, **values: object) -> loop.Training:
    corpus = data.load([write_texts(path / "text")])
    small = {"batch": 4, "seq": 128, "dim": 64, "steps": 8, "device": "cuda", "precision": "bf16"}
    run = Run(path / "run")
    run.path.mkdir()
    settings = config(**{**small, "data": corpus.digest, "paths": (), **values})
    run.create(settings, corpus.manifest())
    return loop.Training(settings, corpus, run, 50)


def test_each_call_gives_the_gradients_of_this_call_alone(together: bool) -> None:
    """In one buffer each begins where kernels may read 16 bytes; a parameter without a gradient keeps none."""
    model, idle = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5)), nn.Parameter(torch.ones(4))
    parameters, buffers = [*model.parameters(), idle], set()
    run = Gradients(lambda x: model(x).square().mean(), parameters, torch.device("cpu"), together=together)
    for _ in range(2):
        x = torch.randn(5, 3)
        loss, want = run(x), model(x).square().mean()
        assert torch.equal(loss, want)
        assert not loss.requires_grad
        for parameter, grad in zip(parameters, torch.autograd.grad(want, parameters[:-1]), strict=False):
            assert torch.equal(parameter.grad, grad)
            assert not together or parameter.grad.storage_offset() % 4 == 0
        assert idle.grad is None
        buffers.add(run.flat.data_ptr())
    assert run.why_eager == "no CUDA device"
    run.flat.zero_()
    assert len(buffers) == 1
    assert any(parameter.grad.any() for parameter in parameters[:-1]) == (not together)


@gpu
@pytest.mark.parametrize("values", [{}, {"task": "causal"}], ids=["masked", "causal"])
def test_a_captured_run_has_the_bits_of_an_eager_one(tmp_path: Path, values: dict[str, object]) -> None:
    captured = _training(tmp_path / "a", **values)
    eager = _training(tmp_path / "b", **values)
    eager.gradients.why_eager = "for comparison"
    for step in range(8):
        losses = captured._one_step(), eager._one_step()
        assert torch.equal(*losses), f"step {step}: {losses}"
        captured.step += 1
        eager.step += 1
    assert captured.gradients.graph is not None, captured.gradients.why_eager
    assert captured.update.graph is not None, captured.update.why_eager
    assert eager.gradients.graph is eager.update.graph is None
    for (name, a), b in zip(captured.model.named_parameters(), eager.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    # measuring between steps leaves the graph as it is
    assert captured.measure(2) == eager.measure(2)
    assert torch.equal(captured._one_step(), eager._one_step())


@gpu
def test_what_cannot_be_captured_runs_as_written() -> None:
    model = nn.Linear(3, 1, device="cuda")
    run = Gradients(lambda x: model(x).mean() * x.sum().item(), list(model.parameters()), torch.device("cuda"))
    for _ in range(EAGER + 2):
        x = torch.randn(5, 3, device="cuda")
        assert torch.equal(run(x), (model(x).mean() * x.sum()).detach())
        assert torch.isfinite(model.weight.grad).all()
    assert run.graph is None
    assert "operation not permitted" in run.why_eager
    # a failed capture would leave torch's random numbers refusing to be drawn
    assert torch.rand(2, device="cuda").isfinite().all()


@gpu
def test_a_graph_that_is_garbage_does_not_end_the_next_capture() -> None:
    def captured() -> Gradients:
        model = nn.Linear(3, 2).cuda()

        def loss(x: torch.Tensor) -> torch.Tensor:
            # enough to start a collection
            _ = [[] for _ in range(100_000)]
            return model(x).square().mean()

        run = Gradients(loss, list(model.parameters()), torch.device("cuda"))
        for _ in range(EAGER + 1):
            run(torch.randn(5, 3, device="cuda"))
        # a ring of references: it lives until a collection
        model.run = run
        return run

    for _ in range(3):
        assert captured().why_eager == ""

"""DTensors in several processes; cases.py gathers them from operators.py, optimizer.py, experts.py and modules.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sharded.processes import run

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def test_two_processes() -> None:
    errors = run("cases.py", 2)
    assert not errors, errors


def test_layers_in_the_dtype_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that names its own dtype beside that of `wide` would fail where nobody runs it, on two GPUs."""
    monkeypatch.setenv("CASES_IN_FP32", "1")
    errors = run("cases.py", 2, room="modules")
    assert not errors, errors


@pytest.mark.slow
def test_four_processes() -> None:
    errors = run("cases.py", 4)
    assert not errors, errors


@pytest.mark.slow
def test_kernels_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    errors = run("cases.py", 2)
    assert not errors, errors


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("room", ["experts", "modules", "operators", "optimizer"])
def test_two_gpus(room: str) -> None:
    errors = run("cases.py", 2, "cpu:gloo,cuda:nccl", room)
    assert not errors, errors

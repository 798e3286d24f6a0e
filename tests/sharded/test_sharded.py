"""DTensors in several processes; cases.py gathers them from operators.py, optimizer.py and modules.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sharded.processes import run

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes(count: int) -> None:
    run("cases.py", count)


@pytest.mark.slow
def test_layers_in_the_dtype_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that names its own dtype beside that of `wide` would fail where nobody runs it, on two GPUs."""
    monkeypatch.setenv("CASES_IN_FP32", "1")
    run("cases.py", 2, room="modules")


@pytest.mark.slow
def test_kernels_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run("cases.py", 2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("room", ["modules", "operators", "optimizer"])
def test_two_gpus(room: str) -> None:
    run("cases.py", 2, "cpu:gloo,cuda:nccl", room)

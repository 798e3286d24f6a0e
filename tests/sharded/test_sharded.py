"""DTensors in several processes; the cases are in operators.py, optimizer.py, modules.py and balance.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sharded.processes import run

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


EVERY = pytest.mark.parametrize("script", ["operators.py", "optimizer.py", "modules.py", "balance.py"])


@EVERY
def test_two_processes(script: str) -> None:
    errors = run(script, 2)
    assert not errors, errors


@pytest.mark.slow
@EVERY
def test_four_processes(script: str) -> None:
    errors = run(script, 4)
    assert not errors, errors


@pytest.mark.slow
def test_kernels_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    errors = run("modules.py", 2)
    assert not errors, errors


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@EVERY
def test_two_gpus(script: str) -> None:
    errors = run(script, 2, "cpu:gloo,cuda:nccl")
    assert not errors, errors

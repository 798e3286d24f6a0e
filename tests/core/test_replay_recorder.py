"""What the recorder of a replay sees: arguments that overlap; and what it does not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fake_gpu import FakeGpu, counted, scale
from onepass.core.launch import replay


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(replay, "_on_gpu", lambda x: True)
    return FakeGpu()


def test_overlapping_arguments_are_told_apart_by_where_they_begin(gpu: FakeGpu) -> None:
    """q and k of a packed projection: each lies within the other's first and last byte."""
    run, calls = counted(scale(gpu))
    packed = torch.randn(4, 24)
    for _ in range(2):
        run(packed[:, :8], packed[:, 8:16], 0.5)
    # another distance, another order
    for q, k in (
        (packed[:, 8:16], packed[:, 16:]),
        (packed[:, 16:], packed[:, :8]),
        (packed[:, :8], torch.randn(4, 24)[:, :8]),
    ):
        gpu.launched.clear()
        run(q, k, 0.5)
        assert gpu.launched[0][5:7] == (q.data_ptr(), k.data_ptr())
        assert gpu.launched[1][5] == q.data_ptr()
    assert calls == [2]


def test_a_view_that_may_begin_where_another_argument_does_is_not_recorded(gpu: FakeGpu) -> None:
    def function(x: Tensor, other: Tensor) -> Tensor:
        y = torch.empty_like(x)
        for part in x.split(4, 1):
            gpu.launch((1, 1, 1), (part, other, y), 1.0)
        return y

    run, calls = counted(function)
    packed = torch.randn(4, 12)
    for _ in range(4):
        run(packed[:, :8], packed[:, 4:])
    assert calls == [4]


def test_recording_does_not_import_the_compiler() -> None:
    # it takes 2 to 4 s, in the second step of a program that may never compile anything
    program = """
import sys, torch
from onepass.core.launch import replay
with replay._Recorder((torch.ones(3),)):
    torch.empty(3)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)

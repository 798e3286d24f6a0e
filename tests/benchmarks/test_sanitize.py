"""`benchmarks.sanitize` without a sanitizer: its calls compute what they claim, and its verdict can be bad."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import sanitize
from benchmarks import sanitize_calls as calls
from benchmarks.sanitize_calls import OPERATORS
from fake_gpu import everywhere
from onepass.core.launch import INTERPRET


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_has_calls_that_agree(op: str) -> None:
    found = list(itertools.islice(calls.calls(op), 6))
    assert found, f"{op}: nothing to run"
    for _, call in found:
        call()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRET, reason="teams never run under the interpreter")
# lion asks its tensors whether they are CUDA's; both of its kernels are in every step
@pytest.mark.parametrize("op", [op for op in OPERATORS if op != "lion"])
def test_calls_reach_every_kernel(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """On a GPU of 132 multiprocessors, whose launches are noted here and compute nothing."""
    launched: set[str] = set()

    def note(kernel: Any, *args: Any, **options: Any) -> None:
        launched.add(sanitize._where(kernel))

    def on_gpu(x: Any, *args: Any) -> bool:
        return bool(x.dtype != torch.float64)

    everywhere(monkeypatch, launch=note, launch_specialized=note, uses_triton=on_gpu, sm_count=lambda x: 132)
    monkeypatch.setattr(torch.testing, "assert_close", lambda *args, **options: None)
    for _, call in calls.calls(op):
        call()
    assert sanitize.kernels(op) - launched == set()


def test_what_a_log_says() -> None:
    clean = 'RESULT {"calls": 3, "wrong": 0}\n========= ERROR SUMMARY: 0 errors\n'
    assert sanitize.read_log(clean) == {"errors": 0, "calls": 3, "wrong": 0}
    many = (
        "========= ERROR SUMMARY: 68 errors\n========= ERROR SUMMARY: 18 errors were not printed. Use --print-limit\n"
    )
    assert sanitize.read_log(many) == {"errors": 68}
    race = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    assert sanitize.read_log(race) == {"errors": 2}
    assert sanitize.read_log("killed")["errors"] is None


@pytest.mark.parametrize(("planted", "ours", "code"), [(1, 0, 0), (0, 0, 1), (1, 1, 1)])
def test_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: int, ours: int, code: int) -> None:
    """Clean is: no error in the operator, and the planted one seen."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\nprint('RESULT {{\"wrong\": 0}}')\n"
        f"print('ERROR SUMMARY: %d errors' % ({planted} if 'planted' in sys.argv else {ours}))\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    arguments = ["sanitize.py", "--op", "weighted_sum", "--op", "planted", "--tool", "memcheck", "--processes", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    command = sanitize._command
    monkeypatch.setattr(sanitize, "_command", lambda *given: command(*given) if given[2] else ["true"])
    assert sanitize.main() == code

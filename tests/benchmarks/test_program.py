"""`python -m benchmarks program` on a CPU, with a program of one layer in place of the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.__main__ import main
from benchmarks.bench import program, programs
from benchmarks.bench.programs import Program


def _x(device: str) -> Tensor:
    return torch.randn(3, 4, device=device, requires_grad=True)


def _fails(device: str) -> nn.Module:
    raise RuntimeError("kaput\nand more")


def _found(device: str) -> list[Program]:
    return [
        Program("dense", "3x4", lambda device: nn.Linear(4, 4), _x),
        Program("ours", "3x4", lambda device: nn.Linear(4, 4, bias=False), _x, base="dense"),
        Program("alone", "3x4", lambda device: nn.Identity(), _x, autocast=False, backward=False),
    ]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "programs", _found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _run(*arguments: str) -> int:
    return main(["program", "--no-compile", "--quick", *arguments])


def test_table_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "program.json"
    assert _run("--json", str(path)) == 0
    header, *records = json.loads(path.read_text())
    assert header["failed"] == []
    assert header["torch"] == torch.__version__
    assert [(r["program"], r["mode"]) for r in records] == [("dense", "eager"), ("ours", "eager"), ("alone", "eager")]
    for r in records:
        assert r["host_us"] > 0
        assert r["wall_us"] > 0
        assert r["gpu_us"] is r["kernels"] is r["peak_mib"] is None
    out = capsys.readouterr().out
    ratio = next(line for line in out.splitlines() if " ours " in line).split()[-1]
    assert ratio == f"{records[0]['wall_us'] / records[1]['wall_us']:.2f}"


def test_the_base_has_the_same_case_and_mode() -> None:
    def record(name: str, case: str, mode: str, us: float) -> dict[str, Any]:
        return {"program": name, "case": case, "mode": mode, "base": "b" if name == "a" else None, "wall_us": us}

    found = [record("b", "x", "eager", 6.0), record("b", "y", "eager", 8.0), record("a", "y", "eager", 2.0)]
    assert program.against([*found, record("a", "x", "graph", 1.0)]) == {2: 4.0}


def test_a_program_that_fails_leaves_the_others_their_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "programs", lambda device: [Program("broken", "1", _fails, _x), *_found(device)])
    assert _run() == 1
    out = capsys.readouterr().out
    assert "failed: broken, 1, eager: RuntimeError: kaput\n" in out
    assert "alone" in out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_real_programs_have_bases(device: str) -> None:
    found = programs.programs(device)
    names = {(p.name, p.case) for p in found}
    assert len(names) == len(found)
    assert all((p.base, p.case) in names for p in found if p.base is not None)


def test_a_dense_and_a_routed_layer_on_a_cpu() -> None:
    """The modules are built and run as the command does."""
    for p in programs.programs("cpu")[:5]:
        record = program.measure(p, "cpu", "eager", 1)
        assert record["wall_us"] > 0  # seconds of a first step are rounded, to 0 for a quick one


def test_list_and_selection(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--list", "--case", "ours") == 0
    assert capsys.readouterr().out == "ours, 3x4, eager\n"
    assert _run("--case", "nothing like it") == 2
    assert "no case matches; --list shows what there is" in capsys.readouterr().err
    assert _run("--device", "cuda") == 2
    assert "torch sees no CUDA GPU here" in capsys.readouterr().err

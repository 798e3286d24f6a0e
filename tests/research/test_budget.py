"""`research.budget`: what a run promises, whose turn it is, what goes on after a stop, tables of the records."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass.train import data
from onepass.train.commands.errors import UserError
from research.budget import report, runs, text, train
from research.budget.__main__ import main
from research.budget.model import ByteModel
from research.budget.runs import FAMILIES, Run, parse

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {"n": 64, "batch": 1, "width": 64, "depth": 2, "window": 16, "experts": 4, "seconds": 0.05}
# every family, and what only some runs have
MODELS = {
    **{family: Run(family, **TINY) for family in FAMILIES},
    "hidden bytes": Run("global", **{**TINY, "task": "hidden", "every": 2}),
    "shared, tables": Run("experts", **{**TINY, "every": 2, "shared": 1.0, "grams": 256}),
    "bf16": Run("windows", **{**TINY, "stream": "bf16", "weights": "bf16"}),
    "chosen": Run("dense", **{**TINY, "n": 512, "chosen": 2}),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.xz"
    assert main(["text", str(ROOT / "research"), str(path)]) == 0
    return path


def few(patch: pytest.MonkeyPatch) -> None:
    for name, value in {"PACE": 1, "EAGER": 1, "CURVE": 128, "FINAL": 256, "POINTS": 2}.items():
        patch.setattr(train, name, value)


def test_a_text_is_the_split_of_its_folder(file: Path) -> None:
    found, wanted = text.read(file, CPU), data.load([str(ROOT / "research")])
    assert bytes(found.training.numpy()) == wanted.training.tobytes()
    assert bytes(found.validation.numpy()) == wanted.validation.tobytes()
    assert found.digest == wanted.digest


# torch's flex attention has no backward on a CPU
@pytest.mark.parametrize("name", [name for name in MODELS if name != "chosen"])
def test_every_family_trains(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    few(monkeypatch)
    run = MODELS[name]
    record = train.train(run, text.read(file, CPU), tmp_path / "cut", math.inf) or {}
    assert 0 < record["bits"] < 10
    assert record["curve"][-1]["step"] == record["steps"]
    assert len(record["load"]) == (run.depth if run.family == "experts" else 0)
    assert record["parameters"] == sum(p.numel() for p in ByteModel(run).parameters())


@pytest.mark.parametrize("name", [name for name, run in MODELS.items() if run.task == "next"])
def test_no_byte_reads_a_later_one(name: str) -> None:
    run = MODELS[name]
    model = ByteModel(dataclasses.replace(run, stream="fp32", weights="fp32")).eval()
    for table in model.grams:
        torch.nn.init.normal_(table.table.weight)
    tokens = torch.randint(256, (1, run.n))
    other, place = tokens.clone(), 3 * run.n // 4 + 5
    other[:, place:] = torch.randint(256, other[:, place:].shape)
    with torch.no_grad():
        before, after = model(tokens)[:, :place], model(other)[:, :place]
    torch.testing.assert_close(before, after)


@pytest.mark.parametrize(
    ("line", "words"),
    [("family=dens", "family must be one of dense"), ("family=dense window=64", "window is no option of dense"),
     ("width=256", "give a family"), ("family=dense wdth=1", "'wdth' is no option of a run"),
     ("family=dense seconds=nan", "seconds must be above 0 and finite, got nan"), ("family=dense rate=inf", "got inf")],
)  # fmt: skip
def test_bad_runs_are_refused(line: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(line)


def test_bad_files_are_refused(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*options: str) -> str:
        assert main([str(option) for option in options]) == 2
        return capsys.readouterr().err

    out, dense = str(tmp_path / "out"), ("--run", "family=dense")
    assert "give some" in refused("run", out, "--text", str(file))
    assert "can't read" in refused("run", out, "--text", str(tmp_path / "none"), *dense)
    (tmp_path / "cut.xz").write_bytes(file.read_bytes()[:-100])
    assert "is no text of" in refused("run", out, "--text", str(tmp_path / "cut.xz"), *dense)
    assert "there are no records" in refused("report", str(tmp_path / "none"))
    (tmp_path / "some.json").write_text("{}")
    assert "is no record of" in refused("report", str(tmp_path))
    long = ["--text", str(file), "--device", "cpu", "--run", "family=windows n=1000000 batch=1"]
    assert "give more text" in refused("run", out, *long)


def test_a_run_takes_its_seconds_and_one_that_is_cut_goes_on_as_if_it_had_not_been(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch)
    ticks, take, ms = list[float](), train.Step.__call__, (4, 1)  # of a step before training and in it
    monkeypatch.setattr(train.Step, "__call__", lambda s, share: (ticks.append(ms[share != 1e-3]), take(s, share)))
    monkeypatch.setattr(train.time, "perf_counter", lambda: 1e-3 * sum(ticks))
    run = Run("experts", **{**TINY, "seconds": 0.064, "grams": 64})
    read, cut = text.read(file, CPU), tmp_path / "some.cut"
    whole = train.train(run, read, cut, math.inf) or {}
    for _ in range(3):  # one step a call
        assert (train.train(run, read, cut, time.monotonic()), cut.exists()) == (None, True)
    record = train.train(run, read, cut, math.inf) or {}
    assert [record[name] for name in ("steps", "bits", "seconds")] == [64, whole["bits"], 0.06]
    assert [(p["step"], p["bits"]) for p in record["curve"]] == [(p["step"], p["bits"]) for p in whole["curve"]]
    assert not cut.exists()
    cut.write_bytes(b"{}")
    with pytest.raises(UserError, match="is no state of this run"):
        train.train(run, read, cut, math.inf)


def test_the_command_from_text_to_table(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that fails stops no other, and its record says why; what is there is not trained again; a cut is told."""
    few(monkeypatch)
    tiny = "n=64 batch=1 width=64 depth=1 seconds=0.05"
    command = ["run", str(tmp_path), "--text", str(file), "--device", "cpu", "--run", f"family=dense {tiny}"]
    assert main(command) == 0
    monkeypatch.setattr(train, "update_balance", lambda model: torch.ones(2).view(3))
    assert main([*command, "--run", f"family=experts experts=4 window=16 {tiny}"]) == 1
    assert {str(record.get("error"))[:4] for _, record in runs.load(tmp_path)} == {"None", "Runt"}
    capsys.readouterr()
    assert (main(["report", str(tmp_path)]), capsys.readouterr().out) == (0, (tmp_path / "budget.md").read_text())
    monkeypatch.setattr(train, "train", lambda *_: None)  # as at the deadline
    up = "the time is up; the same command goes on with the rest\n"
    for more, said in ((["--limit", "0"], ""), (["--run", f"family=dense {tiny} seed=1"], up)):
        assert (main([*command, *more]), capsys.readouterr().out) == (0, said)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").rglob("budget.md")))
def test_committed_tables_are_of_their_records(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == report.table(runs.load(path.parent))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in MODELS if name != "bf16"])
def test_a_step_is_a_graph_that_trains(file: Path, tmp_path: Path, name: str) -> None:
    run = dataclasses.replace(MODELS[name], seconds=2.0)
    record = train.train(run, text.read(file, torch.device("cuda")), tmp_path / "cut", math.inf) or {}
    assert record["graph"]
    assert record["bits"] < 6

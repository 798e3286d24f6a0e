"""`research.ablate`: records, what is done again and what not, reports, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from onepass.train import data
from research.ablate import tables, text
from research.ablate.__main__ import main

QUICK = ["--size", "small", "--device", "cpu", "--steps", "4"]


@pytest.mark.slow
def test_all_arms_leave_records_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["planted", *QUICK, "--seed", "0", "--seed", "1", "--out", str(tmp_path)]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    wanted = {
        f"planted.{arm}.{seed}.json" for arm in ("learned", "random", "oracle", "light", "dense") for seed in (0, 1)
    }
    assert names == wanted | {"planted.width.json", "report.md", "planted.png"}
    record = json.loads((tmp_path / "planted.learned.1.json").read_text())
    assert record["steps"] == record["steps_done"] == 4
    assert record["final"]["loss"] > 0
    assert [point["step"] for point in record["curve"]] == [0, 1, 2, 3]
    report = (tmp_path / "report.md").read_text()
    assert report.strip() in capsys.readouterr().out
    for words in ("| learned | 2 |", "| random − learned |", "Gap between random and oracle", "Dense has "):
        assert words in report


def test_what_is_there_is_not_trained_again(tmp_path: Path) -> None:
    one = ["planted", *QUICK, "--arm", "light", "--seed", "0", "--out", str(tmp_path)]
    assert main(one) == 0
    path = tmp_path / "planted.light.0.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 77'))
    assert main(one) == 0
    assert json.loads(path.read_text())["seed"] == 77


def test_a_time_limit_keeps_what_there_is(tmp_path: Path) -> None:
    options = ["--size", "small", "--device", "cpu", "--arm", "light", "--seed", "0", "--steps", "1000000"]
    assert main(["planted", *options, "--seconds", "3", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "planted.light.0.json").read_text())
    assert 0 < record["steps_done"] < record["steps"] == 1_000_000
    assert record["final"]["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["masked", "causal"])
def test_text(tmp_path: Path, task: str) -> None:
    options = ["--size", "small", "--device", "cpu", "--steps", "2", "--seed", "0"]
    arms = [word for arm in ("learned", "random", "light", "all") for word in ("--arm", arm)]
    assert main(["text", "--task", task, *options, *arms, "--out", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path)]) == 0
    records = tables.load(tmp_path)
    assert [record["arm"] for record in records] == ["learned", "random", "light", "all"]
    final = records[0]["final"]
    assert 0 < final["bits"] < 12
    assert 0 < final["ff_chosen"] <= 1 / 16 + 1e-6
    assert ("ff_of_masked" in final) == (task == "masked")
    assert {"q_entropy", "kv_kept", "ff_shared"} <= final.keys()
    assert records[0]["parameters"] > records[1]["parameters"] > records[2]["parameters"]
    # the same weights, whoever chooses
    assert records[3]["parameters"] == records[0]["parameters"]
    assert (tmp_path / f"text-{task}.png").read_bytes().startswith(b"\x89PNG")


def test_at_full_size_torch_is_read_as_well() -> None:
    corpus = data.load((), text.SIZES["full"].packages)
    assert any(source.name.startswith("torch/nn/") for source in corpus.sources)
    # 4000 steps of 8 sequences read most of it once
    assert len(corpus.training) > 3e7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["planted", "--arm", "best"], "argument --arm: invalid choice: 'best'"),
        (["text", "--arm", "oracle"], "argument --arm: invalid choice: 'oracle'"),
        (["report", "nowhere"], "there are no records of `research.ablate` in nowhere"),
        (["planted", "--steps", "0"], "--steps: must be from 1"),
    ],
)
def test_refusals(options: list[str], message: str, refusal: Callable[[list[str]], str]) -> None:
    assert message in refusal(options)


def test_a_damaged_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "planted.light.0.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 2
    assert "is no record of `research.ablate`" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--help"], ["planted", "--help"], ["text", "--help"], ["report", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main([*options])
        assert stop.value.code == 0
    said = capsys.readouterr().out
    assert [word for word in ["oracle", "--start", "--task", "--seed", "--calibrate", "DIR"] if word not in said] == []

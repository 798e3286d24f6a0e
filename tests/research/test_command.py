"""`research.ablate`: records, what is done again and what not, reports."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from research.ablate import planted, runner, tables
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
    assert main(["planted", *options, "--seconds", "1", "--out", str(tmp_path)]) == 0
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


def test_the_model_of_the_text_has_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = ["text", "--task", "causal", *QUICK[:-1], "1", "--arm", "random", "--seed", "0", "--out", str(tmp_path)]
    text = ["--data", str(Path(tables.__file__).parent)]
    assert main([*some, *text, "--n", "64", "--window", "16", "--share", "0.25"]) == 0
    (record,) = tables.load(tmp_path)
    size = record["size"]
    assert (size["n"], size["window"], size["k"], size["steps"]) == (64, 16, 0.25, 1)
    assert main([*some, "--n", "64", "--window", "64"]) == 2
    assert "--window 64: must be smaller than the 64 tokens in view" in capsys.readouterr().err


def test_the_clock_leaves_measurements_out() -> None:
    class Slow(planted.Task):
        def measure(self, last: bool) -> dict[str, float]:
            time.sleep(0.1)
            return super().measure(last)

    began = time.perf_counter()
    result = runner.train(Slow("light", 0, planted.SIZES["small"], torch.device("cpu")), 24, runner.Rates(1e-3))
    # with the 25 measurements it would be nearly the whole
    assert 0 < result["seconds"] < time.perf_counter() - began - 25 * 0.1
    times = [point["seconds"] for point in result["curve"]]
    assert times[0] == 0
    assert times == sorted(times)

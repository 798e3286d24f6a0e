"""`research.ablate text --equal-time`: what docs/evidence.md says of a pair, of the clock and of the rates."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass.train.commands.errors import UserError
from research.ablate import resume, runner, text
from research.ablate.__main__ import main
from research.ablate.equal import envelope, envelope_report, records, report
from research.ablate.equal.arms import Task
from research.ablate.equal.trials import Ask, Cell, Trials

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
DATA = (str(ROOT / "research"), str(ROOT / "examples"))
SIZE = dataclasses.replace(
    text.SIZES["small"], dim=16, heads=2, blocks=1, n=64, batch=2, steps=12, paths=DATA, curve_windows=2,
    final_windows=4,
)  # fmt: skip
OPTIONS = ["text", "--equal-time", "--size", "small", "--device", "cpu", "--data", DATA[0], "--data", DATA[1]]
TINY = [*OPTIONS, "--dim", "16", "--heads", "2", "--blocks", "1", "--n", "64", "--batch", "2", "--steps", "6"]


def cell(task: str = "causal", steps: int = 12, seconds: float = 0.0) -> Cell:
    return Cell(task, dataclasses.replace(SIZE, steps=steps), Ask(steps, seconds, "cpu", "some"))


def trials(folder: Path, part: str = "", **options: Any) -> Trials:
    return Trials(records.Store(folder, part), CPU, False, **options)


def run(**changes: Any) -> records.Record:
    """A record as the command writes it, for the tables."""
    point = {"step": 0, "seconds": 0.0, "bits": 8.0}
    last = {"step": 10, "seconds": 2.0, "bits": 2.0}
    head = cell().record("run", "learned", 0, 1e-3)
    about = {"device": "cpu", "torch": "2", "data": "some", "seconds": 2.0, "steps": 10, "ms_per_step": 200.0}
    return {**head, **about, "parameters": 5, "curve": [point, last], "final": {"step": 10, "bits": 2.0}, **changes}


RESULTS = ROOT / "benchmarks" / "results" / "h200" / "equal_time"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace of an arm is measured for a moment."""
    monkeypatch.setattr(runner, "pace", functools.partial(runner.pace, seconds=0.05))


@pytest.mark.parametrize("causal", [True, False])
def test_a_pair_sees_the_same_batches_and_the_same_validation_text(causal: bool) -> None:
    routed, dense = (Task(arm, 3, SIZE, CPU, causal=causal, compiled=False) for arm in ("learned", "dense"))
    for step in range(3):
        for ours, theirs in zip(routed.inputs(step), dense.inputs(step), strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(routed.starts, dense.starts)
    other = Task("learned", 4, SIZE, CPU, causal=causal, compiled=False)
    assert not torch.equal(routed.inputs(3)[0], other.inputs(3)[0])


def test_the_dense_arm_attends_to_every_token_and_has_four_times_the_width() -> None:
    dense = Task("dense", 0, SIZE, CPU, causal=True, compiled=False)
    assert dense.model.blocks[0].feed_forward.up.out_features == 4 * SIZE.dim
    tokens = dense.inputs(0)[0]
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 256
    moved = (dense.model(tokens)[0] - dense.model(changed)[0]).abs().sum(-1)
    # the first byte reaches the last place, and no place is reached from behind
    assert (moved[:, -1] > 0).all()
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    assert torch.equal(dense.model(tokens)[0][:, :-1], dense.model(changed)[0][:, :-1])


class Slow(Task):
    """Steps take 5 ms at least, measurements a fifth of a second."""

    def inputs(self, step: int) -> tuple[torch.Tensor, ...]:
        time.sleep(0.005)
        return super().inputs(step)

    def measure(self, last: bool) -> dict[str, float]:
        time.sleep(0.2)
        return super().measure(last)


def test_the_clock_leaves_measurements_out() -> None:
    task = Slow("dense", 0, SIZE, CPU, causal=True, compiled=False)
    began = time.perf_counter()
    result = runner.train(task, 24, SIZE.rates(), points=6, closing=True)
    whole = time.perf_counter() - began
    assert len(result["curve"]) == 7
    assert whole >= 8 * 0.2
    # with measurements it would be near the whole; steps take some 15 ms
    assert 24 * 0.005 <= result["seconds"] < whole / 2
    assert result["seconds"] == pytest.approx(24 * result["ms_per_step"] / 1e3, rel=1e-2)
    times = [point["seconds"] for point in result["curve"]]
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(result["seconds"], rel=1e-2)
    assert [point["step"] for point in result["curve"]] == [0, 4, 8, 12, 16, 20, 24]


def test_rates_are_tried_for_a_third_and_the_best_is_taken(tmp_path: Path) -> None:
    one = trials(tmp_path)
    one.tune(cell(), ("learned",), (1e-6, 4e-3))
    assert [(made["lr"], made["steps"]) for made in one.store.all] == [(1e-6, 4), (4e-3, 4)]
    one.compare(cell(), ("learned",), (0,))
    (made,) = (made for made in one.store.all if made["kind"] == "run")
    bits = {made["lr"]: made["final"]["bits"] for made in one.store.all if made["kind"] == "tune"}
    assert made["lr"] == min(bits, key=lambda lr: bits[lr]) == 4e-3
    assert made["tuned"] == {
        "n": 64,
        "window": 32,
        "k": 0.0625,
        "light_mult": 0.5,
        "bits": {"1e-06": bits[1e-6], "0.004": bits[4e-3]},
    }
    assert made["steps"] == 12


def test_a_rate_is_taken_from_the_nearest_length_and_never_from_a_diverged_run() -> None:
    tried = [
        run(kind="tune", n=n, lr=lr, final={"step": 1, "bits": bits})
        for n, lr, bits in ((1024, 1e-3, 2.0), (8192, 2e-3, math.nan), (8192, 4e-3, 3.0))
    ]
    assert records.tuned(tried, run(n=2048))[0] == 1e-3
    assert records.tuned(tried, run(n=32768))[0] == 4e-3
    assert records.tuned(tried, run(n=2048, arm="dense")) is None
    assert records.tuned(tried, run(n=2048, task="masked")) is None


def test_the_dense_arm_gets_the_seconds_of_its_own_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(task: Any, steps: int, *rest: Any, **options: Any) -> dict[str, Any]:
        seconds = task.size.window / 100
        made = {"steps": steps, "steps_done": steps, "seconds": seconds, "ms_per_step": 10.0, "parameters": 1}
        return {**made, "curve": [{"step": 0, "seconds": 0.0, "bits": 8.0}], "final": {"step": steps, "bits": 2.0}}

    monkeypatch.setattr(runner, "pace", lambda task, rates: 10.0)
    monkeypatch.setattr(runner, "train", train)
    one, plain = trials(tmp_path), cell()
    wide = Cell(plain.task, dataclasses.replace(plain.size, window=48, k=0.5), plain.ask)
    one.tune(plain, records.ARMS, (1e-3,))
    one.tune(wide, records.ARMS, (1e-3,))
    one.compare(plain, records.ARMS, (0,))
    with pytest.raises(
        UserError, match=r"no routed run of causal, n = 64, window 48, share 0.5, light 0.5, to take the time of"
    ):
        one.compare(wide, ("dense",), (0,))
    one.compare(wide, records.ARMS, (0,))
    assert [(made["window"], made["k"], made["arm"], made["given_seconds"]) for made in one.store.all] == 2 * [
        (32, 0.0625, "learned", 0), (32, 0.0625, "dense", 0.32), (48, 0.5, "learned", 0), (48, 0.5, "dense", 0.48),
    ]  # fmt: skip
    assert [made["tuned"].get("window") for made in one.store.all] == 4 * [None] + [32, 32, 48, 48]
    assert [list(seeds) for seeds in records.pairs(records.load(tmp_path)).values()] == [[0], [0]]


def test_the_command_resumes_and_writes_every_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--task", "causal", "--out", str(tmp_path)]
    assert main([*TINY, *out, "--seed", "0"]) == 0
    first = json.loads((tmp_path / "equal.json").read_text())["runs"]
    assert [(made["arm"], made["seed"]) for made in first] == [("learned", 0), ("dense", 0)]
    for made in first:
        assert len(made["curve"]) > 2
        assert made["curve"][-1]["step"] == made["steps"]
        assert {"lr", "parameters", "ms_per_step", "data", "device", "torch", "seconds"} <= made.keys()
    assert first[1]["given_seconds"] == first[0]["seconds"]
    # what is there is not trained again; what is new goes to the part that was asked for
    assert main([*TINY, *out, "--seed", "0", "--seed", "1", "--part", "b"]) == 0
    assert json.loads((tmp_path / "equal.json").read_text())["runs"] == first
    second = json.loads((tmp_path / "equal.b.json").read_text())["runs"]
    assert [(made["arm"], made["seed"]) for made in second] == [("learned", 1), ("dense", 1)]
    assert len(records.load(tmp_path)) == 4
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    assert "| next byte | 64 | 16 | 32; 0.0625; 0.5·d | 2 |" in capsys.readouterr().out
    assert (tmp_path / "equal_time.png").read_bytes().startswith(b"\x89PNG")
    # runs of another length of training are no part of this comparison
    assert main([*TINY[:-1], "7", *out, "--seed", "0"]) == 2
    assert "has asked_steps 6, this command 7" in capsys.readouterr().err


def test_parts_merge(tmp_path: Path) -> None:
    (tmp_path / "equal.json").write_text(json.dumps({"runs": [run(), run(arm="dense")]}))
    (tmp_path / "equal.b.json").write_text(json.dumps({"runs": [run(), run(seed=1)]}))
    assert [(made["arm"], made["seed"]) for made in records.load(tmp_path)] == [
        ("dense", 0), ("learned", 0), ("learned", 1),
    ]  # fmt: skip
    assert [list(seeds) for seeds in records.pairs(records.load(tmp_path)).values()] == [[0]]
    (tmp_path / "equal.c.json").write_text(json.dumps({"runs": [run(seconds=3.0)]}))
    with pytest.raises(
        UserError, match=r"two different runs of causal, n = 64, window 32, share 0.0625, light 0.5, learned, seed 0"
    ):
        records.load(tmp_path)


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [((0.4, 0.5, 0.6), "**routed**, 5.0 ×"), ((0.1, 0.3, 0.5), "level (routed by 1.5 ×"), ((-0.4, -0.5), "**dense**")],
)
def test_ahead_is_more_than_three_times_the_spread(gains: tuple[float, ...], verdict: str) -> None:
    made = []
    for seed, gain in enumerate(gains):
        made.append(run(seed=seed))
        last = {"step": 5, "seconds": 2.0, "bits": 2.0 + gain}
        curve = [run()["curve"][0], last]
        made.append(run(seed=seed, arm="dense", steps=5, final={"step": 5, "bits": 2.0 + gain}, curve=curve))
    table = report.tables(made)
    (line,) = (line for line in table.splitlines() if "± " in line)
    assert verdict in line
    # 8 bits at the start, 2 after 2 seconds
    if gains[0] == 0.4:
        assert "| 92 % (1.8 s) | never |" in line
    if gains[0] < 0:
        assert "| never | 93 % (1.9 s) |" in line


def test_the_committed_table_is_of_the_records_and_the_page_says_who_is_ahead() -> None:
    table = report.tables(records.load(RESULTS))
    assert table in (RESULTS / "equal_time.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in table.splitlines() if " × the spread" in line]
    found = {(what.strip("| "), n, dim): verdict.split()[0] for what, n, dim, *_, verdict, _, _, _ in rows}
    byte, hidden, dense, routed = "next byte", "hidden bytes", "**dense**,", "**routed**,"
    told = {(byte, "2,048"): dense, (byte, "8,192"): dense, (hidden, "2,048"): dense, (hidden, "8,192"): "level"}
    told |= {(byte, "32,768"): routed, (hidden, "32,768"): routed}
    assert found == {(*key, "256"): who for key, who in told.items()} | {(byte, "8,192", "1,024"): routed}


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_both_arms_are_captured_and_the_dense_one_uses_a_fast_kernel(causal: bool) -> None:
    size = dataclasses.replace(SIZE, dim=128, heads=4, dense_heads=2, n=512)
    device = torch.device("cuda")
    for arm in ("learned", "dense"):
        task = Task(arm, 0, size, device, causal=causal, compiled=True)
        assert (task.attention in ("flash", "cudnn")) == (arm == "dense")
        assert runner.pace(task, size.rates(), 0.05) > 0
        result = runner.train(Task(arm, 0, size, device, causal=causal, compiled=True), 12, size.rates(), closing=True)
        assert result["graph"]
        assert result["curve"][-1]["bits"] < result["curve"][0]["bits"]


def test_a_run_that_is_cut_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    whole = runner.train(Task("learned", 0, SIZE, CPU, causal=True, compiled=False), 12, SIZE.rates(), points=4)

    class Cut(Task):
        def inputs(self, step: int) -> tuple[torch.Tensor, ...]:
            end[0] = step
            return super().inputs(step)

    # the deadline comes after seven steps
    end = [0]
    task = Cut("learned", 0, SIZE, CPU, causal=True, compiled=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: float(end[0] >= 6))
        first = runner.train(task, 12, SIZE.rates(), points=4, deadline=0.5, cut=cut)
    assert first["steps_done"] == 7
    rest = runner.train(Task("learned", 0, SIZE, CPU, causal=True, compiled=False), 12, SIZE.rates(), points=4, cut=cut)
    assert rest["final"]["bits"] == whole["final"]["bits"]
    assert [(p["step"], p["bits"]) for p in rest["curve"]] == [(p["step"], p["bits"]) for p in whole["curve"]]
    with pytest.raises(UserError, match="is no state of a run"):
        cut.write_bytes(b"{}")
        resume.read(cut)


def test_short_runs_decide_which_widths_get_long_ones() -> None:
    rates = {1: (0.1,), 2: (0.1,), 3: (0.1,)}

    def made(budget: float, dim: int, arm: str, bits: float) -> records.Record:
        last = {"step": 10, "bits": bits}
        return run(task="causal", n=8192, dim=dim, arm=arm, asked_seconds=budget, final=last)

    first = {"learned": (1.0, 0.6, 0.8), "dense": (1.1, 0.7, 0.9)}
    short = [made(60, dim, arm, at) for arm, bits in first.items() for dim, at in enumerate(bits, 1)]
    runs = {60.0: short, 200.0: list[records.Record](), 600.0: list[records.Record]()}
    asked = [one for one in envelope.plan(runs, records.ARMS, (8192,), ("causal",), rates) if one.budget > 60]
    assert [(one.budget, one.dim, one.arm) for one in asked] == [
        (200, dim, arm) for arm in records.ARMS for dim in (2, 3)
    ]  # fmt: skip
    runs[200.0] += [made(200, 2, "learned", 0.5), made(200, 3, "learned", 0.4), made(200, 2, "dense", 0.41)]
    runs[200.0].append(made(200, 3, "dense", 0.42))
    asked = [one for one in envelope.plan(runs, records.ARMS, (8192,), ("causal",), rates) if one.budget > 60]
    assert [(one.budget, one.dim, one.arm, one.seed) for one in asked[4:]] == [
        (200, 3, "learned", 1), (200, 2, "dense", 1), (600, 3, "learned", 0), (600, 3, "dense", 0),
    ]  # fmt: skip
    assert "| next byte | 8,192 | 200 | 0.4000 (3) | 0.4100 (2) |" in envelope_report.table(runs)
    runs = {**runs, 60.0: [made(60, dim, "dense", at) for dim, at in ((1, 1.8), (2, 0.7), (3, math.nan))]}
    asked = list(envelope.plan(runs, ("dense",), (8192,), ("causal",), rates))
    assert [(one.budget, one.dim) for one in asked if not one.rates] == [(60, 2), (200, 2), (600, 2)]


def test_a_run_is_trained_again_at_a_better_rate(tmp_path: Path) -> None:
    kept = trials(tmp_path, resumes=True)
    for lr in (1e-3, 1e-3, 5e-4):
        kept.one(cell(steps=2), "run", "learned", 0, lr, 0.0)
    assert [one["lr"] for one in records.load(tmp_path)] == [one["lr"] for one in kept.store.all] == [5e-4]


def test_rates_go_on_beyond_the_best() -> None:
    def after(*bits: float) -> list[tuple[float, ...]]:
        tried = [
            run(task="causal", n=8192, lr=2.0**i, final={"bits": b}) | {"kind": "tune"} for i, b in enumerate(bits)
        ]
        first = tried[0]
        return [r.rates for r in envelope.further(tried, envelope.Run(60, "causal", 8192, first["dim"], first["arm"]))]

    assert after(1.0, 0.9, 1.1) == []
    assert after(0.8, 0.9, 1.1) == [(0.5,)]
    assert after(1.0, 0.9, 0.8, 0.7) == [(16.0,)]
    assert after(math.nan, 1.0, 0.9, 0.8, 0.7) == []


def test_the_envelopes_table_is_of_its_records() -> None:
    folder = ROOT / "benchmarks" / "results" / "h100" / "envelope"
    assert (folder / "envelope.md").read_text(encoding="utf-8") == envelope_report.table(envelope.read(folder))


def test_rates_that_were_tried_make_no_table(tmp_path: Path) -> None:
    folder = envelope.folder(tmp_path, 60)
    folder.mkdir()
    records.Store(folder, "").add({**run(task="causal", n=8192, asked_seconds=20), "kind": "tune"})
    assert envelope_report.write(tmp_path) == 0
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.slow
def test_the_envelope_is_trained_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envelope, "FAR", math.inf)  # so short a run says little
    some = [option if option != "--equal-time" else "--envelope" for option in OPTIONS]
    options = [*some, "--out", str(tmp_path), "--task", "causal", "--budget", "0.3", "--n", "64", "--batch", "2"]
    assert main(options) == 0
    rows = envelope.read(tmp_path)
    # two widths of each arm, then both, then the best one
    trained = [one["seed"] == 0 and one["kind"] == "run" for made in rows.values() for one in made]
    assert sum(trained) == 4 + 4 + 2
    assert (tmp_path / "envelope.png").read_bytes().startswith(b"\x89PNG")
    before = capsys.readouterr().out
    assert "| next byte | 64 | 0.3 |" in before
    assert main(options) == 0
    assert envelope.read(tmp_path) == rows
    assert main([*options, "--dim", "16"]) == 2
    assert "--dim: --envelope decides that" in capsys.readouterr().err

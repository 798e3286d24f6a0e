"""`research.ablate text --equal-time`: settings of the routed arm side by side."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from equal_runs import CPU, SIZE, TINY, cell, run, trials
from onepass.core.errors import UserError
from research.ablate import runner
from research.ablate.__main__ import command_line, main
from research.ablate.equal import records, report
from research.ablate.equal.arms import Task
from research.ablate.equal.command import sizes
from research.ablate.equal.trials import Cell

WIDE = dataclasses.replace(SIZE, window=48, k=0.5)


def of(setting: tuple[int, float], kind: str = "run", **changes: Any) -> records.Record:
    return run(kind=kind, window=setting[0], k=setting[1], **changes)


@pytest.mark.parametrize(
    ("options", "base", "setting"),
    [
        ([], "small", (32, 1 / 16)),
        ([], "full", (32, 1 / 8)),
        ([], "100m", (32, 1 / 8)),
        (["--window", "63", "--n", "64"], "full", (63, 1 / 8)),
        (["--share", "1"], "full", (32, 1.0)),
        (["--share", "0.015625", "--window", "1", "--n", "64"], "small", (1, 1 / 64)),
        (["--n", "32768", "--window", "16384"], "full", (16384, 1 / 8)),
    ],
)
def test_the_options_are_the_models(options: list[str], base: str, setting: tuple[int, float]) -> None:
    for size in sizes(command_line().parse_args(["text", "--equal-time", *options]), base):
        assert (size.window, size.k) == setting
        # an int would be a number of tokens
        assert type(size.k) is float
        assert size.light_mult == 0.5


def test_the_light_branch_has_the_width_that_was_asked_for() -> None:
    (size,) = sizes(command_line().parse_args(["text", "--equal-time", "--light", "2", "--n", "64"]), "small")
    assert size.light_mult == 2.0
    size = dataclasses.replace(SIZE, light_mult=2.0)
    for block in Task("learned", 3, size, CPU, causal=True, compiled=False).model.blocks:
        assert block.feed_forward.light.up.weight.shape == (2 * size.dim, size.dim)


def test_a_light_branch_of_no_hidden_unit_is_refused() -> None:
    args = command_line().parse_args(["text", "--equal-time", "--light", "0.01"])
    with pytest.raises(UserError, match=r"--light 0.01: is less than one hidden unit at 32 channels \(--dim\)"):
        sizes(args, "small")


def test_a_record_without_a_light_branchs_width_has_the_blocks_own(tmp_path: Path) -> None:
    old, new = run(), run(light_mult=2.0)
    del old["light_mult"]
    (tmp_path / "equal.json").write_text(json.dumps({"runs": [old, new]}))
    assert [one["light_mult"] for one in records.load(tmp_path)] == [0.5, 2.0]
    (tmp_path / "equal.json").write_text(json.dumps({"runs": [run(light_mult=-1.0)]}))
    with pytest.raises(UserError, match="is no record of"):
        records.load(tmp_path)


def test_one_length_too_short_for_the_window_refuses_all() -> None:
    args = command_line().parse_args(["text", "--equal-time", "--window", "2048"])
    with pytest.raises(UserError, match=r"--window 2048: must be smaller than the 2,048 tokens in view"):
        sizes(args, "full")


def test_a_setting_changes_the_routed_model_alone() -> None:
    plain, wide = (Task("learned", 3, size, CPU, causal=True, compiled=False) for size in (SIZE, WIDE))
    assert wide.model.blocks[0].attention.light.window == 48
    assert wide.model.blocks[0].feed_forward.k == 0.5
    for step in range(2):
        for ours, theirs in zip(plain.inputs(step), wide.inputs(step), strict=True):
            assert torch.equal(ours, theirs)
    dense = [Task("dense", 3, size, CPU, causal=True, compiled=False).model.state_dict() for size in (SIZE, WIDE)]
    assert all(torch.equal(dense[0][name], dense[1][name]) for name in dense[0])


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


def test_two_settings_are_two_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--task", "causal", "--seed", "0", "--out", str(tmp_path)]
    for setting in ([], ["--window", "48", "--share", "0.5"], ["--light", "2"]):
        assert main([*TINY, *out, *setting]) == 0
        assert main([*TINY, *out, *setting, "--part", "b"]) == 0
    # the same setting again trains nothing
    assert not (tmp_path / "equal.b.json").exists()
    made = json.loads((tmp_path / "equal.json").read_text())["runs"]
    assert [(one["arm"], one["window"], one["k"], one["light_mult"]) for one in made] == [
        ("learned", 32, 0.0625, 0.5), ("dense", 32, 0.0625, 0.5), ("learned", 48, 0.5, 0.5), ("dense", 48, 0.5, 0.5),
        ("learned", 32, 0.0625, 2.0), ("dense", 32, 0.0625, 2.0),
    ]  # fmt: skip
    assert [made[place]["given_seconds"] for place in (1, 3, 5)] == [made[place]["seconds"] for place in (0, 2, 4)]
    shown = capsys.readouterr().out
    for setting in ("32; 0.0625; 0.5·d", "48; 0.5; 0.5·d", "32; 0.0625; 2·d"):
        assert f"| next byte | 64 | 16 | {setting} | 1 |" in shown
    assert (tmp_path / "equal_time.png").read_bytes().startswith(b"\x89PNG")


def test_rates_tried_with_a_setting_are_rows_of_their_own() -> None:
    made = [of((32, 0.125), "tune", lr=1e-3), of((32, 0.25), "tune", lr=1e-3, final={"step": 1, "bits": 3.0})]
    table = report.tables(made)
    assert "| next byte | 64 | 16 | 32; 0.125; 0.5·d | routed | 0.001: **2.0000** |" in table
    assert "| next byte | 64 | 16 | 32; 0.25; 0.5·d | routed | 0.001: **3.0000** |" in table


def test_a_rate_tried_with_the_setting_comes_first_else_the_nearest_length_without_mixing() -> None:
    tried = [
        of(setting, "tune", n=n, lr=lr, final={"step": 1, "bits": bits})
        for setting, n, lr, bits in (
            ((32, 0.125), 1024, 1e-3, 3.0), ((32, 0.125), 8192, 2e-3, 3.0), ((64, 0.25), 8192, 4e-3, 2.0),
            ((64, 0.25), 8192, 5e-3, 2.5), ((256, 0.25), 8192, 6e-3, 1.0),
        )
    ]  # fmt: skip
    for setting, n, best in (
        ((32, 0.125), 8192, 2e-3),
        ((64, 0.25), 1024, 4e-3),
        ((256, 0.25), 1024, 6e-3),
        # not tried: the nearest length, and there the nearest setting
        ((16, 0.125), 1024, 1e-3),
        ((96, 0.25), 8192, 4e-3),
        ((512, 0.5), 8192, 6e-3),
    ):
        lr, told = records.tuned(tried, of(setting, n=n))
        assert lr == best
        assert f"{lr:g}" in told["bits"]
    assert told == {"n": 8192, "window": 256, "k": 0.25, "light_mult": 0.5, "bits": {"0.006": 1.0}}

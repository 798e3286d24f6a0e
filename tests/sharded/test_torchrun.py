"""`onepass train` by several processes: the numbers of one, and nothing lost when a process is."""

from __future__ import annotations

import functools
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from harness import tolerance
from onepass.__main__ import PATIENCE, main
from onepass.train import parallel
from sharded.launcher import BF16, SECONDS, ended, own_lines, start, train
from train.tiny import TINY, rows, write_texts
from train.tiny import same as bit_for_bit

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
TOKENS, DIM = 4 * 32, 16  # of TINY
LONG = ("--steps", 60, "--checkpoint-every", 5)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "texts")


Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def of(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs to compare with, each made once: of so many processes with these options."""

    @functools.cache
    def run(processes: int, *options: object) -> Path:
        train(processes, texts, out := tmp_path_factory.mktemp("run") / "run", *options)
        return out

    return run


def same(many: Path, one: Path) -> None:
    """Compare all metrics of a run with those of one process.

    The longest sums of a step are those of weights' gradients, over all tokens and once more over a row's features. A
    gradient that is rounding alone may have another sign, and its weight steps the other way: as that gradient says,
    this changes the loss by rounding. Choices of tokens are equal unless scores tie to the last bits.
    """
    most = tolerance(TOKENS * DIM, torch.float32)
    found, expected = rows(many), rows(one)
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for got, want in zip(found, expected, strict=True):
        assert got["step"] == want["step"]
        for name, value in want.items():
            assert abs(got[name] - value) <= most * max(1.0, abs(value)), (want["step"], name, got[name], value)


def test_two_processes_have_the_loss_curve_of_one(texts: Path, of: Runs, tmp_path: Path) -> None:
    said, two, one = train(2, texts, tmp_path / "two"), tmp_path / "two", of(1)
    assert said.count("2 processes") == 1
    assert said.count("step 12/12") == 1
    same(two, one)
    # one file of whole tensors, as one process writes it
    a, b = (load_file(run / "checkpoint.safetensors") for run in (one, two))
    assert {name: value.shape for name, value in a.items()} == {name: value.shape for name, value in b.items()}
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "options"), [(2, "--fsdp"), (4, "--task causal"), (4, "--fsdp --task causal")])
def test_every_task(texts: Path, of: Runs, tmp_path: Path, processes: int, options: str) -> None:
    train(processes, texts, tmp_path / "many", *options.split())
    same(tmp_path / "many", of(1, *options.replace("--fsdp", "").split()))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2)])
def test_a_checkpoint_resumes_on_another_number_of_processes(
    texts: Path, of: Runs, tmp_path: Path, before: int, after: int
) -> None:
    """The same as on one process all the way."""
    many, one = tmp_path / "many", tmp_path / "one"
    shutil.copytree(of(before), many)
    assert "going on after step 12" in train(after, texts, many, "--resume", "--steps", 24)
    shutil.copytree(of(1), one)
    train(1, texts, one, "--resume", "--steps", 24)
    same(many, one)


def process(launcher: subprocess.Popen[str], rank: int) -> int:
    """Return the process of a rank among the children of torchrun."""
    for entry in Path("/proc").iterdir():
        try:
            parent = re.search(r"^PPid:\t(\d+)$", (entry / "status").read_text(), re.MULTILINE)
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent and int(parent[1]) == launcher.pid and f"RANK={rank}".encode() in environment:
            return int(entry.name)
    raise AssertionError(f"torchrun has no rank {rank}")


def wait_for(run: Path, losses: int) -> None:
    """Wait until a run has written this many rows of losses."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text(encoding="utf-8").count('"loss"') >= losses:
            return
        time.sleep(0.05)
    raise AssertionError(f"{run} did not get to {losses} losses")


def killed(rank: int, texts: Path, out: Path, *options: object, restarts: int = 0) -> tuple[str, int]:
    """Kill a process of two after 12 losses; return the job's standard error and its exit code."""
    with start(2, texts, "--out", out, *TINY, *options, restarts=restarts) as running:
        wait_for(out, 1)
        victim = process(running, rank)  # on a busy machine a search after 12 losses would find the run's end
        wait_for(out, 12)
        os.kill(victim, signal.SIGKILL)
        return ended(running)[1], running.returncode


def told_lost(faults: str, run: Path, then: str) -> None:
    """Demand one line, about a process that has ended."""
    (line,) = own_lines(faults)
    start = r"onepass train: a process of this run has ended \(.+\); "
    assert re.fullmatch(f"{start}{re.escape(str(run))} has the last checkpoint: {then}", line), line


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_job_and_a_restart_loses_nothing(
    texts: Path, of: Runs, tmp_path: Path, rank: int
) -> None:
    whole, out, again = of(2, *LONG), tmp_path / "killed", tmp_path / "again"
    faults, code = killed(rank, texts, out, "--threads", 1, *LONG, restarts=1)
    assert code == 0, faults[-4000:]
    told_lost(faults, out, "torchrun starts it again from there")
    bit_for_bit(out, whole)

    faults, code = killed(rank, texts, again, "--threads", 1, *LONG)
    assert code != 0
    told_lost(faults, again, "go on with the same command and --resume")
    # no traceback but torchrun's own
    assert "onepass/train" not in faults
    train(1, texts, again, "--resume", *LONG)
    same(again, whole)


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_others(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_TEST_COLLECTIVE", "5")
    out = tmp_path / "run"
    with start(2, texts, "--out", out, *TINY, "--threads", 1, "--steps", 10**6, "--checkpoint-every", 5) as running:
        wait_for(out, 12)
        other, hung = (process(running, rank) for rank in (0, 1))
        os.kill(hung, signal.SIGSTOP)
        others, *_ = select.select([os.pidfd_open(other)], [], [], SECONDS)
        os.kill(hung, signal.SIGKILL)  # as torchrun does half a minute later
        _, faults = ended(running)
    assert others
    assert running.returncode != 0
    told_lost(faults, out, "go on with the same command and --resume")
    assert "onepass/train" not in faults


def test_a_gpu_that_hangs_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(world: parallel.World, code: int, message: str) -> None:
        raise SystemExit(f"{code}: {message}")

    monkeypatch.setattr(parallel, "ANSWER", 0.01)
    monkeypatch.setattr(parallel.World, "end", end)
    world = parallel.World()
    world.path = tmp_path
    with pytest.raises(
        SystemExit, match=r"1: a process of this run has ended \(GPUs gave no answer for 0 s\); .*--resume"
    ):
        world._settle(mock.Mock(query=lambda: False))
    world._settle(mock.Mock(query=lambda: True))


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_and_stops(
    texts: Path, of: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights of 16 bits in shards, whose remainders are on their way as wider numbers."""
    monkeypatch.setenv(BF16, "1")
    out, options = tmp_path / "run", (*LONG, "--fsdp")
    with start(2, texts, "--out", out, *TINY, "--threads", 1, *options) as running:
        wait_for(out, 12)
        running.send_signal(signal.SIGTERM)
        said, faults = ended(running)
    assert own_lines(faults) == []
    assert re.search(r"stopped after \d+ of 60 steps, all of them saved", said), faults[-4000:]
    (command,) = re.findall(r"go on with: (.+)", said)
    subprocess.run(shlex.split(command), check=True, capture_output=True, timeout=SECONDS)
    assert "--nproc-per-node=2" in command
    bit_for_bit(out, of(2, *options))


def test_a_fault_of_all_is_told_by_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends all processes when one ends: the others wait."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for rank, waited in (("0", []), ("1", [PATIENCE])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            main(["train", "--batch", "x"])
        assert slept == waited


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", [(), ("--fsdp",)], ids=["rows", "shards"])
@pytest.mark.parametrize("task", ["masked", "causal"])
def test_two_gpus(texts: Path, of: Runs, tmp_path: Path, layout: tuple[str, ...], task: str) -> None:
    options = ("--device", "cuda", "--preset", "cpu", "--task", task)
    train(2, texts, tmp_path / "two", *options, *layout)
    losses = [[row["loss"] for row in rows(run) if "loss" in row] for run in (tmp_path / "two", of(1, *options))]
    # cuBLAS takes other algorithms for other shapes, with TF32 off: the order of sums differs, as on a CPU
    most = tolerance(TOKENS * DIM, torch.float32)
    assert max(abs(a - b) / b for a, b in zip(*losses, strict=True)) <= most, losses
    train(1, texts, tmp_path / "two", "--resume", "--steps", 24, "--device", "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_killed_process_on_two_gpus(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    options = ("--device", "cuda", "--preset", "cpu", "--steps", 400, "--checkpoint-every", 5)
    faults, code = killed(1, texts, out, *options, restarts=1)
    assert code == 0, faults[-4000:]
    assert [row["step"] for row in rows(out) if "loss" in row] == list(range(1, 401))

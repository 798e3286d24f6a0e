"""`onepass explain`: bytes are those of the tensors, launches those that the kernels ask for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bench.fakes import FakeTimer
from onepass.__main__ import main
from onepass.bench import explain, timers
from onepass.core.launch import INTERPRET, compiled, triton_installed


@pytest.fixture(autouse=True)
def _fake_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "CpuTimer", lambda **options: FakeTimer(copy=2.0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.skipif(INTERPRET, reason="the torch path is told about")
@pytest.mark.parametrize(
    ("op", "reads", "writes"),
    [
        # 8 rows of 64: x 8·64·2 bytes, vectors 64·2
        ("layer_norm", "x 1,024 B, weight 128 B, bias 128 B", 1024),
        ("rms_norm", "x 1,024 B, weight 128 B", 1024),
        ("weighted_sum", "x 1,024 B, weight 128 B", 16),
        ("soft_topk", "scores 1,024 B", 1024),
        ("coor_descent", "scores 1,024 B", 1024),
        # 4 values and gates in bf16 and their int64 indices
        ("topk", "scores 1,024 B", 8 * 4 * (2 + 2 + 8)),
    ],
)
def test_bytes(op: str, reads: str, writes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", op, "--shape", "8x64", "--dtype", "bf16"]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert told["reads"] == reads
    assert told["writes"] == f"{writes:,} B"
    total = sum(int(n.replace(",", "")) for n in re.findall(r"([\d,]+) B", reads)) + writes
    # a copy of 2 GB/s moves 2000 bytes in a µs; the fake timer measures 10 µs
    assert told["floor"].startswith(f"{total:,} B: {total / 2000:,.1f} µs at 2 GB/s")
    assert told["time"] == f"10.0 µs with cold caches, {100 * total / 2000 / 10:.0f} % of copy"
    assert told["launch"] == "none: torch operations"
    assert told["path"].startswith("torch (")


@pytest.mark.slow
@pytest.mark.skipif(not triton_installed(), reason="Triton is not installed")
@pytest.mark.parametrize("op", ["layer_norm", "topk"])
def test_launches_under_the_interpreter(op: str) -> None:
    command = [sys.executable, "-m", "onepass", "explain", op, "--shape", "3x40", "--k", "4"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    launches = re.findall(r"^launch  (\w+): ([\d×]+) programs.*; (.*)$", done.stdout, re.MULTILINE)
    assert launches
    assert all("BLOCK" in tile or "=" in tile for _, _, tile in launches)
    assert "not measured: the interpreter" in done.stdout


def test_a_launch_in_words() -> None:
    made = SimpleNamespace(n_regs=40, n_spills=0, metadata=SimpleNamespace(shared=128, num_warps=8))
    launch = explain.Launch("forward_kernel", (1056, 1, 1), {"BLOCK_R": 1, "BLOCK_C": 4096}, {}, made)
    assert explain.described(launch) == (
        "forward_kernel: 1056×1×1 programs, 8 warps, 40 registers, 0 spilled, 128 bytes shared; BLOCK_R=1 BLOCK_C=4096"
    )


def test_watching_leaves_nothing_behind() -> None:
    real, kept = compiled.launch_specialized, {("key",): object()}
    compiled._compiled.update(kept)  # type: ignore[arg-type]
    try:
        with pytest.raises(RuntimeError), explain.seen():
            assert compiled.launch_specialized is not real
            assert not compiled._compiled
            raise RuntimeError
        assert compiled.launch_specialized is real
        assert compiled._compiled.items() >= kept.items()
    finally:
        del compiled._compiled[("key",)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["norm", "--shape", "8x8"], "argument OP: invalid choice: 'norm'"),
        (
            ["topk", "--shape", "8"],
            "argument --shape: must be rows x columns, both at least 1, as in 16384x4096; got '8'",
        ),
        (["topk", "--shape", "0x8"], "argument --shape: must be rows x columns"),
        (["topk"], "the following arguments are required: --shape"),
        (["topk", "--shape", "8x8", "--k", "0"], "argument --k: must be from 1"),
        (["topk", "--shape", "8x8", "--device", "cuda"], "--device cuda: torch sees no CUDA GPU here"),
    ],
)
def test_mistakes(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["explain", *options])
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("onepass explain: ")
    assert message in said
    assert said.count("\n") == 1

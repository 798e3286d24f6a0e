"""The script that compares optimizers on the main job, at a size that takes seconds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from onepass.core.launch import INTERPRET

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lion_training.py"


@pytest.mark.skipif(INTERPRET, reason="the interpreter's bf16 conversions truncate")
@pytest.mark.skipif(not SCRIPT.exists(), reason="the script is in the repository, not in the package")
@pytest.mark.skipif(torch.cuda.is_available(), reason="written for the CPU's precision; the real run is the CUDA test")
@pytest.mark.slow
def test_every_arm_learns_and_is_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("lion_training", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    out = tmp_path / "results" / "lion"
    sizes = ["--steps", "30", "--dim", "32", "--blocks", "1", "--seq", "64", "--batch", "8"]
    assert script.main([str(text), "--out", str(out), *sizes, "--arms", *script.ARMS]) == 0
    results = json.loads(out.with_suffix(".json").read_text())["arms"]
    assert [r["arm"] for r in results] == list(script.ARMS)
    by_arm = {r["arm"]: r for r in results}
    for result in results:
        assert result["losses"][-1] < 0.8 * result["losses"][0]
    assert by_arm["Lion bf16 + remainder"]["bit_identical_to_fp32"] is True
    each = {arm: (r["parameter_bytes"] + r["optimizer_bytes"]) / r["parameters"] for arm, r in by_arm.items()}
    assert each["Lion fp32"] == 8.0
    assert each["Lion bf16 + remainder"] == 6.0
    assert 5.0 < each["Lion bf16 + remainder, int8 momentum"] < 5.4
    assert each["AdamW fused fp32"] > 12.0
    assert out.with_suffix(".png").stat().st_size > 10_000
    assert "bits of fp32 training" in out.with_suffix(".md").read_text()
    assert "NOT" not in capsys.readouterr().out

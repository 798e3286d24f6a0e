from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks import decoding

ROOT = Path(__file__).parents[2]


def test_prompts_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--prefill --device cpu --tokens 40 --batch 2 --dim 64 --blocks 1"
    assert decoding.main(small.split()) == 0
    assert re.search(r"'prefill ms': [\d.]+.*'new prefill ms': [\d.]+", capsys.readouterr().out)


def test_the_picture_is_of_the_record() -> None:
    """Four lines: dense and routed for each batch, the milliseconds in log from 0.1 to 5."""
    records = json.loads((ROOT / "benchmarks/results/h100/raw/decoding.json").read_text(encoding="utf-8"))["records"]
    drawn = re.findall(r'<polyline points="([^"]*)"', (ROOT / "docs" / "decoding.svg").read_text(encoding="utf-8"))
    for batch in (1, 8):
        for name in ("dense", "routed"):
            points = [point.split(",") for point in drawn.pop(0).split()]
            found = [0.1 * 50 ** (1 - (float(y) - 40) / 200) for _, y in points]
            of_batch = sorted((r["tokens"], r[f"{name} ms"]) for r in records if r["batch"] == batch)
            assert found == pytest.approx([ms for _, ms in of_batch], rel=0.01)
            octaves = [math.log2(tokens) for tokens, _ in of_batch]
            scale = (octaves[-1] - octaves[0]) / (float(points[-1][0]) - float(points[0][0]))
            across = [octaves[0] + scale * (float(x) - float(points[0][0])) for x, _ in points]
            assert across == pytest.approx(octaves, abs=0.01)
    assert not drawn

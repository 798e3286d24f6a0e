from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import decoding

ROOT = Path(__file__).parents[2]


def test_prompts_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--prefill --device cpu --tokens 40 --batch 2 --dim 64 --blocks 1"
    assert decoding.main(small.split()) == 0
    assert re.search(r"'prefill ms': [\d.]+.*'new prefill ms': [\d.]+", capsys.readouterr().out)

"""Every Python example in the README runs as it stands, on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda c: c.strip().splitlines()[0][:40])
def test_example(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_there_is_an_example_per_operator() -> None:
    text = "\n".join(BLOCKS)
    for name in ("layer_norm", "rms_norm", "weighted_sum", "coor_descent", "soft_topk", "topk", "Lion"):
        assert name in text, f"no example of {name}"

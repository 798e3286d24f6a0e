from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_picture_and_the_table_are_of_the_record() -> None:
    """Times the products, whose time is the mean of two: onepass, torch compiled, transformers."""
    record = json.loads((ROOT / "benchmarks/results/h200/raw/experts.json").read_text(encoding="utf-8"))
    picture = (ROOT / "docs/experts.svg").read_text(encoding="utf-8")
    page = (ROOT / "docs/experts.md").read_text(encoding="utf-8")
    wanted = []
    for r in record["rows"]:
        arms = [r["arms"][arm] for arm in ("onepass", "torch, compiled", "transformers")]
        times = [2 * arm["graph"] / sum(r["products"]) for arm in arms]
        wanted.append(times)
        if r["act"] == "gelu":
            peaks = ", ".join(f"{arm['peak_mib']:.0f}" for arm in arms[:2])
            row = " | ".join([", ".join(map(str, r["row"])), *(f"{t:.2f}" for t in times), peaks])
            assert f"| {row} |" in page
    drawn = re.findall(r"^<circle[^>]*/><circle[^>]*/><circle[^>]*/>$", picture, re.MULTILINE)
    found = [[1 + (float(x) - 225) / 98 for x in re.findall(r'cx="([\d.]+)"', line)] for line in drawn]
    assert found == [pytest.approx(times, abs=2e-3) for times in wanted]

"""Pictures of pages show what the records hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_picture_and_table_of_experts_are_of_the_record() -> None:
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
            peaks = ", ".join(f"{r['peak_mib'][arm]:.0f}" for arm in ("onepass", "torch, compiled"))
            row = " | ".join([", ".join(map(str, r["row"])), *(f"{t:.2f}" for t in times), peaks])
            assert f"| {row} |" in page
    drawn = re.findall(r"^<circle[^>]*/><circle[^>]*/><circle[^>]*/>$", picture, re.MULTILINE)
    found = [[1 + (float(x) - 225) / 98 for x in re.findall(r'cx="([\d.]+)"', line)] for line in drawn]
    assert found == [pytest.approx(times, abs=2e-3) for times in wanted]


def test_the_picture_of_topk_is_of_the_record() -> None:
    """One line for each call: ours and torch's in log from 5 to 20 000 µs, reading beside them."""
    rows = json.loads((ROOT / "benchmarks/results/h100/raw/topk_rivals.json").read_text(encoding="utf-8"))["rows"]
    cells = {f"{r['rows']:,} × {r['cols']:,}, k {r['k']:,}": r for r in rows if r["dtype"] == "float32"}
    picture = (ROOT / "docs/topk_rows.svg").read_text(encoding="utf-8")
    wanted: list[tuple[dict[str, float], tuple[float, ...]]] = []
    for name in re.findall(r'<text [^>]*end">(.*)<', picture):
        cell = cells.get(name, wanted[-1][0] if wanted else {})
        ours, torch = ("onepass", "torch.topk") if name in cells else ("onepass by index", "torch.topk unsorted")
        wanted.append((cell, (cell["read"], cell[ours], cell[torch])))
    drawn = re.findall(r'<path d="M([\d.]+) \d+v14".*\n<circle cx="([\d.]+)".*<circle cx="([\d.]+)"', picture)
    found = [tuple(5 * 4000 ** ((float(x) - 190) / 420) for x in line) for line in drawn]
    assert found == [pytest.approx(line, rel=0.01) for _, line in wanted]
    assert len(found) == 13

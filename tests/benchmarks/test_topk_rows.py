from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_picture_is_of_the_record() -> None:
    """One line for each call: ours and torch's in log from 5 to 20 000 µs, reading beside them."""
    rows = json.loads((ROOT / "benchmarks/results/h100/raw/topk_users.json").read_text(encoding="utf-8"))["rows"]
    cells = [r for r in rows if r["what"] == "selection" and r["dtype"] == "float32" and "read" in r]
    wanted = []
    for r in cells:
        wanted.append((r["read"], r["onepass"], r["torch.topk"]))
        if "onepass, by index" in r:
            wanted.append((r["read"], r["onepass, by index"], r["torch.topk, unsorted"]))
    picture = (ROOT / "docs/topk_rows.svg").read_text(encoding="utf-8")
    drawn = re.findall(r'<path d="M([\d.]+) \d+v14".*\n<circle cx="([\d.]+)".*<circle cx="([\d.]+)"', picture)
    found = [tuple(5 * 4000 ** ((float(x) - 190) / 420) for x in line) for line in drawn]
    assert found == [pytest.approx(line, rel=0.01) for line in wanted]
    names = re.findall(r"<text [^>]*>([\d,]+ × [\d,]+, k [\d,]+)<", picture)
    assert names == [f"{r['rows']:,} × {r['cols']:,}, k {r['k']:,}" for r in cells]

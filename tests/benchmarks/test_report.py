from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench.records import read
from benchmarks.report import page

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/*.json"))


@pytest.mark.parametrize("source", COMMITTED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_committed_tables_are_those_of_the_committed_records(source: Path) -> None:
    """Only `*.json` with records of the bench stands beside tables: `--report` reads all of them."""
    header, records = read(source)
    text = source.with_suffix(".md")
    assert not text.exists() or page(header, records) == text.read_text()

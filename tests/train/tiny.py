"""A run that takes a second, and what it came to."""

from __future__ import annotations

import json
from pathlib import Path

TINY = ["--dim", "16", "--blocks", "2", "--seq", "32", "--batch", "4", "--steps", "12", "--device", "cpu"]


def rows(run: Path) -> list[dict[str, float]]:
    """The metrics of a run without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in {"seconds", "tokens_per_s"}} for row in lines]

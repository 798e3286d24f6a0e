"""A run that takes a second, and what it came to."""

from __future__ import annotations

import json
from pathlib import Path

TINY = ["--dim", "16", "--blocks", "2", "--seq", "32", "--batch", "4", "--steps", "12", "--device", "cpu"]


def rows(run: Path) -> list[dict[str, float]]:
    """The metrics of a run without what depends on the clock, which their digests cover."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clocked = {"seconds", "tokens_per_s", "digest"}
    return [{name: value for name, value in row.items() if name not in clocked} for row in lines]

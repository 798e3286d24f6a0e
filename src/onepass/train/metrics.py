"""The rows of metrics.jsonl: numbers after a step, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepass.train.commands.errors import UserError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Mark:
    """A position in the metrics: the number of bytes before it, and their SHA-256."""

    length: int = 0
    digest: str = ""


def line(row: Row) -> bytes:
    """Return a row as a line."""
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def parsed(text: bytes, where: Path) -> Row:
    """Return the row of a line; raise UserError unless it holds finite numbers, `step` among them."""
    with contextlib.suppress(ValueError, AttributeError, KeyError, RecursionError):
        row = json.loads(text.decode())
        numbers = all(type(value) in (int, float) and abs(value) < math.inf for value in row.values())
        if numbers and type(row["step"]) is int:
            return row  # type: ignore[no-any-return]
    raise UserError(f"{where} can't be used: a line is damaged ({text[:40]!r})")

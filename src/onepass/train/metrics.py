"""The rows of metrics.jsonl. Each holds a digest over itself and all earlier rows, which reveals damage anywhere.

`digest` is the first 16 hex digits of the SHA-256 of the previous digest (empty for the first row), a line feed and the
row as JSON without its digest. A row that was changed, lost, added or moved breaks the chain. The digests guard against
accidents, not against intent. Rows of older runs have no digest; the digests of later rows cover them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepass.train.commands.errors import UserError

Row = Mapping[str, Any]
_KEY = b', "digest": "'
_END = b'"}'


@dataclass(frozen=True)
class Mark:
    """A position in the metrics: the number of bytes before it, and the digest of the last row before it."""

    length: int = 0
    digest: str = ""


def _after(digest: str, row: bytes) -> str:
    return hashlib.sha256(digest.encode() + b"\n" + row).hexdigest()[:16]


def written(rows: Iterable[Row], mark: Mark) -> tuple[bytes, Mark]:
    """Return the lines of rows that follow `mark`, and the mark after them."""
    lines, length, digest = [], mark.length, mark.digest
    for row in rows:
        text = json.dumps(row, allow_nan=False).encode()
        digest = _after(digest, text)
        lines.append(text[:-1] + _KEY + digest.encode() + _END + b"\n")
        length += len(lines[-1])
    return b"".join(lines), Mark(length, digest)


def parsed(lines: Iterable[bytes], where: Path) -> Iterator[tuple[Row, Mark]]:
    """Yield each line's row and the mark after it; raise UserError at the first damaged line."""
    mark, sealed = Mark(), False
    for number, line in enumerate(lines, 1):
        text, key, digest = line.removesuffix(b"\n").rpartition(_KEY)
        text = text + b"}" if key else digest
        mark = Mark(mark.length + len(line), _after(mark.digest, text))
        # after the first row with a digest, every row must have one
        fits = digest == mark.digest.encode() + _END if key else not sealed
        sealed = sealed or bool(key)
        row = _row(text)
        if not (fits and line.endswith(b"\n") and row):
            raise UserError(f"{where} can't be used: line {number:,} is damaged, or a line before it is lost or moved")
        yield row, mark


def _row(text: bytes) -> Row | None:
    """Parse a row of finite numbers that include `step`; None if the text is anything else."""
    try:
        row = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    if not all(type(value) in (int, float) and abs(value) < math.inf for value in row.values()):
        return None
    return row

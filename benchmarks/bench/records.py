"""Results as JSON: a list with one entry that describes the run, then the measurements."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onepass.core.about import dtype_name
from onepass.train.commands import files
from onepass.train.commands.errors import UserError, doing

from .runner import DISAGREES, FAILED, MISSING, OK, Result

# fields of every record; early runs have only these, later ones also MEMORY, and "error" beside a definition
FIELDS = ("op", "pass", "case", "dtype", "impl", "us", "gbps", "copy_pct", "host_us")
MEMORY = ("peak_mib", "kept_mib")


def gbps(result: Result) -> float:
    """Return the byte floor over the time, in 10⁹ bytes per second."""
    return result.case.floor_bytes / (result.us or 1.0) / 1e3


def _mib(size: int | None) -> float | None:
    return None if size is None else round(size / 2**20, 3)


def _what(result: Result) -> dict[str, Any]:
    case = result.case
    entry = {"op": case.op, "pass": case.stage, "case": dict(case.params), "dtype": dtype_name(case.dtype)}
    return {**entry, "impl": result.impl}


def record(result: Result, copy_gbps: float) -> dict[str, Any]:
    """Return the record of a timed result."""
    if result.us is None:
        raise ValueError(f"{result.impl} was not timed: {result.note}")
    error = {} if result.error is None else {"error": float(f"{result.error:.3g}")}
    return {
        **_what(result),
        "us": round(result.us, 2),
        "gbps": round(gbps(result), 1),
        "copy_pct": round(100 * gbps(result) / copy_gbps, 1),
        "host_us": None if result.host_us is None else round(result.host_us, 2),
        "peak_mib": _mib(result.peak),
        "kept_mib": _mib(result.kept),
        **error,
    }


def document(
    about: Mapping[str, Any], results: Sequence[Result], copy_gbps: float, *, complete: bool
) -> list[dict[str, Any]]:
    """Return a header that lists failures and disagreements, then a record per implementation that agrees with ours."""
    header = {
        "header": True,
        **about,
        "copy_gbps": round(copy_gbps, 1),
        "complete": complete,
        "missing": sorted({r.note for r in results if r.status == MISSING}),
        "failed": [_what(r) | {"note": r.note} for r in results if r.status == FAILED],
        "disagreeing": [_what(r) | {"note": r.note} for r in results if r.status == DISAGREES],
        "seconds": round(sum(r.seconds for r in results), 1),
    }
    return [header, *(record(r, copy_gbps) for r in results if r.status == OK)]


def check_writable(path: Path) -> None:
    """Raise UserError if a file can't be written, before minutes of measuring are spent."""
    with doing(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"can't write {path}: {'it is a directory' if path.is_dir() else 'permission denied'}")


def write(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write a document atomically, one entry per line."""
    with doing(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, "[\n" + ",\n".join(json.dumps(e, default=str, ensure_ascii=False) for e in entries) + "\n]\n")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (header, records) of a results file; raise UserError if it is not one."""
    try:
        entries = json.loads(files.read(path))
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise UserError(f"{path} holds no benchmark results: a list of records with a header is expected")
    headers = [e for e in entries if e.get("header")]
    records = [e for e in entries if not e.get("header")]
    if len(headers) != 1:
        raise UserError(f"{path} has {len(headers)} header records, 1 is expected")
    for entry in records:
        lacking = [f for f in FIELDS if f not in entry]
        if lacking:
            raise UserError(f"{path}: a record lacks {', '.join(lacking)}")
    return headers[0], records

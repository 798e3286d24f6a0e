"""One results file from several: parts of a run that were measured on several GPUs of one host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.records import read, write
from benchmarks.bench.runner import label
from onepass.core.about import dtype_name
from onepass.core.errors import UserError

from .cases import all_cases

# what has to be the same for results to stand in one table
SAME = ("onepass", "python", "torch", "triton", "cuda", "driver", "os", "device", "gpu", "date")


def _key(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return entry["op"], entry["pass"], label(entry["case"]), entry["dtype"]


def _header(headers: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> dict[str, Any]:
    first = headers[0]
    for path, header in zip(paths, headers, strict=True):
        for field in SAME:
            if header.get(field) != first.get(field):
                raise UserError(
                    f"{path} is of another run than {paths[0]}: {field} is {header.get(field)}, not {first.get(field)}"
                )
    copies = [copy for h in headers for copy in h.get("copies", [h["copy_gbps"]])]
    everywhere = [dict(h.get("settings") or {}).items() for h in headers]
    joined: dict[str, Any] = {
        **first,
        "settings": {k: v for k, v in everywhere[0] if all((k, v) in items for items in everywhere)},
        "rivals": {k: v for h in headers for k, v in dict(h.get("rivals") or {}).items()},
        "copy_gbps": round(sum(copies) / len(copies), 1),
        "copies": copies,
        "complete": all(h.get("complete", True) for h in headers),
        "seconds": round(sum(h.get("seconds", 0.0) for h in headers), 1),
    }
    for field in ("missing", "failed", "disagreeing"):
        joined[field] = [entry for h in headers for entry in h.get(field) or []]
    joined["missing"] = sorted(set(joined["missing"]) - set(joined["rivals"]))
    return joined


def merge(target: Path, sources: Sequence[Path]) -> None:
    """Write `target` with the records of all sources, in the order in which the cases are declared.

    Shares of copy stay as measured, each against the copy of its own GPU; `copies` in the header lists those.
    """
    if not sources:
        raise UserError(f"--merge {target}: no file to read was given")
    documents = [read(path) for path in sources]
    header = _header([h for h, _ in documents], sources)
    declared = {
        (c.op, c.stage, label(c.params), dtype_name(c.dtype)): place for place, (_, c) in enumerate(all_cases())
    }
    seen: dict[tuple[str, ...], Path] = {}
    records = []
    for path, (_, found) in zip(sources, documents, strict=True):
        for entry in found:
            name = (*_key(entry), entry["impl"])
            if name in seen:
                raise UserError(f"{' '.join(name)} is in {seen[name]} and in {path}")
            seen[name] = path
            records.append(entry)
    records.sort(key=lambda entry: declared.get(_key(entry), len(declared)))
    write(target, [header, *records])

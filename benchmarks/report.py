"""Committed results as markdown tables: what the READMEs show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.records import read
from benchmarks.bench.runner import OURS, is_rival, label
from onepass.train.commands import files
from onepass.train.commands.errors import UserError

Record = Mapping[str, Any]


def _time(record: Record, best: float) -> str:
    text = f"{record['us']:.4g} ({record['copy_pct']:.0f}%)"
    return f"**{text}**" if record["us"] <= best else text


def _host(record: Record, best: float) -> str:
    return "–" if record["host_us"] is None else f"{record['host_us']:.4g}"


def _memory(record: Record, best: float) -> str:
    peak, kept = record.get("peak_mib"), record.get("kept_mib")
    return "–" if peak is None or kept is None else f"{peak:.4g} ({kept:.3g})"


def ratio(row: Mapping[str, Record]) -> str:
    """Say how many times longer the fastest rival takes than we do; below 1 when it is faster."""
    rivals = [float(r["us"]) for name, r in row.items() if is_rival(name)]
    return f"{min(rivals) / float(row[OURS]['us']):.2f}×" if rivals and OURS in row else "–"


def table(records: Sequence[Record], cell: Callable[[Record, float], str] = _time) -> str:
    """Markdown: a row per case, a column per implementation; of times the fastest in bold, and ours against rivals'."""
    blocks, groups = [], dict[tuple[str, ...], list[Record]]()
    for record in records:
        groups.setdefault((record["op"], record["pass"], record["dtype"]), []).append(record)
    for (op, stage, dtype), group in groups.items():
        impls = sorted(dict.fromkeys(str(r["impl"]) for r in group), key=lambda name: name != OURS)
        heads = [f"{op} {stage}, {dtype}", *(i.replace("|", "\\|") for i in impls)]
        heads += ["× fastest rival"] if cell is _time else []
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        cases: dict[str, dict[str, Record]] = {}
        for record in group:
            cases.setdefault(label(record["case"]), {})[str(record["impl"])] = record
        for name, row in cases.items():
            best = min(float(r["us"]) for r in row.values())
            cells = [name, *(cell(row[i], best) if i in row else "–" for i in impls)]
            lines.append(f"| {' | '.join(cells + ([ratio(row)] if cell is _time else []))} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def caption(header: Record) -> str:
    """Say in one line on what and with which versions the results were measured."""
    parts = [f"{header.get('gpu', 'unknown device')}, copy {header.get('copy_gbps', 0):.0f} GB/s"]
    parts += [f"{name} {header[name]}" for name in ("torch", "triton", "onepass") if header.get(name)]
    parts += [f"{name} {version}" for name, version in dict(header.get("rivals") or {}).items()]
    text = "; ".join((parts[0], ", ".join(parts[1:])))
    return text if header.get("complete", True) else f"{text} (incomplete run)"


def page(header: Record, records: Sequence[Record]) -> str:
    """Everything that a results file says: times, host time, memory, what went wrong."""
    parts = [f"{caption(header)}. Microseconds (% of copy).", table(records)]
    if any(r["host_us"] is not None for r in records):
        measured = "with warm caches" if header.get("device") == "cpu" else "until the call returns, on an idle device"
        parts += [f"## Host time\nMicroseconds {measured}.", table(records, _host)]
    if any(r.get("peak_mib") is not None for r in records):
        parts += ["## Memory\nMiB above the inputs: the most during a call (of which kept).", table(records, _memory)]
    for field in ("failed", "disagreeing"):
        lines = [
            f"- {p['impl']} at {p['op']} {p['pass']} {label(p['case'])} {p['dtype']}: {p['note']}"
            for p in header.get(field) or []
        ]
        parts += [f"## {field.capitalize()}\n" + "\n".join(lines) + "\n"] if lines else []
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def build(directory: Path) -> list[Path]:
    """Write <name>.md beside every <name>.json in a directory; return their paths."""
    if not directory.is_dir():
        raise UserError(
            f"--report {directory}: no such directory; give one that holds results of `python -m benchmarks --json`"
        )
    sources = sorted(directory.glob("*.json"))
    if not sources:
        raise UserError(f"--report {directory}: no .json files; `python -m benchmarks --json {directory}/` writes some")
    written: list[Path] = []
    for source in sources:
        header, records = read(source)
        if not records:
            raise UserError(f"{source} has a header but no measurements")
        written.append(source.with_suffix(".md"))
        files.write(written[-1], page(header, records))
    return written

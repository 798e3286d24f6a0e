"""results/bars.md from the committed records: each bar, the worst cell that was measured, met or missed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.records import read, write_text
from benchmarks.bench.runner import OURS, label
from onepass.train.commands.errors import UserError

from . import programs
from .bars import BARS, CPU_BARS, CPU_NORM_BARS, FIRST_STEP_BARS, Bar, Row, Verdict, asked, judge, rows, with_unit
from .notes import NOTES, SINCE

RESULTS = Path(__file__).parent / "results"

_INTRO = """\
# Every bar, met or missed

<!-- written by `python -m benchmarks --performance benchmarks/results/bars.md`; `make test` compares -->

A *bar* is a target that was set before measuring, a *cell* one shape in one dtype. A bar is met when every cell meets
it. *% of copy* is the time of copying as many bytes as an operator must read and write, in the same run, over the
operator's time. *×* with ≥ is the rival's time over ours: above 1 ours is faster. *×* with ≤ is ours over the other's.
[Speed](../../docs/performance.md) has what a user asks; [benchmarks/README.md](../README.md) says how it is measured.
"""
_HEAD = "| operator | pass | cells, rival | bar | worst | in which cell | cells met |\n|---|---|---|---|---|---|---|\n"
_VERSIONS = ("gpu", "torch", "triton", "date")


def _first_step(path: Path) -> list[Row]:
    """One record per mode; torch's AdamW beside ours has no bar."""
    found = []
    for r in _entries(path):
        if "AdamW" not in r["mode"]:
            ours = {"us": 1e3 * r["first_ms_empty_cache"], "peak_mib": r["extra_peak_mib"]}
            found.append(Row("lion", "first step", r["mode"], {"model": r["model"]}, {OURS: ours}))
    return found


def _cpu_norms(path: Path) -> list[Row]:
    """`cpu_norm.py` wrote torch's time and the ratio of the two, taken in turns, in one record."""
    found = []
    for r in _entries(path)[1:]:
        times = {"torch": {"us": r["torch_us"]}, OURS: {"us": r["ratio"] * r["torch_us"]}}
        found.append(Row(r["op"], r["stage"], r["dtype"], {"rows": r["rows"], "cols": r["cols"]}, times))
    return found


def _entries(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def name(bar: Bar) -> str:
    """How notes.py calls a bar."""
    return f"{bar.op} {bar.stage}, {bar.words}"


def _table(judged: Iterable[tuple[Bar, Verdict | None]], notes: list[str]) -> str:
    """Missed bars as a table, met ones as a list; operators that share a bar share its line. Notes are appended."""
    lines: dict[tuple[Any, ...], list[tuple[Bar, Verdict | None]]] = {}
    for bar, verdict in judged:
        lines.setdefault((bar.stage, bar.words, asked(bar)), []).append((bar, verdict))
    missed: list[str] = []
    met: dict[str, list[str]] = {}
    for group in lines.values():
        bar, ops = group[0][0], ", ".join(f"`{other.op}`" for other, _ in group)
        verdicts = [verdict for _, verdict in group if verdict is not None]
        start = f"| {ops} | {bar.stage} | {bar.words} | {asked(bar)} |"
        if len(verdicts) < len(group):
            missed.append(f"{start} not in the records | | |\n")
            continue
        worst = (max if bar.most else min)(verdicts, key=lambda v: v.worst)
        found = with_unit(worst.worst, bar.unit.partition(" ")[0])
        if all(v.met == v.cells for v in verdicts):
            met.setdefault(ops, []).append(f"{bar.stage}, {bar.words}: {found} ({asked(bar)})")
            continue
        cell = f"{label(worst.at.case)} {worst.at.dtype}"
        cell = cell if len(group) == 1 else f"`{worst.at.op}` {cell}"
        told = f"{sum(v.met for v in verdicts)} of {sum(v.cells for v in verdicts)}{_marks(group, notes)}"
        missed.append(f"{start} {found} | {cell} | {told} |\n")
    listed = "".join(f"- {ops}: {'; '.join(told)}\n" for ops, told in met.items())
    return f"**Missed**\n\n{_HEAD}{''.join(missed)}\n**Met**: the worst cell, and the bar in brackets\n\n{listed}"


def _marks(group: Sequence[tuple[Bar, Verdict | None]], notes: list[str]) -> str:
    """The numbers of the notes on these bars, such as " (2)"."""
    names = {name(bar) for bar, _ in group}
    found = [text for text, bars in NOTES.items() if names & set(bars)]
    notes += [text for text in found if text not in notes]
    return "".join(f" ({notes.index(text) + 1})" for text in found)


def _versions(headers: Sequence[Mapping[str, Any]]) -> str:
    """One GPU, one torch, …: all that the headers name, should they differ."""
    told = []
    for field in _VERSIONS:
        values = " or ".join(sorted({str(h[field]) for h in headers if h.get(field)}))
        told.append(values if field in ("gpu", "date") else f"{field} {values}")
    return ", ".join(told)


def _measured(directory: Path) -> tuple[list[Mapping[str, Any]], list[Row]]:
    sources = sorted(directory.glob("*.json"))
    if not sources:
        raise UserError(f"{directory} holds no results; write some with `python -m benchmarks --json {directory}/`")
    documents = [read(source) for source in sources]
    return [header for header, _ in documents], rows([r for _, records in documents for r in records])


def page(results: Path = RESULTS) -> str:
    """The whole page."""
    h200, on_gpu = _measured(results / "h200")
    cpu, on_cpu = _measured(results / "cpu")
    first_steps = _first_step(results / "h200" / "raw" / "lion_first_step.json")
    norms = _cpu_norms(results / "cpu" / "raw" / "norm.json")
    notes: list[str] = []
    gpu_table = _table(
        [(b, judge(b, on_gpu)) for b in BARS] + [(b, judge(b, first_steps)) for b in FIRST_STEP_BARS], notes
    )
    cpu_table = _table([(b, judge(b, norms)) for b in CPU_NORM_BARS] + [(b, judge(b, on_cpu)) for b in CPU_BARS], notes)
    told = "".join(f"{i}. {text}\n" for i, text in enumerate(notes, 1))
    parts = [
        _INTRO, f"## {_versions(h200)}\n{gpu_table}", programs.section(results / "h200" / "raw"),
        f"## {_versions(cpu)}\n{cpu_table}", f"## Notes\n{told}", SINCE,
    ]  # fmt: skip
    return "\n".join(parts)


def write(target: Path, results: Path = RESULTS) -> None:
    """Write the page."""
    write_text(target, page(results))

"""Committed results as a markdown table and a plot: what the READMEs show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onepass.core.errors import UserError

from .records import read, write_text
from .runner import OURS, label

Record = Mapping[str, Any]


def _ordered(values: Sequence[str], first: str | None = None) -> list[str]:
    """Distinct values in order of appearance, one of them put first."""
    found = list(dict.fromkeys(values))
    return sorted(found, key=lambda v: v != first)


def _groups(records: Sequence[Record], *fields: str) -> dict[tuple[str, ...], list[Record]]:
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(str(record[f]) for f in fields), []).append(record)
    return found


def _cell(record: Record | None, best: float) -> str:
    if record is None:
        return "–"
    text = f"{record['us']:.4g} ({record['copy_pct']:.0f}%)"
    return f"**{text}**" if record["us"] <= best else text


def table(records: Sequence[Record]) -> str:
    """Markdown: a row per case, a column per implementation, microseconds and % of copy; the fastest in bold."""
    blocks = []
    for (op, stage, dtype), group in _groups(records, "op", "pass", "dtype").items():
        impls = _ordered([str(r["impl"]) for r in group], OURS)
        lines = [f"| {op} {stage}, {dtype} | " + " | ".join(i.replace("|", "\\|") for i in impls) + " |"]
        lines.append("|---" * (1 + len(impls)) + "|")
        cases: dict[str, dict[str, Record]] = {}
        for record in group:
            cases.setdefault(label(record["case"]), {})[str(record["impl"])] = record
        for name, row in cases.items():
            best = min(float(r["us"]) for r in row.values())
            lines.append(f"| {name} | " + " | ".join(_cell(row.get(i), best) for i in impls) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def caption(header: Record) -> str:
    """Say in one line on what and with which versions the results were measured."""
    parts = [f"{header.get('gpu', 'unknown device')}, copy {header.get('copy_gbps', 0):.0f} GB/s"]
    parts += [f"{name} {header[name]}" for name in ("torch", "triton", "onepass") if header.get(name)]
    parts += [f"{name} {version}" for name, version in dict(header.get("rivals") or {}).items()]
    text = "; ".join((parts[0], ", ".join(parts[1:])))
    return text if header.get("complete", True) else f"{text} (incomplete run)"


def plot(header: Record, records: Sequence[Record], path: Path) -> None:
    """Draw % of copy over the cases: a row of panels per operator and dtype, a column per pass."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stages = _ordered([str(r["pass"]) for r in sorted(records, key=lambda r: r["pass"] != "forward")])
    rows = _groups(records, "op", "dtype")
    figure = Figure(figsize=(1.5 + 6 * len(stages), 0.8 + 3.6 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(stages), squeeze=False)
    impls = _ordered([str(r["impl"]) for r in records], OURS)
    for line, ((op, dtype), group) in zip(axes, rows.items(), strict=True):
        for panel, stage in zip(line, stages, strict=True):
            found = [r for r in group if r["pass"] == stage]
            panel.set_title(f"{op} {stage}, {dtype}", loc="left", fontsize=10)
            if not found:
                panel.set_axis_off()
                continue
            names = _ordered([label(r["case"]) for r in found])
            for i, impl in enumerate(impls):
                points = [(names.index(label(r["case"])), r["copy_pct"]) for r in found if r["impl"] == impl]
                if not points:
                    continue
                ours = impl == OURS
                xs, ys = zip(*sorted(points), strict=True)
                panel.plot(
                    xs, ys, label=impl, color="black" if ours else f"C{(i - 1) % 10}", linewidth=2.6 if ours else 1.3,
                    marker="o" if ours else ".", zorder=3 if ours else 2, linestyle="-" if i <= 10 else "--",
                )  # fmt: skip
            panel.axhline(100, color="0.6", linewidth=0.8, linestyle=":")
            panel.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
            panel.set_ylim(bottom=0)
            panel.set_ylabel("% of copy", fontsize=9)
            panel.grid(axis="y", color="0.92")
            panel.legend(fontsize=7, framealpha=0.8)
    figure.suptitle(
        f"{header.get('gpu', '')}: share of a device copy ({header.get('copy_gbps', 0):.0f} GB/s)", fontsize=11
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})


def build(directory: Path) -> list[Path]:
    """Write <name>.md and <name>.png beside every <name>.json in a directory; return their paths."""
    if not directory.is_dir():
        raise UserError(
            f"--report {directory}: no such directory; give one that holds results of `onepass bench --json`"
        )
    sources = sorted(directory.glob("*.json"))
    if not sources:
        raise UserError(f"--report {directory}: no .json files; write some with `onepass bench --json {directory}/`")
    written = []
    for source in sources:
        header, records = read(source)
        if not records:
            raise UserError(f"{source} has a header but no measurements")
        text, picture = source.with_suffix(".md"), source.with_suffix(".png")
        try:
            plot(header, records, picture)
        except OSError as error:
            raise UserError(f"can't write {picture}: {error.strerror or error}") from error
        write_text(
            text, f"{caption(header)}. Microseconds (% of copy).\n\n{table(records)}\n![% of copy]({picture.name})\n"
        )
        written += [text, picture]
    return written

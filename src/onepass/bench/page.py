"""Records as one self-contained HTML page: plots and numbers of every implementation, no script, dark and light."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .runner import OURS, STAGES, label

Record = Mapping[str, Any]

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM = 520, 260, 44, 28, 40  # of a plot, in its own units
LEAST_WIDTHS = 3  # from this many widths on, a plot over the columns is drawn
TOP = 110.0  # % of copy at the upper edge; caches may serve what a copy must fetch
COLOURS = ("#d1495b", "#2e86ab", "#e08e0b", "#3b8e5a", "#7d5ba6", "#a57548", "#d77fa1", "#6b7a8f", "#8a9a1b", "#17a2b8")
STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --quiet: #5b6570; --line: #d5dae0; --back: #fff; --ours: #111827; }
@media (prefers-color-scheme: dark) {
 :root { --ink: #e4e8ec; --quiet: #9aa5b1; --line: #39424c; --back: #15191e; --ours: #f3f6fa; } }
body { margin: 2rem auto; max-width: 74rem; padding: 0 1rem; background: var(--back); color: var(--ink);
 font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; } p { margin: .3rem 0; color: var(--quiet); }
.wide { overflow-x: auto; } .plots { display: flex; flex-wrap: wrap; gap: 1rem; }
svg { width: 100%; max-width: 34rem; height: auto; }
svg text { fill: var(--quiet); font: 11px system-ui, sans-serif; }
.axis { stroke: var(--line); }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .88rem; }
.key i { display: inline-block; width: 1.4em; border-top: 3px solid; vertical-align: middle; margin-right: .3em; }
.bar { display: block; height: .45em; margin-top: .15em; min-width: 1px; border-radius: 2px; }
td.best { font-weight: 700; }
"""


def page(header: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Return the page of one run."""
    impls = sorted({r["impl"] for r in records}, key=lambda name: (name != OURS, name))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(n for n in impls if n != OURS)}
    colours[OURS] = "var(--ours)"
    named = ("onepass", "torch", "triton", "cuda", "driver")
    versions = [f"{name} {header[name]}" for name in named if header.get(name)]
    versions += [f"{name} {version}" for name, version in (header.get("rivals") or {}).items() if version]
    copy = float(header["copy_gbps"])
    # a cell's floor over its time, and that over the copy of the same run
    about = f"A copy within the device moves {copy:,.0f} GB/s in this run; % of copy is a byte floor over its time"
    body = [
        f"<h1>onepass on {escape(str(header.get('gpu')))}</h1>",
        f"<p>{escape(str(header.get('date', '')))} · {escape(', '.join(versions))}</p>",
        f"<p>{about}: 100 % is as fast as copying. Times are medians in µs with cold caches.</p>",
        '<div class="key">',
        *(f'<span><i style="border-color: {colours[name]}"></i>{escape(name)}</span>' for name in impls),
        "</div>",
    ]
    if not header.get("complete", True):
        body.append("<p><b>This run ended early: cases are missing.</b></p>")
    for op in dict.fromkeys(r["op"] for r in records):
        body.append(f"<h2>{escape(op)}</h2>")
        own = [r for r in records if r["op"] == op]
        for dtype in dict.fromkeys(r["dtype"] for r in own):
            for stage in STAGES:
                cell = [r for r in own if r["dtype"] == dtype and r["pass"] == stage]
                if cell:
                    body += _section(f"{stage}, {dtype}", cell, colours)
    body += _faults(header)
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>onepass bench: {escape(str(header.get('gpu')))}</title><style>{STYLE}</style></head><body>",
    ]
    return "\n".join([*head, *body, "</body></html>", ""])


def _section(title: str, records: Sequence[Record], colours: Mapping[str, str]) -> list[str]:
    out = [f"<h3>{escape(title)}</h3>"]
    series: dict[str, list[Record]] = {}
    for r in records:
        if {"rows", "cols"} <= set(r["case"]):
            rest = label({name: value for name, value in r["case"].items() if name not in ("rows", "cols")})
            series.setdefault(rest, []).append(r)
    plots = [
        _plot(rest, found, colours)
        for rest, found in series.items()
        if len({r["case"]["cols"] for r in found}) >= LEAST_WIDTHS
    ]
    if plots:
        out += ['<div class="plots">', *plots, "</div>"]
    return [*out, '<div class="wide">', _table(records, colours), "</div>"]


def _plot(title: str, records: Sequence[Record], colours: Mapping[str, str]) -> str:
    """Draw % of copy over the columns; where several cases have one width, the one with the most rows."""
    widths = sorted({r["case"]["cols"] for r in records})
    low, high = math.log2(widths[0]), math.log2(widths[-1])

    def x(cols: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(cols) - low) / (high - low)

    def y(percent: float) -> float:
        return 10 + (HEIGHT - BOTTOM - 10) * (1 - min(percent, TOP) / TOP)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title or "% of copy over columns")}</title>'
    ]
    for percent in range(0, 101, 25):
        parts.append(f'<path class="axis" d="M{LEFT} {y(percent):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent}</text>')
    shown = widths if len(widths) <= 7 else widths[:: math.ceil(len(widths) / 7)]
    for cols in shown:
        parts.append(f'<text x="{x(cols):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{cols:,}</text>')
    words = "% of copy over columns" + (f" · {title}" if title else "")
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(words)}</text>')
    # ours last, so that it lies above the others
    for impl in sorted({r["impl"] for r in records}, key=lambda name: (name == OURS, name)):
        best: dict[int, Record] = {}
        for r in records:
            cols = r["case"]["cols"]
            if r["impl"] == impl and (cols not in best or r["case"]["rows"] > best[cols]["case"]["rows"]):
                best[cols] = r
        points = [(x(cols), y(best[cols]["copy_pct"]), best[cols]) for cols in sorted(best)]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)
        style = f'stroke="{colours[impl]}" style="stroke: {colours[impl]}" stroke-width="{3 if impl == OURS else 1.6}"'
        parts.append(f'<polyline points="{line}" fill="none" {style}/>')
        for px, py, r in points:
            tip = f"{impl}, {label(r['case'])}: {r['us']:,.1f} µs, {r['copy_pct']:.0f} %"
            dot = f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" style="fill: {colours[impl]}">'
            parts.append(f"{dot}<title>{escape(tip)}</title></circle>")
    return "".join([*parts, "</svg>"])


def _table(records: Sequence[Record], colours: Mapping[str, str]) -> str:
    impls = sorted({r["impl"] for r in records}, key=lambda name: (name != OURS, name))
    cases: dict[str, dict[str, Record]] = {}
    for r in records:
        cases.setdefault(label(r["case"]), {})[r["impl"]] = r
    rows = ["<table><tr><th>case</th>", *(f"<th>{escape(name)}</th>" for name in impls), "</tr>"]
    for name, found in cases.items():
        least = min(r["us"] for r in found.values())
        rows.append(f"<tr><td>{escape(name)}</td>")
        for impl in impls:
            if impl not in found:
                rows.append("<td>–</td>")
                continue
            r = found[impl]
            bar = (
                f'<span class="bar" style="width: {min(r["copy_pct"], TOP):.0f}%; background: {colours[impl]}"></span>'
            )
            best = ' class="best"' if r["us"] == least else ""
            rows.append(f"<td{best}>{r['us']:,.1f} µs, {r['copy_pct']:.0f} %{bar}</td>")
        rows.append("</tr>")
    return "".join([*rows, "</table>"])


def _faults(header: Mapping[str, Any]) -> list[str]:
    lines = [f"not installed: {name}" for name in header.get("missing") or ()]
    for what in ("failed", "disagreeing"):
        for fault in header.get(what) or ():
            where = f"{fault['op']} {fault['pass']} {fault['dtype']} {label(fault['case'])}"
            lines.append(f"{what}: {fault['impl']} at {where}: {fault['note']}")
    return ["<h2>Not measured</h2>", *(f"<p>{escape(line)}</p>" for line in lines)] if lines else []

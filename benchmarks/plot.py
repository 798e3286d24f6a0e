"""Share of a copy as pictures, one per operator: lines over the width where cases differ by it, bars elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.runner import OURS, STAGES, label
from onepass.core import files

Record = Mapping[str, Any]

SIZES = ("rows", "cols")
# from this many widths on, a line says more than bars
LEAST_WIDTHS = 3
_COLOURS = (
    "#d1495b",
    "#2e86ab",
    "#e08e0b",
    "#3b8e5a",
    "#7d5ba6",
    "#8c6d46",
    "#d77fa1",
    "#6b7a8f",
    "#8a9a1b",
    "#17becf",
)


class Panel:
    """Cases of one operator, pass and dtype that belong in one pair of axes."""

    def __init__(self, dtype: str, shared: str, records: Sequence[Record], over_width: bool) -> None:
        self.dtype = dtype
        self.shared = shared  # what all its cases have in common, in words
        self.records = records
        self.over_width = over_width

    def stage(self, stage: str) -> list[Record]:
        return [r for r in self.records if r["pass"] == stage]

    def bars(self) -> int:
        """Height of the panel: how many bars its fullest pass shows."""
        return max(len(self.stage(s)) + len({label(r["case"]) for r in self.stage(s)}) for s in STAGES)


def _rest(record: Record) -> str:
    return label({k: v for k, v in record["case"].items() if k not in SIZES})


def _most_rows(records: Sequence[Record]) -> dict[int, int]:
    most: dict[int, int] = {}
    for case in (r["case"] for r in records if set(SIZES) <= set(r["case"])):
        most[case["cols"]] = max(case["rows"], most.get(case["cols"], 0))
    return most


def panels(records: Sequence[Record]) -> list[Panel]:
    """Split one operator's records by dtype, and those of a dtype into lines over the width and the others."""
    found: list[Panel] = []
    for dtype in dict.fromkeys(str(r["dtype"]) for r in records):
        here = [r for r in records if r["dtype"] == dtype]
        others: list[Record] = []
        for rest in dict.fromkeys(_rest(r) for r in here):
            alike = [r for r in here if _rest(r) == rest]
            most = _most_rows(alike)
            if len(most) >= LEAST_WIDTHS:
                # a line goes through the largest case of each width
                line = [r for r in alike if most.get(r["case"].get("cols")) == r["case"].get("rows")]
                found.append(Panel(dtype, rest, line, over_width=True))
                alike = [r for r in alike if r not in line]
            others += alike
        if others:
            found.append(Panel(dtype, "", others, over_width=False))
    return found


def _style(impl: str, impls: Sequence[str]) -> dict[str, Any]:
    if impl == OURS:
        return {"color": "black", "linewidth": 2.6, "marker": "o", "zorder": 3}
    place = impls.index(impl) - 1
    dashes = ("-", "--", ":")[min(place // len(_COLOURS), 2)]
    return {"color": _COLOURS[place % len(_COLOURS)], "linewidth": 1.5, "marker": ".", "linestyle": dashes, "zorder": 2}


def _lines(axes: Any, records: Sequence[Record], impls: Sequence[str]) -> None:
    sizes = sorted({(r["case"]["cols"], r["case"]["rows"]) for r in records})
    for impl in impls:
        points = sorted(
            (sizes.index((r["case"]["cols"], r["case"]["rows"])), r["copy_pct"]) for r in records if r["impl"] == impl
        )
        if points:
            axes.plot(*zip(*points, strict=True), **_style(impl, impls))
    axes.set_xticks(range(len(sizes)), [f"{c:,}\n×{r:,}".replace(",", "\u2009") for c, r in sizes], fontsize=7)
    axes.set_xlabel("columns × rows", fontsize=8)
    axes.set_ylabel("% of copy", fontsize=9)
    axes.axhline(100, color="0.6", linewidth=0.8, linestyle=":")
    axes.set_ylim(0, max(105.0, 1.05 * max(float(r["copy_pct"]) for r in records)))
    axes.grid(axis="y", color="0.92")


def _bars(axes: Any, records: Sequence[Record], impls: Sequence[str], bars: int) -> None:
    place, ticks = 0.0, {}
    for name in dict.fromkeys(label(r["case"]) for r in records):
        rows = sorted((r for r in records if label(r["case"]) == name), key=lambda r: impls.index(str(r["impl"])))
        for i, r in enumerate(rows):
            axes.barh(place + i, r["copy_pct"], height=0.9, color=_style(str(r["impl"]), impls)["color"])
            text = f" {r['impl']}  {r['copy_pct']:.0f}%  {_time(r['us'])}"
            axes.text(r["copy_pct"], place + i, text, va="center", fontsize=6.5, color="0.25")
        ticks[place + (len(rows) - 1) / 2] = name
        place += len(rows) + 1
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=7)
    axes.set_ylim(bars - 1, -1)
    axes.set_xlabel("% of copy", fontsize=8)
    axes.set_xlim(0, 1.55 * max(float(r["copy_pct"]) for r in records))
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)


def _time(us: float) -> str:
    return f"{us:.3g} µs" if us < 1e3 else f"{us / 1e3:.3g} ms"


def picture(header: Record, op: str, records: Sequence[Record], path: Path) -> None:
    """Draw one operator: a row of panels per dtype and kind of case, a column per pass, one legend for all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = panels(records)
    stages = [s for s in STAGES if any(r["pass"] == s for r in records)]
    impls = sorted(dict.fromkeys(str(r["impl"]) for r in records), key=lambda i: i != OURS)
    heights = [3.3 if row.over_width else 0.9 + 0.16 * row.bars() for row in rows]
    figure = Figure(figsize=(6.6 * max(len(stages), 1) + 1, sum(heights) + 1.1), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), len(stages), squeeze=False, gridspec_kw={"height_ratios": heights})
    for line, row in zip(grid, rows, strict=True):
        for axes, stage in zip(line, stages, strict=True):
            found = row.stage(stage)
            if not found:
                axes.set_axis_off()
                continue
            axes.set_title(" · ".join(t for t in (stage, row.dtype, row.shared) if t), loc="left", fontsize=9)
            if row.over_width:
                _lines(axes, found, impls)
            else:
                _bars(axes, found, impls, row.bars())
    # bars carry their names
    lined = {str(r["impl"]) for row in rows if row.over_width for r in row.records}
    handles = [Line2D([], [], label=impl, **_style(impl, impls)) for impl in impls if impl in lined]
    if handles:
        columns = min(len(handles), 3 * len(stages))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    copy = f"{header.get('copy_gbps', 0):.0f} GB/s"
    figure.suptitle(f"{op}: share of a device copy ({copy}) on {header.get('gpu', 'unknown device')}", fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    files.write(path, out.getvalue())


def draw(header: Record, records: Sequence[Record], source: Path) -> list[Path]:
    """Write a picture per operator: <name>.png, or <name>-<op>.png where a file holds several."""
    ops = list(dict.fromkeys(str(r["op"]) for r in records))
    paths = []
    for op in ops:
        name = re.sub(r"\W+", "_", op)  # an operator's words may hold commas and spaces
        path = source.with_name(f"{source.stem}{f'-{name}' if len(ops) > 1 else ''}.png")
        picture(header, op, [r for r in records if r["op"] == op], path)
        paths.append(path)
    return paths

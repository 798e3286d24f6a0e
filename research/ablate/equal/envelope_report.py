"""Table and picture of `--envelope`: for each budget the best of each arm, of whatever width."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from research.ablate.curves import COLOURS
from research.ablate.equal import envelope
from research.ablate.equal.records import NAMES, Record
from research.ablate.tables import spread

LABELS = {"learned": "routed", "dense": "dense", "hybrid": "gated delta net"}
RANGE = 1.2  # bits above the lowest that a panel shows
Rows = dict[float, list[Record]]


def write(out: Path) -> int:
    """Write envelope.md and envelope.png beside the records; show the table."""
    from onepass.train.commands import files
    from onepass.train.progress import say

    rows = envelope.read(out)
    if not places(rows):
        say(f"no run of {out} is done yet")
        return 0
    text = table(rows)
    files.write(out / "envelope.md", text)
    files.write(out / "envelope.png", png(rows))
    for line in text.splitlines():
        say(line)
    return 0


def leaders(rows: Rows, budget: float, task: str, n: int) -> dict[str, list[Record]]:
    """Return all seeds of the best width of each arm."""
    found = {}
    for arm in LABELS:
        if dims := envelope.best(rows[budget], task, n, arm):
            found[arm] = [r for r in rows[budget] if r["kind"] == "run" and _at(r) == (task, n, arm, dims[0])]
    return found


def _at(run: Record) -> tuple[Any, ...]:
    return run["task"], run["n"], run["arm"], run["dim"]


def places(rows: Rows) -> list[tuple[str, int]]:
    """Return the tasks and lengths that have a run."""
    return sorted({(run["task"], run["n"]) for runs in rows.values() for run in runs if run["kind"] == "run"})


def table(rows: Rows) -> str:
    """Return the leaders of every budget as Markdown, and under it every run."""
    runs = [run for some in rows.values() for run in some]
    about = ", ".join(
        words + " or ".join(sorted({str(run[name]) for run in runs}))
        for name, words in (("device", ""), ("torch", "torch "), ("data", "data "))
    )
    heads = [
        "task",
        "tokens in view",
        "seconds of a run",
        *(f"{label}: bits per byte (d)" for label in LABELS.values()),
    ]
    settings = sorted({(r["window"], r["k"], r["light_mult"]) for r in runs if r["arm"] == "learned"})
    about += "".join(f"; routed: window {w}, share {k:g}, light {light:g}·d" for w, k, light in settings)
    lines = ["# The best model for a budget of time", "", about, "", _line([*heads, "dense − routed"])]
    lines.append("|---" * (len(heads) + 1) + "|")
    for task, n in places(rows):
        for budget in rows:
            if not (found := leaders(rows, budget, task, n)):
                continue
            seconds = found[next(iter(found))][0]["asked_seconds"]
            cells = [NAMES.get(task, task), f"{n:,}", f"{seconds:g}"]
            for arm in LABELS:
                bits = [run["final"]["bits"] for run in found.get(arm, [])]
                cells.append(f"{spread(bits)} ({found[arm][0]['dim']})" if bits else "")
            lines.append(_line([*cells, _difference(found)]))
    heads = ["task", "tokens in view", "seconds", "arm", "d", "blocks", "seed", "rate", "ms a step", "bits per byte"]
    lines += ["", _line(heads), "|---" * len(heads) + "|"]
    for run in (run for some in rows.values() for run in some if run["kind"] == "run"):
        names = NAMES.get(run["task"], run["task"]), f"{run['n']:,}", f"{run['seconds']:.1f}", LABELS[run["arm"]]
        numbers = run["dim"], run["blocks"], run["seed"], f"{run['lr']:g}", f"{run['ms_per_step']:.2f}"
        lines.append(_line([*map(str, names), *map(str, numbers), f"{run['final']['bits']:.4f}"]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _difference(found: dict[str, list[Record]]) -> str:
    if not {"learned", "dense"} <= found.keys():
        return ""
    bits = {arm: {run["seed"]: run["final"]["bits"] for run in found[arm]} for arm in ("learned", "dense")}
    return spread(
        [bits["dense"][seed] - bits["learned"][seed] for seed in sorted(bits["dense"].keys() & bits["learned"])]
    )


def png(rows: Rows) -> bytes:
    """Draw a panel for each task and length: curves of all runs, and the line through each budget's best."""
    panels = places(rows)
    chart = Figure(figsize=(5.0 * len(panels), 3.8), layout="constrained")
    axes = chart.subplots(1, len(panels), squeeze=False)[0]
    for axis, (task, n) in zip(axes, panels, strict=True):
        last = []
        for arm, label in LABELS.items():
            for run in (r for some in rows.values() for r in some if r["kind"] == "run"):
                if (run["task"], run["n"], run["arm"]) == (task, n, arm):
                    curve = np.array(
                        [(p["seconds"], p["bits"]) for p in run["curve"] if p["seconds"] > 0], dtype=float
                    ).T
                    axis.plot(*curve, color=COLOURS[arm], linewidth=0.6, alpha=0.35)
                    if curve.size and np.isfinite(curve[1]).all():
                        last.append(curve[1].min())
            best = [(found[arm][0]["seconds"], np.mean([r["final"]["bits"] for r in found[arm]])) for budget in rows
                    if arm in (found := leaders(rows, budget, task, n))]  # fmt: skip
            if best and all(math.isfinite(bits) for _, bits in best):
                axis.plot(*zip(*best, strict=True), color=COLOURS[arm], linewidth=2, marker="o", label=f"best {label}")
        if last:
            axis.set_ylim(min(last) - 0.05, min(last) + RANGE)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 6)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(f"{NAMES.get(task, task)}, {n:,} in view", loc="left", fontsize=10)
        axis.set_xlabel("seconds of training")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    axes[0].set_ylabel("validation bits per byte")
    FigureCanvasAgg(chart)
    out = io.BytesIO()
    chart.savefig(out, format="png", dpi=110)
    return out.getvalue()

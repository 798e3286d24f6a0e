"""Curves of one task: the deciding figure over the steps, and what the routers chose."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from research.ablate.tables import Record, by_arm, figure

COLOURS = {
    "learned": "#c23b22", "random": "#2f78bd", "oracle": "#2e8b57", "light": "#8a8f98", "dense": "#222a35",
    "all": "#c9962b",
}  # fmt: skip
# figures of the choices that are worth a panel, where a task has them
PANELS = {
    "picked": "planted tokens that the router chooses",
    "ff_of_masked": "masked bytes that a block's feed-forward gets",
    "ff_entropy": "feed-forward: entropy of the chosen bytes (bits)",
    "kv_entropy": "keys: entropy of the chosen bytes (bits)",
    "ff_kept": "feed-forward: choices kept since the measurement before",
}


def png(records: Sequence[Record]) -> bytes:
    """Draw one task; thin lines are seeds, thick ones their mean."""
    arms, what = by_arm(records), figure(records[0])
    points = [point for record in records for point in [*record["curve"], record["final"]]]
    panels = {what: "validation bits per byte" if what == "bits" else "loss on new tokens"}
    panels.update({name: title for name, title in PANELS.items() if any(name in point for point in points)})
    chart = Figure(figsize=(5.2 * min(3, len(panels)), 3.9 * -(-len(panels) // 3)), layout="constrained")
    axes = chart.subplots(-(-len(panels) // 3), min(3, len(panels)), squeeze=False).flatten()
    for axis, (name, title) in zip(axes, panels.items(), strict=False):
        for arm, runs in arms.items():
            _lines(axis, list(runs.values()), name, arm)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    last = sorted(record["curve"][-1][what] for record in records if record["curve"])
    begin = max(record["curve"][len(record["curve"]) // 4][what] for record in records if record["curve"])
    room = 0.05 * (begin - last[0])
    # the first steps would squeeze the rest
    axes[0].set_ylim(last[0] - room, begin + room)
    axes[0].legend(frameon=False)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    chart.suptitle(records[0]["task"], x=0.01, ha="left", fontweight="bold")
    FigureCanvasAgg(chart)
    out = io.BytesIO()
    chart.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _lines(axis: Any, runs: list[Record], name: str, arm: str) -> None:
    lines = []
    for run in runs:
        # the last bits are of more text than those before: a step in the curve would say nothing
        measured = run["curve"] if name == "bits" else [*run["curve"], run["final"]]
        points = [(p["step"], p[name]) for p in measured if name in p]
        if points:
            lines.append(np.array(points, dtype=float).T)
            axis.plot(*lines[-1], color=COLOURS[arm], linewidth=0.6, alpha=0.45)
    whole = [line for line in lines if line.shape == lines[0].shape]
    if whole:
        axis.plot(*np.mean(whole, axis=0), color=COLOURS[arm], linewidth=1.9, label=arm)

"""Loss over wall-clock time: a panel for each task, length, width and setting of the routed arm."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from research.ablate.curves import COLOURS
from research.ablate.equal.records import NAMES, Seeds


def png(found: dict[tuple[Any, ...], Seeds]) -> bytes:
    """Draw all pairs; thin lines are seeds, thick ones their mean."""
    rows = sorted({name[0] for name in found})
    columns = sorted({name[1:] for name in found}, key=lambda name: (name[1], name[0], *name[2:]))
    size = 4.4 * len(columns), 3.6 * len(rows)
    chart = Figure(figsize=(max(6.0, size[0]), size[1]), layout="constrained")
    axes = chart.subplots(len(rows), len(columns), squeeze=False)
    for row, task in zip(axes, rows, strict=True):
        for axis, column in zip(row, columns, strict=True):
            seeds = found.get((task, *column))
            if seeds is None:
                axis.set_axis_off()
                continue
            _panel(axis, seeds)
            n, dim, blocks, *_, window, k, light = column
            title = f"{NAMES.get(task, task)}, {n:,} in view (d {dim}, {blocks} blocks)"
            axis.set_title(
                f"{title}\nrouted: window {window:,}, share {k:g}, light {light:g}·d", loc="left", fontsize=9
            )
    for row in axes:
        row[0].set_ylabel("validation bits per byte")
    for axis in axes[-1]:
        axis.set_xlabel("seconds of training")
    next(axis for axis in axes.flatten() if axis.axison).legend(frameon=False)
    FigureCanvasAgg(chart)
    out = io.BytesIO()
    chart.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _panel(axis: Any, seeds: Seeds) -> None:
    last, begin = [], []
    for arm, label in (("learned", "routed"), ("dense", "dense")):
        lines = [
            np.array([(point["seconds"], point["bits"]) for point in arms[arm]["curve"]], dtype=float).T
            for arms in seeds.values()
        ]
        for line in lines:
            axis.plot(*line, color=COLOURS[arm], linewidth=0.6, alpha=0.45)
            if np.isfinite(line[1]).all():
                last.append(line[1].min())
                begin.append(line[1][min(len(line[1]) - 1, 2)])
        whole = [line for line in lines if line.shape == lines[0].shape]
        axis.plot(*np.mean(whole, axis=0), color=COLOURS[arm], linewidth=1.9, marker=".", markersize=4, label=label)
    # the first steps would squeeze the rest
    if last:
        room = 0.05 * max(1e-3, max(begin) - min(last))
        axis.set_ylim(min(last) - room, max(begin) + room)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)

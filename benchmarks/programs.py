"""The part of docs/performance.md about layers in programs, from the records of `python -m benchmarks program`."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.bench.program import MODES, against
from onepass.core import files

# later records replace earlier ones of the same program, case and mode
SOURCES = ("program.json", "program_graphs.json", "program_tokens.json")
# the picture: its panels and lines
DRAWN = ("eager", "compiled", "graph")
LINES = {"dense block": "dense", "RoutedBlock": "routed", "RoutedBlock causal": "routed, causal"}
COLOURS = ("#6b7a8f", "#d1495b", "#2e86ab")
TICKS = (4096, 16384, 65536)
# drawn beside the page
PICTURE = "step_over_tokens.png"
_HEAD = """\
## Routed layers in programs
One forward and backward pass, bf16 autocast over fp32 parameters, k = n/16, windows of 128 (the default is 256 now)
([records](../benchmarks/results/h200/raw/program_tokens.json)). Each cell: GPU µs / host µs, and in brackets how many
times as fast a whole step is as the dense layer's in the same mode. The host of this machine is slow and shared: its
times differ by a third from run to run. *graph*: one CUDA graph of the whole step. A causal block takes {least:.0%} to
{most:.0%} less time on the GPU than a `RoutedBlock`.

![A block's training step over the number of tokens](step_over_tokens.png)

"""


def _found(raw: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the records by case, program and mode."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for source in SOURCES:
        _, *records = json.loads((raw / source).read_text(encoding="utf-8"))
        ratios = against(records)
        for i, r in enumerate(records):
            found[r["case"], r["program"], r["mode"]] = {**r, "ratio": ratios.get(i)}
    return found


def picture(raw: Path, path: Path) -> None:
    """Draw the time of a step over the tokens, routed and dense, a panel for each mode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = _found(raw)
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, mode in zip(figure.subplots(1, len(DRAWN), sharey=True), DRAWN, strict=True):
        for (name, shown), colour in zip(LINES.items(), COLOURS, strict=True):
            points = sorted(
                (2 * int(match[1]), r["wall_us"] / 1e3)
                for (case, program, of), r in found.items()
                if program == name and of == mode and (match := re.fullmatch(r"2x(\d+), d 1024", case))
            )
            axes.loglog(*zip(*points, strict=True), marker="o", color=colour, label=shown)
        axes.set_xticks(TICKS, [f"{tokens:,}" for tokens in TICKS], fontsize=8)
        axes.minorticks_off()
        axes.set_title(mode, loc="left", fontsize=10)
        axes.set_xlabel("tokens (2 sequences)", fontsize=9)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("forward + backward, ms", fontsize=9)
    figure.axes[0].set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"], fontsize=8)
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle("A block's training step, d 1024, one of 16 tokens routed, H200", fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    files.write(path, out.getvalue())


def section(raw: Path) -> str:
    """Return the table, a line for each size and layer."""
    found = _found(raw)
    # causal blocks are in the picture and the records
    shown = ("RoutedFeedForward", "RoutedBlock")
    layers = dict.fromkeys((case, name) for case, name, _ in sorted(found, key=_size) if name in shown)
    ratio = [
        causal["gpu_us"] / found[case, "RoutedBlock", mode]["gpu_us"]
        for (case, name, mode), causal in found.items()
        if name == "RoutedBlock causal"
    ]
    lines = ["| tokens | layer | kernels | " + " | ".join(MODES) + " |", "|---|---|---|" + "---|" * len(MODES)]
    for case, name in layers:
        modes = {mode: found.get((case, name, mode)) for mode in MODES}
        kernels = " / ".join(f"{modes[m]['kernels']:.0f}" for m in ("eager", "compiled") if modes[m])  # type: ignore[index]
        lines.append(f"| {case} | `{name}` | {kernels} | " + " | ".join(_cell(modes[m]) for m in MODES) + " |")
    return _HEAD.format(least=1 - max(ratio), most=1 - min(ratio)) + "\n".join(lines) + "\n"


def _size(key: tuple[str, str, str]) -> tuple[int, ...]:
    """Return width, then length of a case such as "2x8192, d 1024"."""
    found = re.findall(r"\d+", key[0])
    return tuple(int(n) for n in (found[-1], *found[:-1]))


def _cell(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "–"
    ratio = "" if record["ratio"] is None else f" ({record['ratio']:.2f}×)"
    return f"{record['gpu_us']:.0f} / {record['host_us']:.0f}{ratio}"

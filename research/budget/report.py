"""Table and picture: for each budget the best model of every family."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from research.budget.runs import FAMILIES, Record, Run, best

NAMES = {
    "dense": "dense", "windows": "windows alone", "global": "windows + global", "experts": "windows + global + experts",
    "routed": "routed block",
}  # fmt: skip
COLOURS = dict(zip(FAMILIES, ("#222a35", "#2f78bd", "#2e8b57", "#c23b22", "#c9962b"), strict=True))
TASKS = {"next": "next byte", "hidden": "hidden bytes"}
RANGE = 0.6  # bits above the lowest that a panel shows
Pairs = Sequence[tuple[Run, Record]]


def table(records: Pairs) -> str:
    """Return the leaders of every budget as Markdown, and under it every run."""
    measured = [record for _, record in records if "bits" in record]
    about = "; ".join(
        words + " or ".join(sorted({str(record[name]) for record in measured}))
        for name, words in (("card", ""), ("torch", "torch "), ("text", "text "), ("date", ""))
    )
    heads = ["task", "in view", "seconds", "family", "bits per byte", "behind", "model", "runs", *_HEADS]
    lines = ["# The best model for a budget of seconds", "", about, "", *_heading(heads)]
    for (task, n, seconds), families in best(records).items():
        means = {family: float(np.mean([r["bits"] for _, r in pairs])) for family, pairs in families.items()}
        for family, pairs in families.items():
            behind = means[family] - min(means.values())
            bits = _spread([record["bits"] for _, record in pairs])
            cells = [TASKS[task], f"{n:,}", f"{seconds:g}", NAMES[family], bits if behind else f"**{bits}**"]
            cells += [f"{behind:.3f}" if behind else "", _model(pairs[0][0]), str(len(pairs)), *_numbers(pairs)]
            lines.append(_line(cells))
    heads = ["task", "in view", "seconds", "family", "bits per byte", "model", "seed", *_HEADS]
    lines += ["", *_heading(heads)]
    order = sorted(records, key=lambda p: (p[0].task == "hidden", p[0].n, p[0].seconds, p[1].get("bits", np.inf)))
    for run, record in order:
        first = [TASKS[run.task], f"{run.n:,}", f"{run.seconds:g}", NAMES[run.family]]
        if "bits" in record:
            numbers = _numbers([(run, record)])
            lines.append(_line([*first, f"{record['bits']:.4f}", _model(run), str(run.seed), *numbers]))
        else:
            lines.append(_line([*first, "failed", _model(run), str(run.seed), record["error"].replace("|", "/")[:80]]))
    return "\n".join(lines) + "\n"


_HEADS = ("ms a step", "steps", "million weights", "MiB")


def _spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds."""
    mean = f"{np.mean(values):.4f}"
    return f"{mean} ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else mean


def _model(run: Run) -> str:
    """Return the options of a run that no other cell tells, and always width, depth and rate."""
    elsewhere = ("width", "depth", "rate", "task", "n", "seconds", "seed")
    words = [word for word in run.words() if word.partition("=")[0] not in elsewhere]
    return f"d {run.width}, {run.depth} blocks, rate {run.rate:g}" + "".join(f", {word}" for word in words)


def _numbers(pairs: Pairs) -> list[str]:
    shapes = (("ms", 1.0, ".2f"), ("steps", 1.0, ",.0f"), ("parameters", 1e6, ".1f"), ("peak_mib", 1.0, ",.0f"))
    return [f"{np.mean([record[name] for _, record in pairs]) / by:{shape}}" for name, by, shape in shapes]


def _heading(cells: Sequence[str]) -> list[str]:
    return [_line(cells), "|---" * len(cells) + "|"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def png(records: Pairs) -> bytes:
    """Draw a panel for each task and length of several budgets: every run, a line through each family's best."""
    leaders = best(records)
    places = [key[:2] for key in leaders]
    panels = [place for place in dict.fromkeys(places) if places.count(place) > 1] or places[:1]
    chart = Figure(figsize=(max(6.0, 5.0 * len(panels)), 4.0), layout="constrained")
    axes = chart.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        low = min(record["bits"] for run, record in records if (run.task, run.n) == panel and "bits" in record)
        for family, colour in COLOURS.items():
            for run, record in records:
                if (run.task, run.n, run.family) == (*panel, family) and "bits" in record:
                    axis.plot(run.seconds, record["bits"], ".", color=colour, markersize=4, alpha=0.4)
            line = [
                (key[2], np.mean([record["bits"] for _, record in families[family]]))
                for key, families in leaders.items()
                if key[:2] == panel and family in families
            ]
            if line:
                axis.plot(*zip(*line, strict=True), "o-", color=colour, linewidth=1.9, label=NAMES[family])
        axis.set_ylim(low - 0.03, low + RANGE)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 6)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(f"{TASKS[panel[0]]}, {panel[1]:,} in view", loc="left", fontsize=10)
        axis.set_xlabel("seconds of training")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("validation bits per byte")
    FigureCanvasAgg(chart)
    out = io.BytesIO()
    chart.savefig(out, format="png", dpi=110)
    return out.getvalue()

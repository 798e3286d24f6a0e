"""Tables and picture, made of the records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research.ablate.equal.records import ARMS, NAMES, PATTERN, SETTING, Record, Seeds, load, pairs
from research.ablate.tables import spread

WANTED = 3  # times the spread of the paired differences, to be called ahead
PICTURE = "equal_time.png"

_SHAPE = "tokens in view | d | routed: window, share, light"


def here(folder: Path) -> bool:
    """Return whether a directory has records of runs at equal time."""
    return any(folder.glob(PATTERN))


def write(folder: Path) -> int:
    """Write tables and picture beside the records; show the tables."""
    from onepass.train.commands import files
    from onepass.train.progress import say

    from .picture import png

    runs = load(folder)
    text = f"# Routed against dense at equal time\n\n{tables(runs)}"
    files.write(folder / "equal_time.md", text)
    if found := pairs(runs):
        files.write(folder / PICTURE, png(found))
    for line in text.splitlines():
        say(line)
    return 0


def tables(runs: Sequence[Record]) -> str:
    """Return all tables as Markdown."""
    found = pairs(runs)
    lines = [*_about(runs)]
    if found:
        lines += ["", *_results(found), "", *_speeds(found)]
    if tried := _tried(runs):
        lines += ["", *tried]
    return "\n".join(lines) + "\n"


def time_to(curve: Sequence[dict[str, Any]], bits: float) -> float | None:
    """Return the seconds after which a curve is first at or below `bits`, by straight lines between its points."""
    before = None
    for point in curve:
        if point["bits"] <= bits:
            if before is None:
                return float(point["seconds"])
            share = (before["bits"] - bits) / (before["bits"] - point["bits"])
            return float(before["seconds"] + share * (point["seconds"] - before["seconds"]))
        before = point
    return None


def ahead(seeds: Seeds) -> tuple[float, float]:
    """Return dense − routed in bits, paired by seed: its mean and its standard deviation (NaN of one seed)."""
    differences = [arms["dense"]["final"]["bits"] - arms["learned"]["final"]["bits"] for arms in seeds.values()]
    return float(np.mean(differences)), float(np.std(differences, ddof=1)) if len(differences) > 1 else float("nan")


def _about(runs: Sequence[Record]) -> list[str]:
    told = []
    for name, words in (("device", ""), ("torch", "torch "), ("data", "data ")):
        told.append(words + " or ".join(sorted({str(run[name]) for run in runs})))
    sizes = sorted({(run["dim"], run["blocks"]) for run in runs})
    return [", ".join(told) + "; " + ", ".join(f"d {dim} with {blocks} blocks" for dim, blocks in sizes)]


def _row(name: tuple[Any, ...]) -> str:
    """Return the first cells of a row; `name` begins with task, n and dim, and ends with the setting."""
    task, n, dim, *_, window, k, light = name
    return f"{NAMES.get(task, task)} | {n:,} | {dim:,} | {window:,}; {k:g}; {light:g}·d"


def _results(found: dict[tuple[Any, ...], Seeds]) -> list[str]:
    """Return a line for each pair."""
    last = ["dense − routed", "routed at dense's last loss", "dense at routed's"]
    heads = ["task", _SHAPE, "seeds", "routed, bits per byte", "dense", "ahead", *last]
    lines = [f"| {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for name, seeds in found.items():
        bits = {arm: [arms[arm]["final"]["bits"] for arms in seeds.values()] for arm in ARMS}
        mean, deviation = ahead(seeds)
        differences = [dense - routed for routed, dense in zip(bits["learned"], bits["dense"], strict=True)]
        cells = [_row(name), str(len(seeds)), spread(bits["learned"]), spread(bits["dense"]), _verdict(mean, deviation)]
        cells += [spread(differences), _reached(seeds, "learned", "dense"), _reached(seeds, "dense", "learned")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _verdict(mean: float, deviation: float) -> str:
    if not math.isfinite(mean):
        return "a run diverged"
    if not deviation > 0:
        return f"{'routed' if mean > 0 else 'dense'}, no spread"
    times = f"{abs(mean) / deviation:.1f} × the spread"
    leader = "routed" if mean > 0 else "dense"
    return f"**{leader}**, {times}" if abs(mean) > WANTED * deviation else f"level ({leader} by {times})"


def _reached(seeds: Seeds, arm: str, other: str) -> str:
    """Tell after which share of its time, and seconds, one arm's curve is at the other's last loss."""
    found = [(time_to(arms[arm]["curve"], arms[other]["curve"][-1]["bits"]), arms[arm]) for arms in seeds.values()]
    times = [(seconds, run["seconds"]) for seconds, run in found if seconds is not None]
    if not times:
        return "never"
    share = np.mean([seconds / whole for seconds, whole in times])
    some = "" if len(times) == len(found) else f", in {len(times)} of {len(found)}"
    return f"{100 * share:.0f} % ({np.mean([seconds for seconds, _ in times]):.1f} s){some}"


def _speeds(found: dict[tuple[Any, ...], Seeds]) -> list[str]:
    head = f"| task | {_SHAPE} | sequences a step | seconds: routed, dense | steps | ms a step | parameters |"
    lines = [f"{head} learning rate | dense's attention |", "|---" * 11 + "|"]
    for name, seeds in found.items():
        arms = {arm: [one[arm] for one in seeds.values()] for arm in ARMS}
        cells = [_row(name), f"{arms['learned'][0]['batch']}"]
        for field, digits in (("seconds", ".1f"), ("steps", ",.0f"), ("ms_per_step", ".2f"), ("parameters", ",.0f")):
            cells.append("; ".join(f"{np.mean([run[field] for run in runs]):{digits}}" for runs in arms.values()))
        cells.append("; ".join(" or ".join(f"{lr:g}" for lr in sorted({r["lr"] for r in rs})) for rs in arms.values()))
        kinds = {(str(run.get("attention") or "torch's choice"), bool(run.get("compiled"))) for run in arms["dense"]}
        cells.append(" or ".join(f"{kind}{', compiled' * compiled}" for kind, compiled in sorted(kinds)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _tried(runs: Sequence[Record]) -> list[str]:
    rows: dict[tuple[Any, ...], dict[float, float]] = {}
    for run in runs:
        if run["kind"] == "tune":
            name = (run["task"], run["n"], run["dim"], *(run[part] for part in SETTING), run["arm"])
            rows.setdefault(name, {})[run["lr"]] = run["final"]["bits"]
    if not rows:
        return []
    lines = [f"| rates tried | {_SHAPE} | arm | bits per byte after a third of the time |", "|---" * 6 + "|"]
    for (*shape, arm), bits in sorted(rows.items()):
        best = min(bits.values())
        each = ", ".join(
            f"{lr:g}: {'**' * (bits[lr] == best)}{bits[lr]:.4f}{'**' * (bits[lr] == best)}" for lr in sorted(bits)
        )
        edge = " (best at the edge)" if len(bits) > 1 and best in (bits[min(bits)], bits[max(bits)]) else ""
        lines.append(f"| {_row(tuple(shape))} | {'routed' if arm == 'learned' else arm} | {each}{edge} |")
    return lines

"""Tables of what `research.ablate` left in a directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onepass.train.commands.errors import UserError

ORDER = ("learned", "random", "oracle", "light", "dense", "all")
GAP = 0.8  # share of the gap between random and oracle that a learned router must close
Record = dict[str, Any]


def load(folder: Path) -> list[Record]:
    """Read all records of a directory, sorted by task, arm and seed."""
    records = []
    for path in sorted(folder.glob("*.*.*.json")):
        try:
            record = json.loads(path.read_text())
            records.append((record["task"], ORDER.index(record["arm"]), record["seed"], record))
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{path} is no record of `research.ablate`; move it away") from None
    return [one[-1] for one in sorted(records, key=lambda one: one[:3])]


def figure(record: Record) -> str:
    """Name the figure that decides a task."""
    return "bits" if record["task"].startswith("text") else "loss"


def by_arm(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """Group one task's records: arm → seed → record."""
    arms: dict[str, dict[int, Record]] = {}
    for record in records:
        arms.setdefault(record["arm"], {})[record["seed"]] = record
    return arms


def final(records: dict[int, Record], name: str) -> dict[int, float]:
    """One final figure of an arm, by seed, where it was measured."""
    return {seed: one["final"][name] for seed, one in records.items() if name in one["final"]}


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean ± standard deviation over seeds."""
    if len(values) < 2:
        return f"{np.mean(values):.{digits}f}"
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def gap_closed(arms: dict[str, dict[int, Record]]) -> dict[int, float]:
    """(random − learned) / (random − oracle) of the final losses, by seed."""
    learned, chance, oracle = (final(arms.get(arm, {}), "loss") for arm in ("learned", "random", "oracle"))
    both = [seed for seed in learned if seed in chance and seed in oracle]
    return {seed: (chance[seed] - learned[seed]) / (chance[seed] - oracle[seed]) for seed in both}


def markdown(records: Sequence[Record]) -> str:
    """All tasks: final figures, paired differences, what the routers chose."""
    parts = ["# Who chooses the tokens of the heavy branch?", ""]
    for task in sorted({record["task"] for record in records}):
        parts += [*_task([record for record in records if record["task"] == task]), ""]
    return "\n".join(parts)


def _task(records: list[Record]) -> list[str]:
    arms, what, first = by_arm(records), figure(records[0]), records[0]
    size = ", ".join(f"{name} {value}" for name, value in first["size"].items())
    unit = "validation bits per byte" if what == "bits" else "loss on new tokens"
    lines = [f"## {first['task']}", "", f"{first['device']}, torch {first['torch']}; {size}", ""]
    chosen = any("picked" in one["final"] for one in records)
    extra = " planted tokens chosen, first → last measurement |" if chosen else ""
    lines += [f"| arm | seeds | {unit} |{extra} steps | ms a step | parameters |", "|---" * (6 + chosen) + "|"]
    for arm, runs in arms.items():
        some = list(runs.values())
        done = sorted({one["steps_done"] for one in some})
        steps = f"{done[0]:,}" if len(done) == 1 else f"{done[0]:,} to {done[-1]:,}"
        speed = f"{np.median([one['ms_per_step'] for one in some]):.2f}"
        cells = [arm, str(len(runs)), spread(list(final(runs, what).values()))]
        cells += [_picked(some)] * chosen + [steps, speed, f"{some[0]['parameters']:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    if dense := next(iter(arms.get("dense", {}).values()), {}).get("dense"):
        note = "; no narrower one is as fast as the learned arm" if dense["slower"] else ""
        times = ", ".join(f"{arm} {ms:.2f}" for arm, ms in dense["ms"].items())
        width = f"Dense has {dense['hidden']:,} hidden units{note}."
        lines += ["", f"Where the dense width was looked for, a step took (ms): {times}. {width}"]
    lines += _paired(arms, what)
    if gaps := gap_closed(arms):
        each = ", ".join(f"{100 * gap:.0f} %" for gap in gaps.values())
        mean = f"{100 * np.mean(list(gaps.values())):.0f} %"
        wanted = f"wanted: ≥ {100 * GAP:.0f} %"
        lines += ["", f"Gap between random and oracle closed by learned: **{mean}** (by seed: {each}; {wanted})."]
    return lines + _choices(arms)


def _picked(runs: list[Record]) -> str:
    if "picked" not in runs[0]["final"]:
        return ""
    begin = np.mean([run["curve"][0]["picked"] for run in runs])
    end = np.mean([run["final"]["picked"] for run in runs])
    return f"{100 * begin:.1f} % → {100 * end:.1f} %"


def _paired(arms: dict[str, dict[int, Record]], what: str) -> list[str]:
    """How much lower learned is than each other arm, seed by seed."""
    learned = final(arms.get("learned", {}), what)
    rows = []
    for arm, runs in arms.items():
        other = final(runs, what)
        differences = [other[seed] - learned[seed] for seed in learned if seed in other]
        if arm != "learned" and differences:
            wins = sum(difference > 0 for difference in differences)
            seeds = len(differences)
            error = f"{np.std(differences, ddof=1) / seeds**0.5:.4f}" if seeds > 1 else "–"
            rows.append(f"| {arm} − learned | {spread(differences)} | {error} | {wins} of {seeds} |")
    if not rows:
        return []
    head = "| paired by seed | mean ± spread of the differences | standard error | learned is lower |"
    return ["", head, "|---|---|---|---|", *rows]


def _choices(arms: dict[str, dict[int, Record]]) -> list[str]:
    """What the routers of a text task chose, at the first and the last measurement."""
    lines: list[str] = []
    names = {
        "chosen": "share of all bytes",
        "of_masked": "share of the masked bytes",
        "entropy": "bytes' entropy (bits)",
        "kept": "kept since the measurement before",
        "shared": "shared with the block before",
    }
    for role, title in {"q": "queries", "kv": "keys and values", "ff": "feed-forward"}.items():
        for arm in ("learned", "random"):
            runs = list(arms.get(arm, {}).values())
            if not runs or f"{role}_entropy" not in runs[0]["final"]:
                continue
            cells = []
            for name in names:
                key = f"{role}_{name}"
                begin = [next((p[key] for p in one["curve"] if key in p), float("nan")) for one in runs]
                end = [one["final"].get(key, float("nan")) for one in runs]
                cells.append("" if np.isnan(end).all() else f"{np.mean(begin):.3f} → {np.mean(end):.3f}")
            lines.append(f"| {title}, {arm} | {' | '.join(cells)} |")
    if not lines:
        return []
    head = f"| choices, first → last measurement | {' | '.join(names.values())} |"
    return ["", head, "|---|" + "---|" * len(names), *lines]

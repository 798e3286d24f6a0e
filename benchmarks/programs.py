"""The part of docs/performance.md about layers in programs, from records that results/README.md names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODES = ("eager", "compiled", "reduce-overhead", "graph")
# later records replace earlier ones of the same program, case and mode
SOURCES = ("program.json", "program_graphs.json", "program_tokens.json")
_HEAD = """\
## Routed layers in programs
One forward and backward pass, bf16 autocast over fp32 parameters, k = n/16, windows of 128 (the default is 256 now)
([records](h200/raw/program_tokens.json)). Each cell: GPU µs / host µs, and in brackets how many
times as fast a whole step is as the dense layer's in the same mode. The host of this machine is slow and shared: its
times differ by a third from run to run. *graph*: one CUDA graph of the whole step. A causal block takes {least:.0%} to
{most:.0%} less time on the GPU than a `RoutedBlock`.

![A block's training step over the number of tokens](../../docs/step_over_tokens.png)

"""


def _against(found: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return, by index of the record, the base's step time over the program's, in the same case and mode."""
    times = {(r["program"], r["case"], r["mode"]): r["wall_us"] for r in found}
    bases = ((i, r, times.get((r["base"], r["case"], r["mode"]))) for i, r in enumerate(found))
    return {i: base / r["wall_us"] for i, r, base in bases if base is not None}


def _found(raw: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the records by case, program and mode."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for source in SOURCES:
        _, *records = json.loads((raw / source).read_text(encoding="utf-8"))
        ratios = _against(records)
        for i, r in enumerate(records):
            found[r["case"], r["program"], r["mode"]] = {**r, "ratio": ratios.get(i)}
    return found


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

"""The part of docs/performance.md about layers in programs, from the records of `onepass bench program`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onepass.bench.program import MODES, against

# later records replace earlier ones of the same program, case and mode
SOURCES = ("program.json", "program_graphs.json")
_HEAD = """\
## Routed layers in programs
One forward and backward pass, bf16 autocast over fp32 parameters, k = n/16
([records](../benchmarks/results/h200/raw/program.json)). Each cell: GPU µs / host µs, and in brackets how many times as
fast a whole step is as the dense layer's in the same mode. The host of this machine is slow and shared: its times
differ by a third from run to run. *graph*: one CUDA graph of the whole step.

"""


def section(raw: Path) -> str:
    """Return the table, a line for each size and layer."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for source in SOURCES:
        _, *records = json.loads((raw / source).read_text(encoding="utf-8"))
        ratios = against(records)
        for i, r in enumerate(records):
            found[r["case"], r["program"], r["mode"]] = {**r, "ratio": ratios.get(i)}
    layers = dict.fromkeys((case, name) for case, name, _ in found if name.startswith("Routed"))
    lines = ["| tokens | layer | kernels | " + " | ".join(MODES) + " |", "|---|---|---|" + "---|" * len(MODES)]
    for case, name in layers:
        modes = {mode: found.get((case, name, mode)) for mode in MODES}
        kernels = " / ".join(f"{modes[m]['kernels']:.0f}" for m in ("eager", "compiled") if modes[m])  # type: ignore[index]
        lines.append(f"| {case} | `{name}` | {kernels} | " + " | ".join(_cell(modes[m]) for m in MODES) + " |")
    return _HEAD + "\n".join(lines) + "\n"


def _cell(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "–"
    ratio = "" if record["ratio"] is None else f" ({record['ratio']:.2f}×)"
    return f"{record['gpu_us']:.0f} / {record['host_us']:.0f}{ratio}"

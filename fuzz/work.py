"""What one process of an attack does: turn after turn through the properties, until the time is up."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from . import attention, commands, files, modules, operators, optimizer, selection, ways
from .engine import Property, Tally, explore

SUITES = (operators, selection, attention, ways, optimizer, modules, files, commands)


def properties() -> list[Property]:
    """Everything that is attacked."""
    return [prop for suite in SUITES for prop in suite.PROPERTIES]


def settle(device: str) -> None:
    """One thread a process; on a GPU fp32 products stay fp32."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.config.cache_size_limit = 10_000
    if device == "interpret":
        torch.set_num_interop_threads(1)
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        import interpreter

        interpreter.patch_once_per_launch()
        interpreter.reduce_by_halves()


def here(device: str, only: list[str] | None) -> tuple[list[Property], dict[str, str]]:
    """What is attacked on this device, and what is left out and why."""
    wanted = [p for p in properties() if not only or any(text in p.name for text in only)]
    chosen = [p for p in wanted if device in p.devices]
    left_out = {p.name: why for p in chosen if (why := p.lacks())}
    left_out |= {p.name: f"has no meaning on {device}" for p in wanted if device not in p.devices}
    return [p for p in chosen if p.name not in left_out], left_out


def work(folder: Path, device: str, seconds: float, seed: int, only: list[str] | None) -> int:
    """Attack until the time is up; leave result.json, written anew after every turn."""
    settle(device)
    chosen, left_out = here(device, only)
    tally, broken, draw = Tally(), {}, random.Random(seed)
    deadline = time.monotonic() + seconds
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while chosen and (time.monotonic() < deadline or not tally.tried):
            # what had the least time for its share goes next; equals in an order of the seed
            prop = min(chosen, key=lambda p: (tally.seconds[p.name] / p.share, draw.random()))
            try:
                explore(prop, device, draw.randrange(2**63), tally, deadline, folder / "now.json")
            except RuntimeError as error:
                broken[prop.name] = str(error)[:1000]
                chosen.remove(prop)
            _write(folder, tally, left_out, broken)
            if any("CUDA error" in f["message"] for f in tally.findings.values()):
                # the context is lost: whatever follows would fail as well
                return 3
    except KeyboardInterrupt:
        pass
    _write(folder, tally, left_out, broken)
    return 0


def _write(folder: Path, tally: Tally, left_out: dict[str, str], broken: dict[str, str]) -> None:
    counts = {
        name: {"cases": n, "outside": tally.skipped[name], "seconds": tally.seconds[name]}
        for name, n in tally.tried.items()
    }
    findings: list[dict[str, Any]] = [
        {**finding, "times": 1 + tally.again[signature]} for signature, finding in tally.findings.items()
    ]
    result = {"counts": counts, "left_out": left_out, "broken": broken, "findings": findings}
    partial = folder / "result.partial"
    partial.write_text(json.dumps(result, default=str))
    partial.replace(folder / "result.json")

"""One run of the bench: time a copy, measure every case, print it, save records as they come."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import Case
from onepass.core.about import device_name, distribution_version, dtype_name, settings, versions
from onepass.train.progress import say

from . import records, runner
from .timers import Timer


def installed(rivals: Mapping[str, str]) -> dict[str, str]:
    """Return {distribution: version} of the installed rivals."""
    return {
        distribution: distribution_version(distribution) or "unknown version"
        for module, distribution in rivals.items()
        if importlib.util.find_spec(module.partition(".")[0]) is not None
    }


def line(result: runner.Result, copy_gbps: float, fastest_us: float | None) -> str:
    """Return the line that is printed for a result, with its ratio to the fastest rival of its case."""
    if result.us is None:
        return f"  {result.impl}  {result.status}: {result.note}"
    gbps = records.gbps(result)
    parts = [f"{result.us:.1f} µs", f"{gbps:.0f} GB/s", f"{100 * gbps / copy_gbps:.0f} % of copy"]
    if result.host_us is not None:
        parts.append(f"{result.host_us:.1f} µs {'warm' if result.case.device == 'cpu' else 'of the host'}")
    if result.peak is not None:
        parts.append(f"{result.peak / 2**20:.1f} MiB")
    parts += [] if fastest_us is None else [f"{fastest_us / result.us:.2f}× fastest rival"]
    parts += [] if result.error is None else [f"error {result.error:.1e}"]
    parts += [] if result.status == runner.OK else [f"{result.status}: {result.note}"]
    return f"  {result.impl}  {', '.join(parts)}"


def json_path(target: Path, folder: str) -> Path:
    """Return the file for a folder's records: target itself, or <folder>.json in it if target is a directory."""
    return target / f"{folder}.json" if target.is_dir() or not target.suffix else target


class Session:
    """Measure cases, print and write them to `json`; `known` is {import name: distribution} of the rivals."""

    def __init__(
        self, cases: Sequence[tuple[str, Case]], device: str, known: Mapping[str, str], json: Path | None = None, *,
        compile: bool = True, limit_s: float = 0.0,
    ) -> None:  # fmt: skip
        # operator by operator, then by dtype and pass
        self.cases = sorted(cases, key=lambda fc: (fc[0], fc[1].op, str(fc[1].dtype), runner.STAGES.index(fc[1].stage)))
        self.json, self.known = json, known
        self.compile = compile
        self.limit_s = limit_s
        self.about: dict[str, Any] = {
            **versions(),
            "device": device,
            "gpu": device_name(torch.device(device)),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "settings": settings(),
            "rivals": installed(known),
        }
        self.copy_gbps = 0.0
        self.results: list[runner.Result] = []

    def save(self, complete: bool) -> list[Path]:
        """Write the results so far, if there is a target; return the files."""
        if self.json is None:
            return []
        by_path: dict[Path, list[runner.Result]] = {}
        for result in self.results:
            by_path.setdefault(json_path(self.json, result.folder), []).append(result)
        for path, results in by_path.items():
            records.write(path, records.document(self.about, results, self.copy_gbps, complete=complete))
        return [*by_path]

    def _finish(self, case: Case) -> None:
        """Print the results of a case, except missing and skipped rivals, and save all results so far."""
        results = [r for r in self.results if r.case is case]
        rivals = [r.us for r in results if r.status == runner.OK and runner.is_rival(r.impl) and r.us is not None]
        say(f"{case.op} {case.stage} {dtype_name(case.dtype)} {runner.label(case.params)}")
        for result in results:
            if result.status not in (runner.MISSING, runner.SKIPPED):
                say(line(result, self.copy_gbps, min(rivals, default=None)))
        self.save(complete=False)

    def _measure(self, timer: Timer) -> str:
        """Measure everything; return why it stopped early, or an empty string."""
        why = ""
        try:
            for result in runner.run(self.cases, timer, compile=self.compile, limit_s=self.limit_s):
                if self.results and self.results[-1].case is not result.case:
                    self._finish(self.results[-1].case)
                self.results.append(result)
        except runner.DeviceLostError as error:
            why = str(error)
        except KeyboardInterrupt:
            self.save(complete=False)
            raise
        if self.results:
            self._finish(self.results[-1].case)
        return why

    def run(self, timer: Timer) -> int:
        """Measure, print and save everything; return 1 if an implementation of ours failed or the device was lost."""
        if self.json is not None:
            for folder in dict.fromkeys(f for f, _ in self.cases):
                records.check_writable(json_path(self.json, folder))
        self.copy_gbps = timer.copy_gbps()
        say(f"{self.about['gpu']}: copy {self.copy_gbps:.0f} GB/s (bytes read + written)")
        lost = self._measure(timer)
        missing = {(r.impl, r.note) for r in self.results if r.status == runner.MISSING}
        absent = sorted(f"{impl} (needs {self.known.get(module, module)})" for impl, module in missing)
        if absent:
            say(f"skipped: {', '.join(absent)}")
        slow = sorted(self.results, key=lambda r: -r.seconds)[:5]
        if slow and slow[0].seconds > 2:
            text = ", ".join(f"{r.impl} at {r.case.op} {runner.label(r.case.params)} {r.seconds:.0f} s" for r in slow)
            say(f"{sum(r.seconds for r in self.results):.0f} s in all; longest: {text}")
        for path in self.save(complete=not lost):
            say(f"wrote {path}")
        if lost:
            say(f"stopped: {lost}")
        broken = any(r.impl == runner.OURS and r.status != runner.OK for r in self.results)
        return 1 if lost or broken else 0

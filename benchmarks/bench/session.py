"""One run of the bench: time a copy, measure every case, print finished tables, save records as they come."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from benchmarks.case import Case
from onepass.core.about import device_name, distribution_version, dtype_name, settings, versions

from . import records, runner, table
from .timers import Timer


def installed(rivals: Mapping[str, str]) -> dict[str, str]:
    """Return {distribution: version} of the installed rivals."""
    return {
        distribution: distribution_version(distribution) or "unknown version"
        for module, distribution in rivals.items()
        if importlib.util.find_spec(module.partition(".")[0]) is not None
    }


def json_path(target: Path, folder: str) -> Path:
    """Return the file for a folder's records: target itself, or <folder>.json in it if target is a directory."""
    return target / f"{folder}.json" if target.is_dir() or not target.suffix else target


class Session:
    """Measure cases, show them and write them to `json`; `known` is {import name: distribution} of the rivals."""

    def __init__(
        self,
        cases: Sequence[tuple[str, Case]],
        device: str,
        known: Mapping[str, str],
        console: Console,
        json: Path | None = None,
        *,
        compile: bool = True,
        limit_s: float = 0.0,
    ) -> None:
        # sort by table: operator, dtype and pass
        self.cases = sorted(cases, key=lambda fc: (fc[0], fc[1].op, str(fc[1].dtype), runner.STAGES.index(fc[1].stage)))
        self.console = console
        self.json = json
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
        self._shown = 0

    def save(self, complete: bool) -> list[Path]:
        """Write the results so far, if there is a target; return the files."""
        if self.json is None:
            return []
        found: dict[Path, list[runner.Result]] = {}
        for result in self.results:
            found.setdefault(json_path(self.json, result.folder), []).append(result)
        for path, results in found.items():
            records.write(path, records.document(self.about, results, self.copy_gbps, complete=complete))
        return [*found]

    def _show(self, final: bool) -> None:
        groups = [list(g) for _, g in groupby(self.results[self._shown :], key=table.group_key)]
        for group in groups if final else groups[:-1]:
            self.console.print(table.table(group, self.copy_gbps))
            self._shown += len(group)

    def _measure(self, timer: Timer) -> str:
        """Measure everything; return why it stopped early, or an empty string."""
        done = 0
        # no spinner: its thread would slow the calls whose host time is measured
        with Live(console=self.console, auto_refresh=False, transient=True) as live:

            def started(case: Case, impl: str) -> None:
                where = f"{case.op} {case.stage} {dtype_name(case.dtype)} {runner.label(case.params)}"
                live.update(Text(f"{done}/{len(self.cases)} cases · {where} · {impl}", "dim"), refresh=True)

            try:
                for result in runner.run(
                    self.cases, timer, compile=self.compile, limit_s=self.limit_s, started=started
                ):
                    if self.results and self.results[-1].case is not result.case:
                        done += 1
                        self.save(complete=False)
                    self.results.append(result)
                    self._show(final=False)
            except runner.DeviceLostError as error:
                return str(error)
            except KeyboardInterrupt:
                self.save(complete=False)
                raise
        return ""

    def run(self, timer: Timer) -> int:
        """Measure, print and save everything; return 1 if an implementation of ours failed or the device was lost."""
        if self.json is not None:
            for folder in dict.fromkeys(f for f, _ in self.cases):
                records.check_writable(json_path(self.json, folder))
        self.copy_gbps = timer.copy_gbps()
        print_ = self.console.print
        print_(f"{self.about['gpu']}: copy {self.copy_gbps:.0f} GB/s (bytes read + written)", markup=False)
        lost = self._measure(timer)
        self._show(final=True)
        absent = sorted({f"{r.impl} (needs {r.note})" for r in self.results if r.status == runner.MISSING})
        if absent:
            print_(f"skipped: {', '.join(absent)}", markup=False)
        slow = sorted(self.results, key=lambda r: -r.seconds)[:5]
        if slow and slow[0].seconds > 2:
            told = ", ".join(f"{r.impl} at {r.case.op} {runner.label(r.case.params)} {r.seconds:.0f} s" for r in slow)
            print_(f"{sum(r.seconds for r in self.results):.0f} s in all; longest: {told}", style="dim", markup=False)
        for path in self.save(complete=not lost):
            print_(f"wrote {path}", markup=False, soft_wrap=True)
        if lost:
            print_(f"stopped: {lost}", style="red", markup=False)
        broken = any(r.impl == runner.OURS and r.status != runner.OK for r in self.results)
        return 1 if lost or broken else 0

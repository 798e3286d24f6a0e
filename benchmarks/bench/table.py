"""Tables of results for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from onepass.core.about import dtype_name

from .records import gbps
from .runner import FAILED, MISSING, OK, OURS, SKIPPED, Result, is_rival, label


def fastest_rival(results: Sequence[Result]) -> float | None:
    """Return the time of the fastest rival that agrees with ours, or None."""
    times = [r.us for r in results if r.status == OK and is_rival(r.impl) and r.us is not None]
    return min(times, default=None)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _row(result: Result, copy_gbps: float, rival_us: float | None) -> list[str]:
    if result.us is None:
        style = "red" if result.status == FAILED else "dim"
        return ["–", "–", "–", "–", "–", f"[{style}]{escape(f'{result.status}: {result.note}')}[/]"]
    ratio = "" if rival_us is None else f"{rival_us / result.us:.2f}×"
    if result.status != OK:
        ratio = f"[red]{escape(f'{result.status}: {result.note}')}[/]"
    return [
        f"{result.us:.1f}",
        _number(gbps(result)),
        _number(100 * gbps(result) / copy_gbps),
        "–" if result.host_us is None else f"{result.host_us:.1f}",
        "–" if result.peak is None else _number(result.peak / 2**20),
        ratio,
    ]


def group_key(result: Result) -> tuple[str, str, str]:
    """Return the operator, pass and dtype of a result: one table holds one such group."""
    return result.case.op, result.case.stage, dtype_name(result.case.dtype)


def table(results: Sequence[Result], copy_gbps: float) -> Table:
    """Return the table of one operator, pass and dtype, with failures, without skipped and missing rivals."""
    shown = Table(title=" · ".join(group_key(results[0])), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("case", "implementation"):
        shown.add_column(name, no_wrap=True)
    host = "warm µs" if results[0].case.device == "cpu" else "host µs"
    for name in ("µs", "GB/s", "% of copy", host, "peak MiB"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("× rival", overflow="fold", min_width=7)
    defined = any(r.error is not None for r in results)
    if defined:
        shown.add_column("error", justify="right", no_wrap=True)
    cases: dict[str, list[Result]] = {}
    for result in results:
        cases.setdefault(label(result.case.params), []).append(result)
    for name, found in cases.items():
        rival_us = fastest_rival(found)
        visible = [r for r in found if r.status not in (MISSING, SKIPPED)]
        for i, result in enumerate(visible):
            style = "bold" if result.impl == OURS else None
            row = _row(result, copy_gbps, rival_us)
            row += ["" if result.error is None else f"{result.error:.1e}"] if defined else []
            shown.add_row(escape(name) if i == 0 else "", escape(result.impl), *row, style=style)
    return shown

"""A time against what memory allows: bytes at the operator's floor over time, and over a copy of the same run."""

from __future__ import annotations


def gbps(floor_bytes: int, us: float) -> float:
    """10⁹ bytes per second at the fewest bytes that must move."""
    return floor_bytes / us / 1e3


def copy_pct(floor_bytes: int, us: float, copy_gbps: float) -> float:
    """Share of a copy's bandwidth, in percent; above 100 when caches serve what a copy has to fetch."""
    return 100 * gbps(floor_bytes, us) / copy_gbps


def speedup(us: float, fastest_rival_us: float) -> float:
    """How many times faster than the fastest rival; below 1 when slower."""
    return fastest_rival_us / us

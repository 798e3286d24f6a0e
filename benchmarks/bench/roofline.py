"""A time against the limit of memory: the byte floor over the time, and that over a copy of the same run."""

from __future__ import annotations


def gbps(floor_bytes: int, us: float) -> float:
    """Return the byte floor over the time, in 10⁹ bytes per second."""
    return floor_bytes / us / 1e3


def copy_pct(floor_bytes: int, us: float, copy_gbps: float) -> float:
    """Return the percentage of a copy's bandwidth; above 100 if caches serve what a copy must fetch."""
    return 100 * gbps(floor_bytes, us) / copy_gbps


def speedup(us: float, fastest_rival_us: float) -> float:
    """Return how many times faster than the fastest rival; below 1 means slower."""
    return fastest_rival_us / us

"""Routing over a spread sequence, and balancing its heavy work, on paper: the tables of docs/lab/scale.md.

    python -m benchmarks.spread_model

Nothing here is measured. RATES are assumptions; `benchmarks.scaling` measures what they stand for.
"""

# ruff: noqa: T201

from __future__ import annotations

import math
from typing import NamedTuple

N_TOKENS, DIM, HIDDEN, ITEM = 1_048_576, 1024, 4096, 2
CHOSEN, MEMORIES, INNER, WINDOW = N_TOKENS // 16, N_TOKENS // 8, 512, 128
FLOPS = 400e12  # per second and device, of the heavy branch's products


class Link(NamedTuple):
    """What a device sends per second, and how long an all-to-all of nothing takes."""

    bytes_per_s: float
    latency: float


INSIDE, BETWEEN = Link(450e9, 20e-6), Link(50e9, 50e-6)
RATES = {8: INSIDE, 64: BETWEEN, 1024: BETWEEN}


def anywhere(devices: int) -> float:
    """Return the fullest device's chosen tokens over the mean, if they fall anywhere with equal probability."""
    return 1 + math.sqrt(2 * math.log(devices) * devices / CHOSEN)


def together(devices: int) -> float:
    """Return the same if the chosen tokens stand together: they are on one device, or fill several."""
    return min(devices, N_TOKENS / CHOSEN)


def heavy_time() -> float:
    """Return the time of a heavy feed-forward of one token: two products forward, four backward."""
    return 12 * DIM * HIDDEN / FLOPS


class Balance(NamedTuple):
    """What balancing moves, costs and saves on the fullest device, forward and backward."""

    tokens: int
    trip_bytes: int
    cost: float
    saved: float


def balance(devices: int, imbalance: float) -> Balance:
    """Return what balancing gives: the surplus travels four times, there and back, and so do its gradients."""
    link = RATES[devices]
    tokens = round((imbalance - 1) * CHOSEN / devices)
    trip_bytes = tokens * DIM * ITEM
    return Balance(
        tokens, trip_bytes, 4 * (link.latency + trip_bytes / link.bytes_per_s), tokens * heavy_time()
    )  # fmt: skip


def least_width(link: Link) -> float:
    """Return the hidden width from which a token's heavy work takes longer than its four trips."""
    return ITEM * FLOPS / (3 * link.bytes_per_s)


def tables() -> list[str]:
    """Return the rows of both tables."""
    rows = []
    for devices in RATES:
        scores, windows, memories = 3 * 4 * N_TOKENS, 2 * WINDOW * DIM * ITEM, MEMORIES * 2 * INNER * ITEM
        rows.append(
            f"| {devices} | {scores / 1e6:.1f} MB | {windows / 1e6:.1f} MB | {memories / 1e6:.0f} MB | "
            f"{anywhere(devices):.2f} |"
        )
    for devices in RATES:
        for name, imbalance in (("anywhere", anywhere(devices)), ("together", together(devices))):
            found = balance(devices, imbalance)
            rows.append(
                f"| {devices} | {name} | {imbalance:.2f} | {found.tokens} | {found.trip_bytes / 1e6:.2f} MB | "
                f"{1e6 * found.cost:.0f} µs | {1e6 * found.saved:.0f} µs |"
            )
    return rows


if __name__ == "__main__":
    print("\n".join(tables()))
    print(*(f"pays from a hidden width of {least_width(link):.0f}" for link in (INSIDE, BETWEEN)), sep="\n")

"""Launch shapes of qk_norm_rope."""

from __future__ import annotations

import math
from typing import NamedTuple

from onepass.core.launch import next_power_of_2

# elements of a forward tile, bytes of a backward one: 32 elements per thread, and at most 16
FORWARD_TILE, BACKWARD_BYTES = 4096, 4096
WARPS = 4
# buffers of the software pipeline plus one
BACKWARD_STAGES = 3


class Heads(NamedTuple):
    """Constants of the kernels, in their order: heads of `d` columns, of which `rotary` are rotated, `rows` a tile."""

    d: int
    vec: int
    table_vec: int
    rotary: int
    half: int
    rest: int
    interleaved: bool
    rows: int


def heads(d: int, rotary: int, interleaved: bool, tile: int) -> Heads:
    """Return the constants of a kernel whose tiles have about `tile` elements."""
    return Heads(
        d, math.gcd(8, d), math.gcd(8, rotary // 2), rotary, next_power_of_2(rotary // 2),
        next_power_of_2(d - rotary) if d > rotary else 0, interleaved, max(1, tile // next_power_of_2(d)),
    )  # fmt: skip


def backward_per_sm(heads: Heads) -> int:
    """Return the programs of a multiprocessor: masks and a part that is not rotated take registers, so fewer fit."""
    return 4 if heads.rotary == heads.d and heads.d & (heads.d - 1) == 0 else 3

"""Launch shapes of qk_norm_rope."""

from __future__ import annotations

import math
from typing import NamedTuple

from onepass.core.launch import next_power_of_2

# elements of a forward tile, bytes of a backward one
FORWARD_TILE, BACKWARD_BYTES = 4096, 4096
# buffers of the software pipeline plus one
BACKWARD_STAGES = 3


class Heads(NamedTuple):
    """Constants of the kernels for heads of `d` columns, of which `rotary` are rotated; tiles of `rows` heads.

    The last two are not constants of the kernels: warps, and programs per multiprocessor.
    """

    d: int
    vec: int
    table_vec: int
    rotary: int
    half: int
    rest: int
    interleaved: bool
    rows: int
    warps: int = 4
    per_sm: int = 1

    def constants(self) -> tuple[int, ...]:
        """Return the constants of the kernels, in their order."""
        return self[:8]


def heads(d: int, rotary: int, interleaved: bool, itemsize: int, backward: bool) -> Heads:
    """Return the constants of a kernel: forward has 32 elements per thread, backward at most 16."""
    tile, warps, per_sm = FORWARD_TILE, 4, 1
    if backward:
        # masks and a part that is not rotated take registers: then fewer programs fit
        simple = rotary == d and d & (d - 1) == 0
        tile, warps, per_sm = (BACKWARD_BYTES // itemsize, 4, 4 if simple else 3)
    rest = next_power_of_2(d - rotary) if d > rotary else 0
    half = next_power_of_2(rotary // 2)
    return Heads(
        d,
        math.gcd(8, d),
        math.gcd(8, rotary // 2),
        rotary,
        half,
        rest,
        interleaved,
        max(1, tile // next_power_of_2(d)),
        warps,
        per_sm,
    )

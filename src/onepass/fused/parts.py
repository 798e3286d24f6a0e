"""Which of a row's tokens each device has, needs and computes: numbers alone."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

Range = tuple[int, int]


@lru_cache(64)
def parts(n: int, devices: int) -> list[Range]:
    """Return where the tokens of each device begin and end, as distribute_tensor places them."""
    size = -(-n // devices)
    return [(min(i * size, n), min((i + 1) * size, n)) for i in range(devices)]


def wanted(begin: int, end: int, n: int, window: int, causal: bool, packed: bool = False) -> Range:
    """Return the range of tokens that those from begin to end see: whole windows, one more before, and one after.

    `packed`: windows may begin at any token.
    """
    if begin == end:
        return begin, begin
    if packed:
        most = 2 * window - 1
        return max(0, begin - most), end if causal else min(n, end + most)
    first = max(0, (begin // window - 1) * window)
    return first, end if causal else min(n, (-(-end // window) + 1) * window)


def shared(a: Range, b: Range) -> Range:
    """Return the range that two ranges share, perhaps an empty one."""
    begin = max(a[0], b[0])
    return begin, max(begin, min(a[1], b[1]))


class Edges(NamedTuple):
    """The tokens of other devices that local attention needs here, and who gets which of this device's."""

    left: int  # how many before this device's tokens
    right: int  # how many after them
    given: list[Range]  # of the row, to each device
    taken: list[Range]


@lru_cache(256)
def edges(n: int, devices: int, rank: int, window: int, causal: bool, packed: bool = False) -> Edges:
    """Return which keys of local attention travel to and from device number `rank`."""
    own = parts(n, devices)
    wants = [wanted(*r, n, window, causal, packed) for r in own]
    (begin, end), (first, last) = own[rank], wants[rank]

    def of_others(i: int, a: Range, b: Range) -> Range:
        return (0, 0) if i == rank else shared(a, b)

    given = [of_others(i, own[rank], w) for i, w in enumerate(wants)]
    taken = [of_others(i, r, wants[rank]) for i, r in enumerate(own)]
    return Edges(begin - first, last - end, given, taken)

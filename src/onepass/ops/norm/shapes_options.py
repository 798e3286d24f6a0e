"""Launch shapes of the norms' options: those of plain calls, except where an option changes what limits the kernel."""

from __future__ import annotations

import functools

from onepass.core.launch import next_power_of_2

from . import shapes
from .shapes import WARP, Tile

# columns of a warp whose threads store 16 codes of 8 bits at once
CODED = 16 * WARP


@functools.cache
def forward_tile(n_cols: int, itemsize: int, gated: bool = False, coded: bool = False) -> Tile:
    """Return the tile of `forward_kernel` with options.

    With 8-bit results each thread stores 16 codes at once and holds up to 64 elements: 5 to 8 % faster. A gate
    is as much work as the norm of a narrow row: twice the warps are 9 % faster.
    """
    tile = shapes.forward_tile(n_cols, itemsize)
    if itemsize != 2:
        return tile
    warps = min(4, next_power_of_2(n_cols // 1024)) if n_cols <= 8192 else 8
    if coded and n_cols >= 2048 and n_cols % (CODED * warps) == 0:
        return Tile(rows=1, cols=CODED * warps, warps=warps)
    if gated and tile.rows > 1 and n_cols <= WARP * shapes.vector(itemsize):
        return tile._replace(warps=2 * tile.warps)
    return tile


def forward_early(n_cols: int, has_table: bool) -> bool:
    """Return whether `forward_kernel` reads a table's entries along with x.

    Each row loads its own entry, which takes longer than one weight for all rows. 17 % faster at 1152 columns, as fast
    at 4096, slower at 128, where other rows hide the wait.
    """
    return has_table and 512 < n_cols < 4096


@functools.cache
def backward_tile(
    n_cols: int, itemsize: int, tensors: int, shared_bytes: int, stable: bool = False, sums: int = 2,
    gate_first: bool = False, entries: int = 1, gated: bool = False,
) -> Tile:  # fmt: skip
    """Return the tile of `backward_kernel` with options.

    The entries of a table share the programs: smaller programs leave fewer idle, 6 to 32 % faster. A gate first above
    4096 columns needs the registers of 8 warps: 24 % faster.

    Args:
        n_cols: width of a row.
        itemsize: bytes of an element, the widest of x, dy and the gate.
        tensors: number of tensors that the software pipeline buffers.
        shared_bytes: shared memory of a program.
        stable: see `shapes.backward_tile`.
        sums: how many of dw and db are needed.
        gate_first: the norm is that of x·silu(z).
        entries: of the table of weights; 1: no table.
        gated: there is a gate.
    """
    tile = shapes.backward_tile(n_cols, itemsize, tensors, shared_bytes, stable or gated, sums)
    if itemsize != 2:
        return tile
    if gate_first and 4096 < n_cols <= 8192:
        tile = Tile(1, 4096, 8, 3)
    elif entries > 1 and not gated and 1024 < n_cols <= 1536:
        tile = Tile(1, 512, 2, 4, 4)
    elif entries > 1 and not gated and 3072 < n_cols <= 4096:
        tile = Tile(1, 2048, 8, 3, 2)
    else:
        return tile
    chunks = -(-n_cols // tile.cols)
    buffers = (shared_bytes - 4096) // tile.per_sm // (chunks * tile.cols * itemsize * tensors + 12)
    return tile._replace(stages=1 + max(1, min(tile.stages - 1, buffers)))


__all__ = ["backward_tile", "forward_early", "forward_tile"]

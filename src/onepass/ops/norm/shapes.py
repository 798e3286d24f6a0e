"""Launch shapes of the norm kernels: formulas instead of autotuning, so that no call runs a kernel twice."""

from __future__ import annotations

import functools
from typing import NamedTuple

from onepass.core.launch import cdiv, next_power_of_2

WARP = 32
# beyond these a program can't hold its part of a row in registers, and the `wide_` kernels take over
MAX_FORWARD_COLS = 32768
MAX_BACKWARD_COLS = 8192
# programs of the wide kernels: bytes of a row per step, warps, buffers of the software pipeline plus one
WIDE_BYTES, WIDE_WARPS, WIDE_STAGES = 16384, 16, 3
# two or three of these fit a multiprocessor: one reduces while another loads
SUMS_BYTES, SUMS_WARPS, SUMS_STAGES = 8192, 8, 4
APPLY_COLS, APPLY_WARPS, APPLY_STAGES = 2048, 4, 3
APPLY_PROGRAMS_PER_SM = 4
# share of L2 that a group of rows may fill between the two passes of the wide backward
L2_SHARE = 0.6


class Tile(NamedTuple):
    """Rows and columns of a tile, warps that share it, buffers of the software pipeline plus one, programs per SM."""

    rows: int
    cols: int
    warps: int
    stages: int = 1
    per_sm: int = 1


def vector(itemsize: int) -> int:
    """Elements of a 16-byte load."""
    return max(1, 16 // itemsize)


@functools.cache
def forward_tile(n_cols: int, itemsize: int) -> Tile:
    """Tile of `forward_kernel`: about 32 elements per thread, in chunks of one 16-byte load per thread.

    Up to 2048 columns a warp owns a row, so that no reduction crosses warps; the chunk being the warps' joint load,
    a width that is no power of two wastes less than one chunk.
    """
    load = WARP * vector(itemsize)
    if n_cols <= load:
        cols = next_power_of_2(n_cols)
        return Tile(rows=4 * load // cols, cols=cols, warps=2)
    if n_cols <= 2048:
        return Tile(rows=1, cols=2 * load, warps=2) if n_cols % (2 * load) == 0 else Tile(rows=2, cols=load, warps=2)
    # 40 rather than 32 elements: 5 · 2^k columns keep fewer, fully used warps
    warps = min(32, next_power_of_2(cdiv(n_cols, 40 * WARP)))
    return Tile(rows=1, cols=warps * load, warps=warps)


@functools.cache
def backward_tile(n_cols: int, itemsize: int, tensors: int, shared_bytes: int, stable: bool = False) -> Tile:
    """Tile of `backward_kernel`: the fewest idle lanes within what registers hold.

    A thread keeps five fp32 values per element (x, dy, w, dw, db): 16 elements fit 128 registers (16 warps), 24 fit
    the 255 of 8 warps, which hide latency a little worse (counted as a tenth of a row). Among equals the larger tile
    wins: it has more rows in flight and fewer reductions. `tensors` of the tile's size are buffered by the pipeline.
    `stable` needs a few registers more, which tiles of several rows do not have.
    """
    room = shared_bytes - 4096
    if (768 if itemsize == 2 else 512) < n_cols <= 3072:
        # 4 or 8 elements of a chunk per thread, in small programs, two where they fit: one reduces while another loads
        rows, cols = 2 if n_cols <= 1024 else 1, 2048 if itemsize == 2 and 1536 < n_cols <= 2048 else 1024
        per_sm = 1 if itemsize == 4 and n_cols > 2048 else 2
        buffer = rows * (cdiv(n_cols, cols) * cols * itemsize * tensors + 12)
        if room // per_sm >= buffer:
            return Tile(rows, cols, 8, 1 + min(3, room // per_sm // buffer), per_sm)
    fits = ((16, 8, 1.0), (8, 16, 1.1)) if stable and n_cols <= 4096 else ((16, 16, 1.0), (8, 24, 1.1))
    vec = vector(itemsize)
    best, best_cost = None, 0.0
    for warps, elements, penalty in fits:
        load = warps * WARP * vec
        rows = 1
        while load // rows >= min(WARP * vec, next_power_of_2(n_cols)):
            cols = load // rows
            chunks = cdiv(n_cols, cols)
            cost = penalty * chunks * cols / n_cols
            if chunks * vec <= elements and (best is None or cost <= best_cost):
                # a single chunk leaves registers for more rows per thread
                best, best_cost = Tile(rows * (elements // vec if chunks == 1 else 1), cols, warps), cost
            rows *= 2
    if best is None:
        raise ValueError(f"a row of {n_cols} columns does not fit one program")
    # a row's statistics are buffered like its elements
    row_bytes = cdiv(n_cols, best.cols) * best.cols * itemsize * tensors + 12
    rows = best.rows
    while rows > 1 and rows * row_bytes > room:
        rows //= 2
    return best._replace(rows=rows, stages=1 + max(1, min(3, room // (rows * row_bytes))))


class Team(NamedTuple):
    """How the kernels for wide rows share a row.

    Each of `size` programs has `cols` columns; a turn is `rows` rows, and what the members tell each other in one
    turn is used `lag` turns later.
    """

    cols: int
    size: int
    warps: int
    rows: int
    lag: int
    stages: int

    def width(self) -> int:
        """Lanes that read the members' words."""
        return next_power_of_2(self.size)

    def teams(self, n_rows: int, programs: int) -> int:
        """Number of teams: as many as `programs` allow, or fewer where that takes no more turns."""
        teams = max(1, min(programs // self.size, cdiv(n_rows, self.rows)))
        turns = cdiv(n_rows, teams * self.rows)
        return cdiv(n_rows, turns * self.rows)


def _team(
    n_cols: int, cols: int, warps: int, rows: int, lag: int, stages: int, row_bytes: int, shared_bytes: int
) -> Team:
    buffers = (shared_bytes - 4096) // (rows * cols * row_bytes)
    return Team(cols, cdiv(n_cols, cols), warps, rows, lag, 1 + max(0, min(stages - 1, buffers)))


@functools.cache
def forward_team(n_cols: int, itemsize: int, tensors: int, shared_bytes: int) -> Team:
    """Team of `team_forward_kernel`; `tensors` are read, through shared memory."""
    if itemsize == 2 and n_cols <= 131072 and n_cols % 16384 == 0:
        return _team(n_cols, 16384, 16, 1, 0, 3, itemsize * tensors, shared_bytes)
    return _team(n_cols, 8192, 16, 2, int(n_cols > 40960), 3, itemsize * tensors, shared_bytes)


@functools.cache
def backward_team(n_cols: int, itemsize: int, tensors: int, shared_bytes: int, stable: bool = False) -> Team:
    """Team of `team_backward_kernel`.

    A turn of lag hides how long the members wait for each other, and costs the registers for the rows of two turns.
    """
    if itemsize == 2 and not stable:
        # a partly filled last member needs registers for its mask, which two turns do not leave
        lag = int(n_cols > 16384 and n_cols % 8192 == 0)
        return _team(n_cols, 8192, 16, 1, lag, 3, itemsize * tensors, shared_bytes)
    return _team(n_cols, 4096, 8, 1 if stable else 2, int(n_cols >= 65536), 3, itemsize * tensors, shared_bytes)

"""Launch shapes of topk's selection: formulas of rows, columns, k, dtype and GPU. The result is the same for all."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from onepass.core.launch import cdiv, next_power_of_2

MANY = 4  # rows are many from this many per multiprocessor on
VECTOR = 16  # bytes of one load of a thread

# narrow rows: many a program, whose best are found one after another
NARROW = 512  # longest row
FEW_OF_NARROW = 16  # most k
NARROW_TILE = 512  # elements of a program
NARROW_WARPS = 1
NARROW_PER_THREAD = 16  # elements of a thread

# wide rows and a small k: selected by maxima of groups
WIDE = 8193  # shortest row
WIDEST = 1 << 18  # longest row
FEW_OF_WIDE = 128  # most k
WIDE_CHUNK = 1 << 14  # bytes of a chunk, twice as many for rows of WIDE_LONG
WIDE_LONG = 3 << 15  # bytes of a row
WIDE_PER_WARP = 1 << 12  # bytes of a chunk for each warp
WIDE_AGAIN = 1024  # least scores that are read again at a time

# whole rows, which one program holds in registers
MAX_COLS = 8192  # longest row where rows are few
MAX_BYTES_OF_MANY = 1 << 16  # of the longest row where rows are many
PER_WARP = 1024  # elements of a warp
REGISTERS = 80  # of a thread that holds a part of MAX_COLS: three programs run side by side instead of two
SORTED_BY_WHOLE = 512  # most survivors that the program sorts; a kernel of their own sorts more

# longer rows: sample, pass, choice
TILE = 512  # elements of a tile of the pass
TILE_WARPS = 1
TILE_STAGES = 2  # buffers of a tile
PER_SM = 32  # programs of the pass per multiprocessor; one a row from MANY on
SAMPLE = 16384  # sampled elements of a row
SAMPLE_OF_MANY = 8192  # the same with many rows
SECTOR = 32  # bytes of a sampled group, which share a sector of memory
SIGMAS = 5.0  # standard deviations of the sample's count by which the pivot lies beyond the k-th score
SAMPLE_PER_WARP = 1024  # sampled elements, held in registers
PER_CHOOSING_WARP = 512  # candidates, held in registers
CHOOSING_REGISTERS = 64  # of a thread with many rows, most of which fill only half of its places
ALONE = 8192  # elements of the tile in which a program goes through a row alone

# the sort of survivors
MAX_SORTED = 4096  # most of a row that one program sorts
SORT_PER_WARP = 4096  # bytes of a warp with many rows
SORT_REGISTERS = 128  # of a thread that holds 8-byte numbers; without a limit fewer programs run
SORT_PER_WARP_OF_FEW = 64  # elements of a warp with few rows
RUN = 1024  # length of a sorted run of more survivors
WAYS = 4  # runs merged at a time
MERGED = 128  # elements per program of a merge

CONSTANT_BITS = {torch.bfloat16: 16, torch.float16: 13}  # low ones of a 32-bit key, the same for all scores of a dtype


class Narrow(NamedTuple):
    """One program holds many rows and finds their largest scores one after another.

    parts: of a row, side by side in a thread; block_r, block_c, block_k: rows, columns, places.
    """

    parts: int
    block_r: int
    block_c: int
    block_k: int


class Wide(NamedTuple):
    """One program goes through a row in chunks and keeps the largest score of each group.

    chunk, group: columns of a chunk, neighbours in a group; groups, room: groups and scores that may reach the bound;
    again: scores that are read again at a time. Room is 4·k scores, from k = 65 on 2·k: about 1.4·k reach the bound.
    """

    chunk: int
    group: int
    groups: int
    again: int
    room: int
    warps: int


class Whole(NamedTuple):
    """One program holds whole rows: rows, columns, places of the chosen, warps, most registers of a thread."""

    block_r: int
    block_c: int
    block_k: int
    warps: int
    registers: int | None


class Pivot(NamedTuple):
    """Sample, pass, choice.

    groups, group: sampled groups of a row and elements of each; sample_warps: of the program that samples;
    vector, parts, tile_stages, tiles, splits: elements of a load, loads of a thread, and buffers of a tile, tiles of a
    program, programs of a row;
    capacity: candidates that a row has room for; choose_warps, choose_registers: warps of the program that chooses
    among them, and most registers of a thread.
    """

    groups: int
    group: int
    sample_warps: int
    vector: int
    parts: int
    tile_stages: int
    tiles: int
    splits: int
    capacity: int
    choose_warps: int
    choose_registers: int | None


def of_selection(n_rows: int, n_cols: int, k: int, itemsize: int, sms: int) -> Narrow | Wide | Whole | Pivot:
    """Return the launch shape for rows of n_cols scores of itemsize bytes, 1 ≤ k ≤ n_cols."""
    many = n_rows >= MANY * sms
    if n_cols <= NARROW and k <= FEW_OF_NARROW:
        block_c = max(16, next_power_of_2(n_cols))
        parts = max(1, min(NARROW_PER_THREAD, block_c) // (VECTOR // itemsize))
        return Narrow(parts, max(1, NARROW_TILE // block_c), block_c, max(2, next_power_of_2(k)))
    if WIDE <= n_cols <= WIDEST and k <= FEW_OF_WIDE:
        chunk = WIDE_CHUNK * (1 if n_cols * itemsize < WIDE_LONG else 2)
        chunk, group = chunk // itemsize, VECTOR // itemsize
        warps = max(1, chunk * itemsize // WIDE_PER_WARP)
        places = max(16, next_power_of_2(k))
        again, room = max(WIDE_AGAIN, max(32 * warps, 2 * places) * group), places * (4 if places <= 64 else 2)
        return Wide(chunk, group, 2 * places, again, room, warps)
    if n_cols <= MAX_COLS or (many and n_cols * itemsize <= MAX_BYTES_OF_MANY and k <= MAX_SORTED):
        block_c = next_power_of_2(n_cols)
        warps = max(1, block_c // PER_WARP)
        block_r = max(1, min(32, 512 // block_c))
        return Whole(block_r, block_c, next_power_of_2(k), warps, REGISTERS if block_c == MAX_COLS else None)
    group = SECTOR // itemsize
    sample = min(SAMPLE_OF_MANY if many else SAMPLE, next_power_of_2(n_cols))
    n_tiles = cdiv(n_cols, TILE)
    splits = 1 if many else min(n_tiles, cdiv(PER_SM * sms, n_rows))
    tiles = cdiv(n_tiles, splits)
    capacity = _capacity(n_cols, k, sample)
    vector = min(VECTOR // itemsize, TILE)
    return Pivot(
        max(1, sample // group), group, max(1, min(32, sample // SAMPLE_PER_WARP)),
        # with many rows other programs hide the wait for a load, and buffers cost more than they save
        vector, max(1, TILE // (32 * vector)), 1 if many else TILE_STAGES, tiles, cdiv(n_tiles, tiles), capacity,
        max(4, min(32, next_power_of_2(capacity // PER_CHOOSING_WARP))), CHOOSING_REGISTERS if many else None,
    )  # fmt: skip


def _capacity(n_cols: int, k: int, sample: int) -> int:
    """Return room for the candidates beyond a pivot, with SIGMAS to spare on both sides.

    A power of two as long as one program chooses among them; it then also wastes at most half of its lanes.
    """
    ratio = sample / n_cols
    rank = k * ratio
    wanted = rank + SIGMAS * math.sqrt(rank) + SIGMAS
    # the mean of a count that is at least `wanted`, with a margin for the search to hit
    mean = 1.06 * wanted + SIGMAS * math.sqrt(wanted) + SIGMAS**2 / 2
    room = min(math.ceil(mean / ratio), n_cols)
    return next_power_of_2(room) if k <= MAX_SORTED else cdiv(room, 16) * 16


def of_sort(n_rows: int, k: int, itemsize: int, sms: int) -> tuple[int, int, int, int | None]:
    """Return rows per program, columns, warps and most registers of the sort of k survivors of itemsize bytes."""
    block_k, many = next_power_of_2(k), n_rows > MANY * sms
    warps = block_k * itemsize // SORT_PER_WARP if many else block_k // SORT_PER_WARP_OF_FEW
    registers = SORT_REGISTERS if many and itemsize == 8 else None
    return max(1, min(32, 256 // block_k)), block_k, max(1, min(32, warps)), registers

"""Launch the kernels: choose the kernel, its pointers, strides and launch shape.

Shapes are formulas instead of autotuning, so that the first call is like every other.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.core.launch import INTERPRET, aligned, as_rows, cdiv, even_rows, gpu, launch, next_power_of_2, sm_count
from onepass.ops._shared.kernels_partials import add_vector_partials

from .definition import Needs, Options, Results, Table, results
from .kernels import backward_kernel, forward_kernel, wide_forward_kernel
from .kernels_team import team_backward_kernel

WARP = 32
# columns of a warp whose threads store 16 codes of 8 bits at once
CODED = 16 * WARP
# widest rows that one program holds in registers; wider rows are walked twice forward, and backward shared by a team
MAX_FORWARD_COLS = 16384
MAX_BACKWARD_COLS = 8192
# columns of a warp in `wide_forward_kernel`
WIDE_WARP_COLS = 512


class Tile(NamedTuple):
    """A tile: rows, columns, warps, buffers of the software pipeline plus one (stages), programs per multiprocessor."""

    rows: int
    cols: int
    warps: int
    stages: int = 1
    per_sm: int = 1


@functools.cache
def forward_tile(n_cols: int, itemsize: int, gated: bool = False, coded: bool = False) -> Tile:
    """Return the tile of `forward_kernel`.

    With 8-bit results (`coded`) each thread stores 16 codes at once and holds up to 64 elements: 5 to 8 % faster. A
    gate is as much work as the norm of a narrow row: twice the warps are 9 % faster.
    """
    tile = _forward_tile(n_cols, itemsize)
    if itemsize != 2:
        return tile
    warps = min(4, next_power_of_2(n_cols // 1024)) if n_cols <= 8192 else 8
    if coded and n_cols >= 2048 and n_cols % (CODED * warps) == 0:
        return Tile(rows=1, cols=CODED * warps, warps=warps)
    if gated and tile.rows > 1 and n_cols <= WARP * 16 // itemsize:
        return tile._replace(warps=2 * tile.warps)
    return tile


def _forward_tile(n_cols: int, itemsize: int) -> Tile:
    """Return the tile without options: about 32 elements per thread, in chunks of one 16-byte load per thread.

    A width between powers of two wastes less than one chunk. Up to 2048 columns, two warps share a row if their joint
    load divides it; else each takes a row of its own. In 16 bits narrow rows are cut into chunks of the largest power
    of two that divides them, where that leaves no lane idle: such tiles are bound by instructions.
    """
    load = WARP * 16 // itemsize
    chunk = n_cols & -n_cols
    if n_cols <= load:
        if itemsize == 2 and 32 <= chunk < n_cols:
            return Tile(rows=1024 // chunk, cols=chunk, warps=2)
        cols = next_power_of_2(n_cols)
        return Tile(rows=1024 // cols, cols=cols, warps=2)
    if n_cols == 2 * load:
        # a row for two warps is so little work that starting programs takes a fifth of the time
        return Tile(rows=2, cols=n_cols, warps=1)
    if n_cols <= 2048:
        if itemsize == 2 and 64 <= chunk < load and n_cols <= 7 * chunk:
            return Tile(rows=1024 // chunk, cols=chunk, warps=4)
        return Tile(rows=1, cols=2 * load, warps=2) if n_cols % (2 * load) == 0 else Tile(rows=2, cols=load, warps=2)
    # up to 40 elements per thread: 5 · 2^k columns then fill half as many warps completely
    warps = min(32, next_power_of_2(cdiv(n_cols, 40 * WARP)))
    return Tile(rows=1, cols=warps * load, warps=warps)


def wide_tile(n_cols: int, itemsize: int, residual: bool) -> tuple[Tile, int]:
    """Return the tile of `wide_forward_kernel` and its registers per thread.

    L2 holds rows between their two walks, and the more easily the fewer are under way: two of up to 96 KB on a
    multiprocessor, or one. `residual`: it needs more registers than 32 warps have.
    """
    warps = 16 if residual or n_cols * itemsize <= 98304 else 32
    return Tile(rows=1, cols=WIDE_WARP_COLS * warps, warps=warps), 65536 // (WARP * warps)


def forward_early(n_cols: int, itemsize: int, has_table: bool, no_options: bool) -> bool:
    """Return whether `forward_kernel` reads w and b along with x.

    Each row of a table loads its own entry, which takes longer than one weight for all rows: 17 % faster at 1152
    columns, as fast at 4096, slower at 128, where other rows hide the wait. Without options 1 to 3 % faster in fp32.
    """
    if has_table:
        return 512 < n_cols < 4096
    return no_options and itemsize == 4 and 2048 < n_cols <= 8192


@functools.cache
def backward_tile(
    n_cols: int, itemsize: int, tensors: int, shared_bytes: int, stable: bool = False, sums: int = 2, gate: int = 0,
    entries: int = 1,
) -> Tile:  # fmt: skip
    """Return the tile of `backward_kernel`.

    The entries of a table share the programs: smaller programs leave fewer idle, 6 to 32 % faster. A gate first above
    4096 columns needs the registers of 8 warps: 24 % faster.

    Args:
        n_cols: width of a row.
        itemsize: bytes of an element, the widest of x, dy and the gate.
        tensors: number of tensors that the software pipeline buffers: x, dy and perhaps ds and the gate.
        shared_bytes: shared memory of a program.
        stable: needs a few registers more per element; so does a gate.
        sums: how many of dw and db are needed.
        gate: GATE of the kernel.
        entries: of the table of weights; 1: no table.
    """
    if itemsize == 2 and gate & 2 and 4096 < n_cols <= 8192:
        tile = Tile(1, 4096, 8, 3)
    elif itemsize == 2 and entries > 1 and not gate and 1024 < n_cols <= 1536:
        tile = Tile(1, 512, 2, 4, 4)
    elif itemsize == 2 and entries > 1 and not gate and 3072 < n_cols <= 4096:
        tile = Tile(1, 2048, 8, 3, 2)
    else:
        return _backward_tile(n_cols, itemsize, tensors, shared_bytes, stable or gate > 0, sums)
    buffers = (shared_bytes - 4096) // tile.per_sm // _row_bytes(n_cols, tile.cols, itemsize, tensors)
    return tile._replace(stages=1 + max(1, min(tile.stages - 1, buffers)))


def _row_bytes(n_cols: int, cols: int, itemsize: int, tensors: int) -> int:
    """Return the shared memory of a row in chunks of `cols`; 12 bytes are its statistics."""
    return cdiv(n_cols, cols) * cols * itemsize * tensors + 12


def _backward_tile(n_cols: int, itemsize: int, tensors: int, shared_bytes: int, stable: bool, sums: int) -> Tile:
    """Return the tile with the fewest idle lanes that fits the registers.

    A thread keeps five fp32 values per element (x, dy, w, dw, db): 16 elements fit 128 registers (16 warps), 24 fit
    the 255 of 8 warps, which hide latency a little worse (counted as a tenth of a row). Among equals the larger tile
    wins: it has more rows in flight and fewer reductions.
    """
    room = shared_bytes - 4096
    small = _small_backward_tile(n_cols, itemsize)
    if small is not None:
        buffer = small.per_sm * small.rows * _row_bytes(n_cols, n_cols, itemsize, tensors)
        return small._replace(stages=1 + max(1, min(3, room // buffer)))
    cols = next_power_of_2(n_cols)
    # 16-bit tiles tolerate fewer idle lanes: they are bound by instructions, not bytes
    if n_cols <= 2048 and (8 * cols <= 9 * n_cols if itemsize == 2 else 3 * cols <= 4 * n_cols):
        # 16 elements per thread, in whole rows. Two small programs are up to 5 % faster than one but write twice the
        # partials: take two only if at most one of dw and db is needed
        per_sm = 1 if sums == 2 else 2
        warps, rows, row_bytes = 8 // per_sm, 4096 // (per_sm * cols), cols * itemsize * tensors + 12
        while rows > 1 and 2 * rows * row_bytes > room // per_sm:
            rows //= 2
        return Tile(rows, cols, warps, 1 + max(1, min(3, room // (per_sm * rows * row_bytes))), per_sm)
    if 1024 < n_cols <= 3072:
        # small programs, two per multiprocessor if they fit: one reduces while the other loads
        cols, warps = (512, 4) if itemsize == 2 else (1024, 8)
        per_sm = 1 if itemsize == 4 and n_cols > 2048 else 2
        buffer = _row_bytes(n_cols, cols, itemsize, tensors)
        if room // per_sm >= buffer:
            return Tile(1, cols, warps, 1 + min(3, room // per_sm // buffer), per_sm)
    fits = ((16, 8, 1.0), (8, 16, 1.1)) if stable and n_cols <= 4096 else ((16, 16, 1.0), (8, 24, 1.1))
    vec = 16 // itemsize
    best, best_cost = None, (0.0, 0)
    for warps, elements, penalty in fits:
        load = warps * WARP * vec
        rows = 1
        while load // rows >= min(WARP * vec, next_power_of_2(n_cols)):
            cols = load // rows
            chunks = cdiv(n_cols, cols)
            # if a row is a single chunk, registers hold more rows per thread
            tile = Tile(rows * (elements // vec if chunks == 1 else 1), cols, warps)
            cost = (penalty * chunks * cols / n_cols, -tile.rows * chunks * cols)
            if chunks * vec <= elements and (best is None or cost < best_cost):
                best, best_cost = tile, cost
            rows *= 2
    if best is None:
        raise ValueError(f"a row of {n_cols} columns does not fit one program")
    row_bytes = _row_bytes(n_cols, best.cols, itemsize, tensors)
    rows = best.rows
    while rows > 1 and rows * row_bytes > room:
        rows //= 2
    return best._replace(rows=rows, stages=1 + max(1, min(3, room // (rows * row_bytes))))


def _small_backward_tile(n_cols: int, itemsize: int) -> Tile | None:
    """Return a tile of several small programs per multiprocessor, no lane idle; None where larger ones are faster.

    Some programs load while others reduce. The pipeline's buffers are left to the caller.
    """
    chunk = n_cols & -n_cols
    if itemsize == 4:
        return Tile(512 // chunk, chunk, 4, per_sm=2) if 32 <= chunk < n_cols <= 256 else None
    if n_cols > 1024 or chunk < 32 or n_cols > 7 * chunk:
        return None
    if chunk == n_cols:
        return Tile(1024 // n_cols, n_cols, 2, per_sm=4)
    if chunk == 256:
        return Tile(2, 256, 4, per_sm=3)
    rows = 512 // chunk
    # more than 24 elements in a thread would spill
    return Tile(rows, chunk, 2, per_sm=4) if n_cols <= 3 * chunk else Tile(rows, chunk, 4, per_sm=2)


class Team(NamedTuple):
    """Launch shape of the team kernels: how programs share a wide row.

    Each of `size` programs has `cols` columns. A phase is `rows` rows; members use the partials of a phase `lag` phases
    later. `cooperative`: all programs, `per_sm` on a multiprocessor, start at once or none.
    """

    cols: int
    size: int
    warps: int
    rows: int
    lag: int
    stages: int
    per_sm: int = 1
    cooperative: bool = False

    def width(self) -> int:
        """Return the lanes that poll the mailbox, one per member, rounded up to a power of two."""
        return next_power_of_2(self.size)

    def registers(self) -> int | None:
        """Return the registers per thread that leave room for `per_sm` programs; None: the compiler decides."""
        return None if self.per_sm == 1 else 65536 // (self.per_sm * self.warps * WARP)

    def teams(self, n_rows: int, multiprocessors: int) -> int:
        """Return the number of teams: as many as run at a time, or fewer if that takes no more phases."""
        teams = max(1, min(self.per_sm * multiprocessors // self.size, cdiv(n_rows, self.rows)))
        turns = cdiv(n_rows, teams * self.rows)
        return cdiv(n_rows, turns * self.rows)


@functools.cache
def backward_team(n_cols: int, itemsize: int, tensors: int, shared_bytes: int) -> Team:
    """Return the team of `team_backward_kernel`, which reads `tensors` tensors (x, dy, ds) through shared memory.

    A lag of one phase hides the time that members wait for each other. It costs registers: for the rows of two phases.
    """
    per_sm, rows = 1, 1
    if itemsize == 2 and n_cols <= 131072 and shared_bytes >= 163840:
        # several programs per multiprocessor: some work while others wait
        per_sm = 4 if n_cols <= 65536 else 2
        cols, warps, lag = 8192 // per_sm, 16 // per_sm, 1
    elif itemsize == 2:
        # no lag if the last member is partly filled: the rows of two phases leave no registers for its mask
        cols, warps, lag = 8192, 16, int(n_cols % 8192 == 0)
    else:
        cols, warps, rows, lag = 4096, 8, 2, int(n_cols >= 65536)
    size = cdiv(n_cols, cols)
    buffers = (shared_bytes // per_sm - 4096) // (rows * cols * itemsize * tensors)
    return Team(cols, size, warps, rows, lag, 1 + max(0, min(2, buffers)), per_sm, itemsize == 2 or size >= 32)


def _rows(t: Tensor | None, n_cols: int, even: bool = False) -> tuple[Tensor | None, int]:
    """Return t as (rows, n) with unit column stride, and its row stride; 0 for None.

    even: every row is aligned as in a contiguous tensor, so that the result has the same bits.
    """
    if t is None:
        return None, 0
    if t.is_contiguous():
        return aligned(t) if even else t, n_cols
    rows = even_rows(as_rows(t), 8) if even else as_rows(t)
    return rows, rows.stride(0) if rows.shape[0] > 1 else n_cols


def _gate_constant(gate: Tensor | None, options: Options) -> int:
    """Return GATE of the kernels."""
    return 0 if gate is None else 1 + options.gate_first + 4 * options.sigmoid


def has_forward(x: Tensor, gate: Tensor | None, table: Table, options: Options) -> bool:
    """Return whether a kernel has these options for rows of this width: all do up to MAX_FORWARD_COLS."""
    return x.shape[-1] <= MAX_FORWARD_COLS or not (options.stable or _has_options(gate, table, options))


def _has_table(table: Table, options: Options) -> bool:
    """Return TABLE of the forward kernel: that of a layer norm adds an offset only with a table."""
    return table.entries > 1 or (options.has_mean and options.offset != 0.0)


def _has_options(gate: Tensor | None, table: Table, options: Options) -> bool:
    return gate is not None or options.twice or options.quantize > 0 or _has_table(table, options)


def forward(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, table: Table,
    options: Options, keep: bool = True,
) -> Results:  # fmt: skip
    """Return y, s = x + residual, e4m3 codes, their scales and the statistics; None for those that are not wanted.

    Statistics (1 to 3, ...) may be None unless `keep`.
    """
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    y, s, codes, scales = results(x, residual, options)
    x_rows, x_stride = _rows(x, n_cols, True)
    residual, r_stride = _rows(residual, n_cols, True)
    gate, z_stride = _rows(gate, n_cols, True)
    weight, bias = (v if v is None else aligned(v.contiguous()) for v in (weight, bias))
    stats = None
    itemsize = (x if s is None else s).element_size()
    stored_codes = codes
    if codes is not None and torch.version.hip is None and gpu(x).capability >= (8, 9):
        # such a GPU rounds to e4m3 in one instruction
        stored_codes = codes.view(torch.float8_e4m3fn)
    vec = math.gcd(8, n_cols)
    # a 16-bit layer norm is faster by one program a row up to twice the width
    one_program = n_cols <= MAX_FORWARD_COLS * (2 if options.has_mean and itemsize == 2 else 1)
    # the kernel for wide rows always stores statistics: their cost is small beside a wide row
    if keep or not one_program:
        n_stats = 1 + options.has_mean + options.stable
        stats = torch.empty((n_stats, *x.shape[:-1]), dtype=torch.float32, device=x.device)
    tensors = (x_rows, residual, weight, bias, y, s, stats)
    numbers = (x_stride // vec, r_stride // vec, n_rows, float(options.eps), float(options.offset))
    if one_program:
        has_table = _has_table(table, options)
        tile = forward_tile(n_cols, itemsize, gate is not None, options.quantize > 0)
        early = forward_early(n_cols, itemsize, has_table, not _has_options(gate, table, options))
        launch(
            forward_kernel, (cdiv(n_rows, tile.rows), 1, 1), (*tensors, gate, stored_codes, scales),
            (*numbers, z_stride // vec, *table),
            (n_cols, vec, options.has_mean, options.stable, tile.rows, tile.cols, early, has_table, options.twice,
             _gate_constant(gate, options), options.quantize),
            num_warps=tile.warps,
        )  # fmt: skip
    else:
        tile, registers = wide_tile(n_cols, itemsize, residual is not None)
        launch(
            wide_forward_kernel, (n_rows, 1, 1), tensors, numbers,
            (n_cols, vec, options.has_mean, tile.cols, tile.stages),
            num_warps=tile.warps, **({} if torch.version.hip else {"maxnreg": registers}),
        )  # fmt: skip
    return y, s, codes, scales, stats


def has_backward(x: Tensor, itemsize: int, gate: Tensor | None, table: Table, stable: bool) -> bool:
    """Return whether registers of a program or a team hold a row of x and dy, whose wider one has the itemsize.

    Else torch computes the gradients.
    """
    n_cols = x.shape[-1]
    if n_cols <= MAX_BACKWARD_COLS:
        return True
    if gate is not None or stable or table.entries > 1 or INTERPRET or torch.version.hip is not None:
        return False
    # the programs of a team poll, so they must run at the same time
    return 2 * backward_team(n_cols, itemsize, 2, gpu(x).shared).size <= sm_count(x)


def backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None,
    bias: Tensor | None, table: Table, options: Options, x_dtype: torch.dtype, needs: Needs,
) -> Results:  # fmt: skip
    """Return dx, dz, dw and db in the dtypes of x, gate, weight and bias, and dx in `x_dtype`; None if not needed."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    in_team = n_cols > MAX_BACKWARD_COLS
    # a team computes dx in any case
    dx = x.new_empty(x.shape) if needs.need_x or in_team else None
    dx_copy = x.new_empty(x.shape, dtype=x_dtype) if needs.need_x and x_dtype != x.dtype and not in_team else None
    dz = gate.new_empty(gate.shape) if needs.need_z and gate is not None else None
    dw = weight.new_empty(weight.shape) if needs.need_w and weight is not None else None
    db = bias.new_empty(bias.shape) if needs.need_b and bias is not None else None
    weight, bias = (v if v is None else v.contiguous() for v in (weight, bias))
    n_sums = (dw is not None) + (db is not None)
    itemsize = max(t.element_size() for t in (x, dy, gate) if t is not None)
    # only a gate after the norm multiplies the bias
    bias = bias if gate is not None and not options.gate_first else None
    x_rows, x_stride = _rows(x, n_cols)
    dy_rows, dy_stride = _rows(dy, n_cols)
    ds, ds_stride = _rows(ds, n_cols)
    gate, z_stride = _rows(gate, n_cols)
    vec = math.gcd(8, x_stride, dy_stride, ds_stride, z_stride)
    strides = (x_stride // vec, dy_stride // vec, ds_stride // vec, n_rows)
    needed = (dw is not None, db is not None)
    n_read = 2 + (ds is not None) + (gate is not None)
    entries, shared = table.entries, gpu(x).shared
    if in_team:
        team = backward_team(n_cols, itemsize, n_read, shared)
        programs = team.teams(n_rows, sm_count(x))
    else:
        tile = backward_tile(
            n_cols, itemsize, n_read, shared, options.stable, max(n_sums, bias is not None),
            _gate_constant(gate, options), entries,
        )  # fmt: skip
        programs = min(max(1, tile.per_sm * sm_count(x) // entries), cdiv(n_rows // entries, tile.rows))
    partials = None
    if n_sums:
        partials = torch.empty((n_sums, entries, programs, n_cols), dtype=torch.float32, device=x.device)
    tensors = (dy_rows, ds, x_rows, weight, stats, dx, partials)
    if in_team:
        words = torch.zeros(4 * programs * team.rows * team.size + 1, dtype=torch.int64, device=x.device)
        launch(
            team_backward_kernel, (programs * team.size, 1, 1), (*tensors, words), (*strides, float(options.offset)),
            (n_cols, vec, options.has_mean, *needed, team.cols, team.size, team.width(), team.rows, team.lag,
             team.stages, team.cooperative),
            num_warps=team.warps, maxnreg=team.registers(), launch_cooperative_grid=team.cooperative,
        )  # fmt: skip
    else:
        launch(
            backward_kernel, (programs, 1, 1) if entries == 1 else (entries, programs, 1),
            (*tensors, gate, bias, dz, dx_copy),
            (*strides, float(options.eps), float(options.offset), z_stride // vec, *table),
            (n_cols, vec, options.has_mean, options.stable, *needed, tile.rows, tile.cols, tile.stages, entries > 1,
             _gate_constant(gate, options)),
            num_warps=tile.warps,
        )  # fmt: skip
    if partials is not None:
        add_vector_partials(partials, dw, db, programs, entries)
    return dx if needs.need_x else None, dz, dw, db, dx_copy

"""Triton kernels for rows wider than one program holds: a team of programs per row, one read and one write.

A team's programs share the columns and walk the rows together. In each phase a member keeps its part of a row on chip,
publishes its partials as one 64-bit word of the mailbox in global memory, and polls for the words of the others. A word
is data and signal at once: its lowest bit is the parity of the phase, which differs from the parity that the slot held
before, so neither fences nor a second round trip are needed. Phases use four slots in rotation. With a lag of one phase
between publishing and polling, a program is at most two phases ahead, so words are read before they are overwritten.

A cooperative launch starts all programs at once or none. Without it, programs take places in the order in which they
start: all teams but the last are then complete and running, and finish even if other kernels hold the rest of the GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onepass.ops._shared.kernels_memory import load, store

from .kernels import SIZES, add_pairs, mark

# number of polls, about a minute: a missing member ends in a CUDA error instead of a hang
PATIENCE = tl.constexpr(1 << 27)


@triton.jit
def pair(low, high):
    """Pack two 32-bit values into one 64-bit word."""
    low = tl.cast(low, tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (tl.cast(high, tl.int32, bitcast=True).to(tl.int64) << 32) | low


@triton.jit
def low_half(words):
    """Return the low float with its parity bit cleared: parity depends on the row's place, results must not."""
    return (words.to(tl.int32) & -2).to(tl.float32, bitcast=True)


@triton.jit
def high_half(words):
    return (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def parity_of(turn):
    """Return the parity of a phase: 1 in the first round over the slots, which start as zeros; then alternating."""
    return 1 - ((turn >> 2) & 1)


@triton.jit
def await_words(ptr, parity, TEAM: tl.constexpr, WIDTH: tl.constexpr):
    """Poll until all members have published; return their words. Lanes beyond TEAM repeat the last word."""
    address = (ptr + tl.minimum(tl.arange(0, WIDTH), TEAM - 1)).to(tl.int64)
    # assembly, because Triton does not pipeline a loop that contains a `while`
    return tl.inline_asm_elementwise(
        """{
        .reg .pred missing, lost;
        .reg .b64 bit;
        .reg .b32 polls;
        mov.b32 polls, 0;
        POLL:
        ld.relaxed.gpu.global.b64 $0, [$1];
        and.b64 bit, $0, 1;
        add.u32 polls, polls, 1;
        setp.gt.u32 lost, polls, $3;
        @lost trap;
        setp.ne.b64 missing, bit, $2;
        @missing bra POLL;
        }""",
        "=&l,l,l,r",
        [address, parity.to(tl.int64), PATIENCE],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def take_place(words_ptr, SLOTS: tl.constexpr, TEAM: tl.constexpr, COOPERATIVE: tl.constexpr):
    """Return (team, member, number of teams); a counter behind all teams' slots gives places in starting order."""
    teams = tl.num_programs(0) // TEAM
    if COOPERATIVE:
        place = tl.program_id(0)
    else:
        place = tl.atomic_add(words_ptr + teams * SLOTS, 1, sem="relaxed").to(tl.int32)
    return place // TEAM, place % TEAM, teams


@triton.jit
def gain(w, offset, HAS_MEAN: tl.constexpr):
    """Return the factor of n in fp32: w, for rms_norm w + offset."""
    return w.to(tl.float32) if HAS_MEAN else w.to(tl.float32) + offset


@triton.jit(do_not_specialize=SIZES)
def team_backward_kernel(
    dy_ptr,  # (n_rows, N_COLS), unit column stride
    ds_ptr,  # (n_rows, N_COLS), unit column stride: gradient of x + residual; None: none
    x_ptr,  # (n_rows, N_COLS), unit column stride
    w_ptr,  # (N_COLS,) or None
    stats_ptr,  # (1 or 2, n_rows) fp32: 1/σ, mean
    dx_ptr,  # (n_rows, N_COLS), contiguous
    partials_ptr,  # (1 or 2, teams, N_COLS) fp32: of dw, then of db, whichever are needed; None: neither
    words_ptr,  # (teams, 4, R, TEAM) int64 zeros, the mailbox, and one counter
    x_row_stride,  # in units of VEC elements
    dy_row_stride,
    ds_row_stride,
    n_rows,
    offset,
    N_COLS: tl.constexpr,
    VEC: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    NEED_W: tl.constexpr,
    NEED_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TEAM: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    LAG: tl.constexpr,
    STAGES: tl.constexpr,
    COOPERATIVE: tl.constexpr,
):
    """Per phase: read R rows, publish partials, add to dw and db in registers; write dx of LAG phases ago."""
    MASK_COLS: tl.constexpr = N_COLS % BLOCK_C != 0
    # a phase may lie before the first row or behind the last
    MASKED: tl.constexpr = MASK_COLS or LAG > 0 or R > 1
    SLOT: tl.constexpr = R * TEAM
    team, member, teams = take_place(words_ptr, 4 * SLOT, TEAM, COOPERATIVE)
    words_ptr += team * (4 * SLOT)
    cols = member * BLOCK_C + tl.arange(0, BLOCK_C)
    dw = tl.zeros((BLOCK_C,), tl.float32)
    db = tl.zeros((BLOCK_C,), tl.float32)
    if w_ptr is not None:
        w = load(w_ptr, cols, cols < N_COLS, MASK_COLS)
    old_xs = ()
    old_dys = ()
    if LAG:
        for _ in tl.static_range(R):
            old_xs = old_xs + (tl.zeros((BLOCK_C,), x_ptr.dtype.element_ty),)
            old_dys = old_dys + (tl.zeros((BLOCK_C,), dy_ptr.dtype.element_ty),)

    turn = 0
    for first in tl.range(team * R, n_rows + LAG * teams * R, teams * R, num_stages=STAGES):
        xs = ()
        dys = ()
        for k in tl.static_range(R):
            row = tl.cast(first + k, tl.int64)
            live = row < n_rows
            x_row = x_ptr + row * x_row_stride * VEC
            dy_row = dy_ptr + row * dy_row_stride * VEC
            xs = xs + (load(x_row, cols, cols < tl.where(live, N_COLS, 0), MASKED),)
            dys = dys + (load(dy_row, cols, cols < tl.where(live, N_COLS, 0), MASKED),)
        parity = parity_of(turn)
        slot = words_ptr + (turn & 3) * SLOT
        ns = ()
        gs = ()
        rstds = ()
        for k in tl.static_range(R):
            row = tl.cast(first + k, tl.int64)
            live = row < n_rows
            n = xs[k].to(tl.float32)
            g = dys[k].to(tl.float32)
            rstd = tl.load(stats_ptr + row, mask=live, other=0.0)
            if HAS_MEAN:
                n -= tl.load(stats_ptr + n_rows + row, mask=live, other=0.0)
            n *= rstd
            if NEED_W:
                dw += g * n
            if NEED_B:
                db += g
            if w_ptr is not None:
                g *= gain(w, offset, HAS_MEAN)
            if HAS_MEAN:
                a, c = tl.reduce((g * n, g), 0, add_pairs)
            else:
                a = tl.sum(g * n, 0)
                c = a
            tl.atomic_xchg(slot + k * TEAM + member, pair(mark(a, parity), c), sem="relaxed")
            ns = ns + (n,)
            gs = gs + (g,)
            rstds = rstds + (rstd,)

        ready_xs = old_xs if LAG else xs
        ready_dys = old_dys if LAG else dys
        if LAG:
            old_xs = xs
            old_dys = dys
        parity = parity_of(turn - LAG)
        slot = words_ptr + ((turn - LAG) & 3) * SLOT
        in_team = tl.arange(0, WIDTH) < TEAM
        for k in tl.static_range(R):
            row = tl.cast(first - LAG * teams * R + k, tl.int64)
            live = (row >= 0) & (row < n_rows)
            rstd = tl.load(stats_ptr + row, mask=live, other=0.0) if LAG else rstds[k]
            words = await_words(slot + k * TEAM, parity, TEAM, WIDTH)
            a = tl.sum(tl.where(in_team, low_half(words), 0.0), 0) / N_COLS
            slope = -a * rstd
            shift = 0.0
            if HAS_MEAN:
                shift = -tl.sum(tl.where(in_team, high_half(words), 0.0), 0) / N_COLS * rstd
            if LAG:
                # recompute from the raw values: keeping those alone takes half the registers
                n = ready_xs[k].to(tl.float32)
                g = ready_dys[k].to(tl.float32)
                if w_ptr is not None:
                    g *= gain(w, offset, HAS_MEAN)
                slope *= rstd
                if HAS_MEAN:
                    shift -= tl.load(stats_ptr + n_rows + row, mask=live, other=0.0) * slope
            else:
                n = ns[k]
                g = gs[k]
            dx = g * rstd + (n * slope + shift)
            if ds_ptr is not None:
                ds_row = ds_ptr + row * ds_row_stride * VEC
                dx += load(ds_row, cols, cols < tl.where(live, N_COLS, 0), MASKED).to(tl.float32)
            dx_row = dx_ptr + row * N_COLS
            dx = dx.to(dx_ptr.dtype.element_ty)
            store(dx_row, cols, dx, cols < tl.where(live, N_COLS, 0), MASKED)
        turn += 1

    if NEED_W or NEED_B:
        out = partials_ptr + team.to(tl.int64) * N_COLS
        if NEED_W:
            tl.store(out + cols, dw, mask=cols < N_COLS)
            out += teams.to(tl.int64) * N_COLS
        if NEED_B:
            tl.store(out + cols, db, mask=cols < N_COLS)

"""Triton kernels of layer_norm and rms_norm: constexprs and None pointers choose the operator and its options.

A row lives in registers as chunks of `BLOCK_C` columns, so that a width such as 5120 wastes no lanes. Forward walks a
wider row twice (`wide_forward_kernel`), and backward shares it among programs (`kernels_team`). The width is a
constexpr, as a model has few of them: column masks then fold away or prove their alignment, which keeps loads 16 bytes
wide. The number of rows is an argument.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onepass.ops._shared.kernels_memory import load, store

LARGEST_E4M3 = tl.constexpr(448.0)
# least number that a scale maps to 448: the reciprocal of a smaller scale may leave fp32
LEAST = tl.constexpr(2.0**-40)
SMALLEST_E4M3 = tl.constexpr(2.0**-6)
# arguments that kernels do not specialise on
SIZES = (
    "x_row_stride", "r_row_stride", "dy_row_stride", "ds_row_stride", "n_rows", "z_row_stride", "repeat", "n_entries",
)  # fmt: skip


@triton.jit
def scales_of(largest):
    """Return the fp32 scale that maps e4m3's 448 to the largest number, and its reciprocal."""
    largest = tl.maximum(largest, LEAST)
    most = tl.full(largest.shape, LARGEST_E4M3, tl.float32)
    return tl.div_rn(largest, most), tl.div_rn(most, largest)


@triton.jit
def e4m3_codes(x, dtype: tl.constexpr):
    """Round fp32 to e4m3, to nearest even and at most 448; in uint8 for GPUs without this dtype, with the same bits."""
    if dtype != tl.uint8:
        codes = x.to(dtype)
    else:
        size = tl.minimum(tl.abs(x), LARGEST_E4M3)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # fp32 numbers from 2¹⁴ on are 2⁻⁹ apart, as e4m3's subnormal numbers are: the sum rounds to them
        subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 15
        codes = tl.where(x == x, tl.where(size < SMALLEST_E4M3, subnormal, normal), 0x7F)
        codes = (codes | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit(do_not_specialize=SIZES)
def wide_forward_kernel(
    x_ptr,  # (n_rows, N_COLS), unit column stride
    r_ptr,  # (n_rows, N_COLS), unit column stride; None: no residual
    w_ptr,  # (N_COLS,) or None
    b_ptr,  # (N_COLS,) or None
    y_ptr,  # (n_rows, N_COLS), contiguous
    s_ptr,  # (n_rows, N_COLS), contiguous; None without residual
    stats_ptr,  # (1 or 2, n_rows) fp32: 1/σ, mean
    x_row_stride,  # in units of VEC elements
    r_row_stride,
    n_rows,
    eps,
    offset,
    N_COLS: tl.constexpr,
    VEC: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Normalise one row per program in two walks; the second finds the row in L2.

    The first walk sums x − shift and its square, where shift is the mean of the first tile: that avoids most of the
    cancellation of E[x²] − mean².
    """
    MASKED: tl.constexpr = N_COLS % BLOCK_C != 0
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row_stride * VEC
    y_ptr += row * N_COLS
    if r_ptr is not None:
        r_ptr += row * r_row_stride * VEC
        s_ptr += row * N_COLS

    shift = 0.0
    if HAS_MEAN:
        cols = tl.arange(0, BLOCK_C)
        first = add_residual(load_tile(x_ptr, cols, cols < N_COLS, MASKED), r_ptr, s_ptr, cols, cols < N_COLS, MASKED)
        shift = tl.sum(first, 0) / min(N_COLS, BLOCK_C)

    sums = tl.zeros((BLOCK_C,), tl.float32)
    squares = tl.zeros((BLOCK_C,), tl.float32)
    for start in tl.range(0, N_COLS, BLOCK_C, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_C)
        x = load_streamed(x_ptr, cols, cols < N_COLS, MASKED)
        if r_ptr is not None:
            x = add_residual(x, r_ptr, s_ptr, cols, cols < N_COLS, MASKED)
            store(s_ptr, cols, x, cols < N_COLS, MASKED)
        if HAS_MEAN:
            x -= shift
            if MASKED:
                x = tl.where(cols < N_COLS, x, 0.0)
            sums += x
        squares += x * x
    var = tl.sum(squares, 0) / N_COLS
    if HAS_MEAN:
        drift = tl.sum(sums, 0) / N_COLS
        var = tl.maximum(var - drift * drift, 0.0)
        shift += drift
    rstd = tl.rsqrt(var + eps)

    for start in tl.range(0, N_COLS, BLOCK_C, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_C)
        # read for the last time and written once: such lines leave L2 first, which keeps the rows of other programs
        x = load(x_ptr, cols, cols < N_COLS, MASKED, "evict_first").to(tl.float32)
        x = add_residual(x, r_ptr, s_ptr, cols, cols < N_COLS, MASKED)
        y = (x - shift) * rstd
        if w_ptr is not None:
            y *= load_tile(w_ptr, cols, cols < N_COLS, MASKED) + offset
        if b_ptr is not None:
            y += load_tile(b_ptr, cols, cols < N_COLS, MASKED)
        store(y_ptr, cols, y, cols < N_COLS, MASKED, "evict_first")

    tl.store(stats_ptr + row, rstd)
    if HAS_MEAN:
        tl.store(stats_ptr + n_rows + row, shift)


# smallest normal float: 1/TINY is finite
TINY = tl.constexpr(1.1754943508222875e-38)
# GATE: the gate's activation multiplies y (AFTER) or s (FIRST); + SIGMOID: it is the sigmoid, not silu
AFTER, FIRST, SIGMOID = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
# QUANT: what shares a scale, a row or 128 columns of it
ROW, BLOCK = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def in_tile(rows, cols, n_rows, N_COLS: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    """Return the mask of a (rows, cols) tile, of only the parts that can be false."""
    if MASK_ROWS and MASK_COLS:
        mask = (rows < n_rows)[:, None] & (cols < N_COLS)[None, :]
    elif MASK_ROWS:
        mask = (rows < n_rows)[:, None]
    else:
        mask = (cols < N_COLS)[None, :]
    return mask


@triton.jit
def load_tile(ptr, offsets, mask, MASKED: tl.constexpr):
    """Load as fp32; zero where masked."""
    return load(ptr, offsets, mask, MASKED).to(tl.float32)


@triton.jit
def load_streamed(ptr, offsets, mask, MASKED: tl.constexpr):
    """Load as fp32 what is read once, marked to stay in L2.

    Written lines then leave L2 first, in an even stream: 2 to 4 % faster forward.
    """
    return load(ptr, offsets, mask, MASKED, "evict_last").to(tl.float32)


@triton.jit
def add_residual(x, r_ptr, s_ptr, offsets, mask, MASKED: tl.constexpr):
    """Return x + residual, rounded as s stores it: backward reads the rounded s, so forward normalises it too."""
    if r_ptr is not None:
        x = (x + load_streamed(r_ptr, offsets, mask, MASKED)).to(s_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def load_weight(
    ptr, entries, cols, mask, N_COLS: tl.constexpr, BLOCK_R: tl.constexpr, TABLE: tl.constexpr, MASK_COLS: tl.constexpr
):
    """Load the weights of a tile's columns: (N_COLS,) for all rows, or of a table each row's own entry."""
    if TABLE:
        v = load(ptr + (entries * N_COLS)[:, None], cols[None, :], mask, BLOCK_R > 1 or MASK_COLS)
    else:
        # a tile of equal rows, in the layout of x: a 1-D load would need a layout conversion
        offsets = tl.zeros((BLOCK_R,), tl.int32)[:, None] + cols[None, :]
        v = load(ptr, offsets, offsets < N_COLS, MASK_COLS)
    return v


@triton.jit
def activation(z, GATE: tl.constexpr):
    """Return silu(z), or sigmoid(z) with SIGMOID & GATE."""
    return (1.0 if SIGMOID & GATE else z) / (1.0 + tl.exp(-z))


@triton.jit
def activation_and_slope(z, GATE: tl.constexpr):
    """Return the activation and its derivative."""
    s = 1.0 / (1.0 + tl.exp(-z))
    if SIGMOID & GATE:
        value, slope = s, s * (1.0 - s)
    else:
        value, slope = z * s, s * (1.0 + z * (1.0 - s))
    return value, slope


@triton.jit
def signed_scale(largest, smallest):
    """Return ±m of `stable`: max(x) if positive, else min(x) = −m; 1 for a row of zeros."""
    return tl.where(largest > 0, largest, tl.where(smallest < 0, smallest, 1.0))


@triton.jit
def power_of_two(size):
    """Return the largest power of two up to size, a normal number > 0, and its reciprocal; at most 2^126.

    A product with either is exact, so it has the same bits if the compiler contracts it into a mean's subtraction.
    """
    exponent = tl.minimum(size.to(tl.int32, bitcast=True) & 0x7F800000, 253 << 23)
    return exponent.to(tl.float32, bitcast=True), ((254 << 23) - exponent).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    x_ptr,  # (n_rows, N_COLS), unit column stride
    r_ptr,  # (n_rows, N_COLS), unit column stride; None: no residual
    w_ptr,  # (N_COLS,), or with TABLE (n_entries, N_COLS); or None
    b_ptr,  # like w_ptr
    y_ptr,  # (n_rows, N_COLS), contiguous; None: its codes are wanted
    s_ptr,  # (n_rows, N_COLS), contiguous; None without residual
    stats_ptr,  # (1 to 3, n_rows) fp32: 1/σ, mean, ±m; None: not kept
    z_ptr,  # (n_rows, N_COLS), unit column stride: gate; None: none
    codes_ptr,  # (n_rows, N_COLS) e4m3 or its codes in uint8: y in 8 bits; None: y is wanted
    scales_ptr,  # (n_rows,) fp32, or with BLOCK (n_rows, N_COLS / 128)
    x_row_stride,  # in units of VEC elements, so that Triton can prove the alignment of every row
    r_row_stride,
    n_rows,
    eps,
    offset,
    z_row_stride,
    repeat,  # row i takes entry (i // repeat) % n_entries of the table
    n_entries,
    N_COLS: tl.constexpr,
    VEC: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    STABLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
    TABLE: tl.constexpr,
    TWICE: tl.constexpr,
    GATE: tl.constexpr,
    QUANT: tl.constexpr,
):
    """Normalise one tile of whole rows per program, held in registers between the statistics and the result.

    EARLY: read w and b along with x, if registers allow, so that no load is left to wait for after the statistics.
    TWICE: round the normalised row to the dtype of x, then its product with w.
    """
    CHUNKS: tl.constexpr = (N_COLS + BLOCK_C - 1) // BLOCK_C
    MASK_ROWS: tl.constexpr = BLOCK_R > 1
    TILES: tl.constexpr = BLOCK_C // 128
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    x_rows = (rows * x_row_stride * VEC)[:, None]
    y_rows = (rows * N_COLS)[:, None]
    entries = rows
    if TABLE:
        # divided in 32 bits, which takes a tenth of the instructions; the number of rows fits
        entries = ((rows.to(tl.int32) // repeat) % n_entries).to(tl.int64)

    xs = ()
    zs = ()
    for i in tl.static_range(CHUNKS):
        cols = i * BLOCK_C + tl.arange(0, BLOCK_C)
        mask = in_tile(rows, cols, n_rows, N_COLS, MASK_ROWS, (i + 1) * BLOCK_C > N_COLS)
        x = load_streamed(x_ptr, x_rows + cols[None, :], mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
        if r_ptr is not None:
            r_offsets = (rows * r_row_stride * VEC)[:, None] + cols[None, :]
            x = add_residual(x, r_ptr, s_ptr, r_offsets, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
            store(s_ptr, y_rows + cols[None, :], x, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
        if z_ptr is not None:
            z_offsets = (rows * z_row_stride * VEC)[:, None] + cols[None, :]
            z = load_streamed(z_ptr, z_offsets, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
            if FIRST & GATE:
                x *= activation(z, GATE)
            else:
                # kept in its own dtype it takes half the registers
                zs = zs + (z.to(z_ptr.dtype.element_ty),)
        xs = xs + (x,)
    ws = ()
    bs = ()
    if EARLY:
        for i in tl.static_range(CHUNKS):
            cols = i * BLOCK_C + tl.arange(0, BLOCK_C)
            mask = in_tile(rows, cols, n_rows, N_COLS, MASK_ROWS, (i + 1) * BLOCK_C > N_COLS)
            if w_ptr is not None:
                w = load_weight(w_ptr, entries, cols, mask, N_COLS, BLOCK_R, TABLE, (i + 1) * BLOCK_C > N_COLS)
                ws = ws + (w,)
            if b_ptr is not None:
                b = load_weight(b_ptr, entries, cols, mask, N_COLS, BLOCK_R, TABLE, (i + 1) * BLOCK_C > N_COLS)
                bs = bs + (b,)

    if STABLE:
        largest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
        smallest = tl.full((BLOCK_R,), float("inf"), tl.float32)
        for i in tl.static_range(CHUNKS):
            ok = (i * BLOCK_C + tl.arange(0, BLOCK_C) < N_COLS)[None, :]
            largest = tl.maximum(largest, tl.max(tl.where(ok, xs[i], float("-inf")), 1))
            smallest = tl.minimum(smallest, tl.min(tl.where(ok, xs[i], float("inf")), 1))
        signed = signed_scale(largest, smallest)
        # statistics in units of about max|x|: then no row overflows or underflows
        size = tl.maximum(largest, -smallest)
        unit, per_unit = power_of_two(tl.where(size > 0, tl.maximum(size, TINY), 1.0))
        relative = signed * per_unit
        eps_row = eps * relative * relative
        scaled = ()
        for i in tl.static_range(CHUNKS):
            scaled = scaled + (xs[i] * per_unit[:, None],)
        xs = scaled
    else:
        eps_row = eps

    if HAS_MEAN:
        total = xs[0]
        for i in tl.static_range(1, CHUNKS):
            total += xs[i]
        mean = tl.sum(total, 1)
        if N_COLS & (N_COLS - 1) == 0:
            mean *= 1.0 / N_COLS
        else:
            # an exact division: a constant's reciprocal is off by an ulp. A row of one value then has this value as its
            # mean, if fp32 holds its sum, and becomes 0, not an ulp over √eps
            mean = tl.div_rn(mean, 1.0 * N_COLS)
        centred = ()
        for i in tl.static_range(CHUNKS):
            d = xs[i] - mean[:, None]
            if (i + 1) * BLOCK_C > N_COLS:
                d = tl.where((i * BLOCK_C + tl.arange(0, BLOCK_C) < N_COLS)[None, :], d, 0.0)
            centred = centred + (d,)
        xs = centred
    square = xs[0] * xs[0]
    for i in tl.static_range(1, CHUNKS):
        square += xs[i] * xs[i]
    rstd = tl.rsqrt(tl.sum(square, 1) / N_COLS + eps_row)

    ys = ()
    if QUANT == ROW:
        largest = tl.zeros((BLOCK_R,), tl.float32)
    for i in tl.static_range(CHUNKS):
        cols = i * BLOCK_C + tl.arange(0, BLOCK_C)
        mask = in_tile(rows, cols, n_rows, N_COLS, MASK_ROWS, (i + 1) * BLOCK_C > N_COLS)
        y = xs[i] * rstd[:, None]
        if TWICE:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        if w_ptr is not None:
            if EARLY:
                w = ws[i]
            else:
                w = load_weight(w_ptr, entries, cols, mask, N_COLS, BLOCK_R, TABLE, (i + 1) * BLOCK_C > N_COLS)
            w = w.to(tl.float32)
            # a layer norm adds an offset only with a table
            y *= w if HAS_MEAN and not TABLE else w + offset
            if TWICE and x_ptr.dtype.element_ty == w_ptr.dtype.element_ty:
                # two 16-bit dtypes multiply in fp32, as torch promotes them
                y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        if b_ptr is not None:
            if EARLY:
                b = bs[i]
            else:
                b = load_weight(b_ptr, entries, cols, mask, N_COLS, BLOCK_R, TABLE, (i + 1) * BLOCK_C > N_COLS)
            y += b.to(tl.float32)
        if AFTER & GATE:
            y *= activation(zs[i].to(tl.float32), GATE)
        if y_ptr is not None:
            store(y_ptr, y_rows + cols[None, :], y, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
        if codes_ptr is not None:
            # the codes are those of y rounded to the dtype of x
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
            if QUANT == ROW:
                largest = tl.maximum(largest, tl.max(tl.abs(y), 1))
                ys = ys + (y,)
            else:
                by_block = tl.reshape(y, (BLOCK_R, TILES, 128))
                scales, factors = scales_of(tl.max(tl.abs(by_block), 2))
                y = tl.reshape(by_block * factors[:, :, None], (BLOCK_R, BLOCK_C))
                blocks = i * TILES + tl.arange(0, TILES)
                ok = in_tile(rows, blocks, n_rows, N_COLS // 128, True, True)
                tl.store(scales_ptr + (rows * (N_COLS // 128))[:, None] + blocks[None, :], scales, mask=ok)
                codes = e4m3_codes(y, codes_ptr.dtype.element_ty)
                store(codes_ptr, y_rows + cols[None, :], codes, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
    if QUANT == ROW:
        scales, factors = scales_of(largest)
        tl.store(scales_ptr + rows, scales, mask=rows < n_rows)
        for i in tl.static_range(CHUNKS):
            cols = i * BLOCK_C + tl.arange(0, BLOCK_C)
            mask = in_tile(rows, cols, n_rows, N_COLS, MASK_ROWS, (i + 1) * BLOCK_C > N_COLS)
            codes = e4m3_codes(ys[i] * factors[:, None], codes_ptr.dtype.element_ty)
            store(codes_ptr, y_rows + cols[None, :], codes, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)

    if stats_ptr is not None:
        if STABLE:
            rstd = rstd * per_unit
            mean = mean * unit
            tl.store(stats_ptr + n_rows + n_rows + rows, signed, mask=rows < n_rows)
        if HAS_MEAN:
            tl.store(stats_ptr + n_rows + rows, mean, mask=rows < n_rows)
        tl.store(stats_ptr + rows, rstd, mask=rows < n_rows)


@triton.jit
def mark(n, bit):
    """Write 0 or 1 into the lowest bit of n: it costs no register and half an fp32 rounding."""
    return ((n.to(tl.int32, bitcast=True) & -2) | bit).to(tl.float32, bitcast=True)


@triton.jit
def marked(n):
    """Return what `mark` wrote."""
    return n.to(tl.int32, bitcast=True) & 1


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    dy_ptr,  # (n_rows, N_COLS), unit column stride
    ds_ptr,  # (n_rows, N_COLS), unit column stride: gradient of x + residual; None: none
    x_ptr,  # (n_rows, N_COLS), unit column stride
    w_ptr,  # (N_COLS,), or with TABLE (n_entries, N_COLS); or None
    stats_ptr,  # (1 to 3, n_rows) fp32: 1/σ, mean, ±m
    dx_ptr,  # (n_rows, N_COLS), contiguous; None: not needed
    partials_ptr,  # (1 or 2, programs, N_COLS) fp32: of dw, then of db, whichever are needed; None: neither
    z_ptr,  # (n_rows, N_COLS), unit column stride: gate; None: none
    b_ptr,  # like w_ptr: part of what a gate after the norm multiplies; else None
    dz_ptr,  # (n_rows, N_COLS), contiguous; None: not needed
    copy_ptr,  # (n_rows, N_COLS), contiguous: dx in a second dtype, beside dx; None: not needed
    x_row_stride,  # in units of VEC elements
    dy_row_stride,
    ds_row_stride,
    n_rows,
    eps,
    offset,
    z_row_stride,
    repeat,  # row i takes entry (i // repeat) % n_entries of the table
    n_entries,
    N_COLS: tl.constexpr,
    VEC: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    STABLE: tl.constexpr,
    NEED_W: tl.constexpr,
    NEED_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
    TABLE: tl.constexpr,
    GATE: tl.constexpr,
):
    """Compute dx, dz and partials of dw and db; each of P programs takes every P-th tile of rows.

    The next tiles load while a program works on one. x and dy are read once, dx is written once. Sums over rows for dw
    and db stay in registers until the end, so there is one row of partials per program, not one per tile. With TABLE
    each entry of the table has P programs of its own, and they take the rows of this entry.
    """
    CHUNKS: tl.constexpr = (N_COLS + BLOCK_C - 1) // BLOCK_C
    MASK_ROWS: tl.constexpr = BLOCK_R > 1
    if TABLE:
        entry = tl.program_id(0).to(tl.int64)
        program, programs, n_places = tl.program_id(1), tl.num_programs(1), n_rows // n_entries
        if w_ptr is not None:
            w_ptr += entry * N_COLS
        if b_ptr is not None:
            b_ptr += entry * N_COLS
    else:
        entry, n_entries = tl.full((), 0, tl.int64), tl.full((), 1, tl.int32)
        program, programs, n_places = tl.program_id(0), tl.num_programs(0), n_rows
    ws = ()
    bs = ()
    dw = ()
    db = ()
    for i in tl.static_range(CHUNKS):
        if w_ptr is not None:
            cols = i * BLOCK_C + tl.arange(0, BLOCK_C)
            ws = ws + (load_tile(w_ptr, cols, cols < N_COLS, (i + 1) * BLOCK_C > N_COLS) + offset,)
        if b_ptr is not None:
            cols = i * BLOCK_C + tl.arange(0, BLOCK_C)
            bs = bs + (load_tile(b_ptr, cols, cols < N_COLS, (i + 1) * BLOCK_C > N_COLS),)
        dw = dw + (tl.zeros((BLOCK_R, BLOCK_C), tl.float32),)
        db = db + (tl.zeros((BLOCK_R, BLOCK_C), tl.float32),)

    for tile in tl.range(program, tl.cdiv(n_places, BLOCK_R), programs, num_stages=STAGES):
        places = (tile * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        row_ok = places < n_places
        if TABLE:
            # divided in 32 bits, as in forward
            places32 = places.to(tl.int32)
            rows = ((places32 // repeat).to(tl.int64) * n_entries + entry) * repeat + places32 % repeat
        else:
            rows = places
        rstd = tl.load(stats_ptr + rows, mask=row_ok, other=0.0)
        if HAS_MEAN:
            mean = tl.load(stats_ptr + n_rows + rows, mask=row_ok, other=0.0)
        if STABLE:
            signed = tl.load(stats_ptr + n_rows + n_rows + rows, mask=row_ok, other=1.0)
        ns = ()
        gs = ()
        xs = ()
        zs = ()
        new_dw = ()
        new_db = ()
        for i in tl.static_range(CHUNKS):
            cols = i * BLOCK_C + tl.arange(0, BLOCK_C)
            mask = in_tile(places, cols, n_places, N_COLS, MASK_ROWS, (i + 1) * BLOCK_C > N_COLS)
            x_offsets = (rows * x_row_stride * VEC)[:, None] + cols[None, :]
            dy_offsets = (rows * dy_row_stride * VEC)[:, None] + cols[None, :]
            n = load_tile(x_ptr, x_offsets, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
            g = load_tile(dy_ptr, dy_offsets, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
            if z_ptr is not None:
                z_offsets = (rows * z_row_stride * VEC)[:, None] + cols[None, :]
                z = load_tile(z_ptr, z_offsets, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
                gate, slope = activation_and_slope(z, GATE)
                if FIRST & GATE:
                    # kept in their own dtype they take half the registers
                    xs = xs + (n.to(x_ptr.dtype.element_ty),)
                    zs = zs + (z.to(z_ptr.dtype.element_ty),)
                    n *= gate
            if STABLE:
                attains = mask & (n == signed[:, None])
            if HAS_MEAN:
                # subtract first: rstd·x - rstd·mean is one instruction less, and off by |x|/σ·2⁻²⁴ far from zero
                n -= mean[:, None]
            n *= rstd[:, None]
            if STABLE:
                n = mark(n, attains.to(tl.int32))
            if AFTER & GATE:
                if dz_ptr is not None:
                    ungated = n
                    if w_ptr is not None:
                        ungated *= ws[i][None, :]
                    if b_ptr is not None:
                        ungated += bs[i][None, :]
                    dz_offsets = (rows * N_COLS)[:, None] + cols[None, :]
                    store(dz_ptr, dz_offsets, g * ungated * slope, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
                g *= gate
            new_dw = new_dw + (dw[i] + g * n if NEED_W else dw[i],)
            new_db = new_db + (db[i] + g if NEED_B else db[i],)
            if w_ptr is not None:
                g *= ws[i][None, :]
            ns = ns + (n,)
            gs = gs + (g,)
        dw = new_dw
        db = new_db

        if dx_ptr is not None or (FIRST & GATE and dz_ptr is not None):
            products = gs[0] * ns[0]
            for i in tl.static_range(1, CHUNKS):
                products += gs[i] * ns[i]
            if HAS_MEAN:
                total = gs[0]
                for i in tl.static_range(1, CHUNKS):
                    total += gs[i]
                # reduce both sums at once: half the barriers
                a, c = tl.reduce((products, total), 1, add_pairs)
                c /= N_COLS
            else:
                a = tl.sum(products, 1)
            a /= N_COLS
            if STABLE:
                # values that attain ±m are bit-equal to it; ties share the gradient of m evenly
                attained = marked(ns[0])
                for i in tl.static_range(1, CHUNKS):
                    attained += marked(ns[i])
                attained = tl.sum(attained, 1)
                share = N_COLS * a * eps * (signed * rstd) * rstd / tl.maximum(attained, 1)
            for i in tl.static_range(CHUNKS):
                cols = i * BLOCK_C + tl.arange(0, BLOCK_C)
                mask = in_tile(places, cols, n_places, N_COLS, MASK_ROWS, (i + 1) * BLOCK_C > N_COLS)
                dx = gs[i] * rstd[:, None] - ns[i] * (a * rstd)[:, None]
                if HAS_MEAN:
                    dx -= (c * rstd)[:, None]
                dx_offsets = (rows * N_COLS)[:, None] + cols[None, :]
                if FIRST & GATE:
                    gate, slope = activation_and_slope(zs[i].to(tl.float32), GATE)
                    if dz_ptr is not None:
                        dz = dx * xs[i].to(tl.float32) * slope
                        store(dz_ptr, dx_offsets, dz, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
                    dx *= gate
                if ds_ptr is not None:
                    ds_offsets = (rows * ds_row_stride * VEC)[:, None] + cols[None, :]
                    dx += load_tile(ds_ptr, ds_offsets, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
                if STABLE:
                    dx -= tl.where(marked(ns[i]) == 1, share[:, None], 0.0)
                if dx_ptr is not None:
                    store(dx_ptr, dx_offsets, dx, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)
                if copy_ptr is not None:
                    store(copy_ptr, dx_offsets, dx, mask, MASK_ROWS or (i + 1) * BLOCK_C > N_COLS)

    if NEED_W or NEED_B:
        for i in tl.static_range(CHUNKS):
            cols = i * BLOCK_C + tl.arange(0, BLOCK_C)
            out = partials_ptr + (entry * programs + program) * N_COLS
            if NEED_W:
                tl.store(out + cols, tl.sum(dw[i], 0), mask=cols < N_COLS)
                out += programs * n_entries.to(tl.int64) * N_COLS
            if NEED_B:
                tl.store(out + cols, tl.sum(db[i], 0), mask=cols < N_COLS)

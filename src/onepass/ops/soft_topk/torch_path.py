"""The torch path of soft_topk (CPU, float64, no Triton): the whole state of a row is one threshold.

Rows are (R, n) in fp32 or fp64 with -inf at masked entries; k and eps are (R, 1). The solution of a row is (ref, c)
with gates φ((s - ref)/eps - c): c holds what the rounding of ref loses, which matters once it is divided by eps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.core.sums import block_sums, row_sum

from .torch_gates import CAPPED_EXP, CLAMP, SIGMOID, above_zero, inverse, offsets, phi, slope

# far enough to saturate every gate, finite so that -inf scores stay -inf
ALL_ONES = -1e30
MAX_PASSES = 160
# passes without a bracket (in each round of capped_exp), rounds of capped_exp, largest Newton step in eps
SWIFT_PASSES = 10
SWIFT_MOVES = 3
SWIFT_REACH = 16.0
# beyond this many eps a threshold is a trial point, whose low digits don't matter
FAR = 1e4
# capped_exp recomputes its exponentials if the threshold is this many eps from their ref: the error of e^c grows with c
REACH = 6.0
# scores this many roundings from saturation count as saturated (capped_exp) or have no slope (clamp): otherwise a
# rounding in the sum of many equal gates would look like the gate of another score
EDGE = 16
# columns sampled for the first guess, elements that stay in the cache between the passes of a chunk
SAMPLE = 64
CHUNK = 1 << 17


def _measure(
    s: Tensor, ref: Tensor, c: Tensor, k: Tensor, n: Tensor, eps: Tensor, kind: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Do one pass over rows with n entries; return (Σ gates - k, saturated entries or Σ slopes, Newton's step for c).

    Entries above are counted, which is exact, and only differences from 0 and 1 summed: small gates keep their digits.
    """
    x = (s - ref).div_(eps).sub_(c)
    tiny = torch.finfo(s.dtype).eps
    if kind == CAPPED_EXP:
        below = torch.le(x, -EDGE * tiny, out=torch.empty_like(x))
        rest = row_sum(x.clamp_(max=0).exp_().mul_(below))
        above = s.shape[-1] - below.sum(-1, keepdim=True)
        excess = rest + (above - k)
        # exact for this saturated set; with k or more saturated, Newton on the sum itself
        return excess, above, torch.where(above < k, (rest / (k - above)).log(), excess / rest)
    # (in place throughout: allocating a million columns takes longer than computing them)
    if kind == CLAMP:
        above = torch.gt(x, 0.5, out=torch.empty_like(x))
        count = above.sum(-1, keepdim=True)
        tail = x.clamp_(0, 1).sub_(above)
        rest = row_sum(tail)
        dy = torch.gt(tail.abs_(), EDGE * tiny, out=above).sum(-1, keepdim=True)
    else:
        above = above_zero(x)
        count = above.sum(-1, keepdim=True)
        tail = x.abs_().neg_().exp_()
        tail = tail.div_(1 + tail) if kind == SIGMOID else tail.mul_(0.5)  # not torch.sigmoid, as in phi
        total = row_sum(tail)
        # entries above the threshold are 1 - tail
        rest = total - 2 * row_sum(above.mul_(tail))
        dy = total - row_sum(tail.square_()) if kind == SIGMOID else total
    excess = (count - k) + rest
    step = excess / dy
    if kind != CLAMP:
        # far from the root, since the tails are exponential: Newton on the logarithm of the smaller side
        left = torch.where(k < 0.5 * n, 0.0, n)
        side = (count - left) + rest
        log = side / dy * (side / (k - left)).log()
        step = torch.where((excess.abs() > 0.1 * (k - left).abs()) & log.isfinite(), log, step)
    return excess, dy, step


def _first_guess(s: Tensor, k: Tensor) -> Tensor:
    sample = s[:, :: max(1, s.shape[-1] // SAMPLE)].sort(dim=-1, descending=True).values
    rank = (k * (sample.shape[-1] / s.shape[-1])).long().clamp_(0, sample.shape[-1] - 1)
    return sample.gather(-1, rank)


def _key(x: Tensor) -> Tensor:
    """Return integers in the order of floating-point numbers; neighbouring numbers differ by 1."""
    bits = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    return bits ^ ((bits >> (8 * x.itemsize - 1)) & torch.iinfo(bits.dtype).max)


def _number(key: Tensor) -> Tensor:
    bits = key ^ ((key >> (8 * key.itemsize - 1)) & torch.iinfo(key.dtype).max)
    return bits.view(torch.float64 if key.dtype == torch.int64 else torch.float32)


def _swift(
    s: Tensor, base: Tensor, k: Tensor, n: Tensor, eps: Tensor, kind: int, done: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Newton without a bracket, which solves most rows: return (ref, c, solved)."""
    c, lost, found = torch.zeros_like(base), done, torch.zeros_like(done)
    tiny = torch.finfo(s.dtype).eps
    for _ in range(SWIFT_PASSES):
        moved = torch.where(lost | found, base, base + eps * c)
        c, base = torch.where(lost | found, c, c - (moved - base) / eps), moved
        excess, state, step = _measure(s, base, c, k, n, eps, kind)
        exact = excess.abs() <= 4 * tiny * torch.minimum(k, state) if kind == CLAMP else step.abs() <= _small(s)
        good = (step.abs() < SWIFT_REACH) & ~lost & ~found
        # one more step, unless its rounding changes many equal gates of clamp by more
        worse = exact & (excess.abs() <= state * tiny * c.abs()) if kind == CLAMP else ~good
        c = torch.where(good & ~worse, c + step, c)
        found, lost = found | (good & exact), lost | ~(good | found)
        if not s.is_cuda and bool((found | lost).all()):
            break
    return base, c, found


def _swift_capped(s: Tensor, k: Tensor, eps: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`_swift` for capped_exp on a CPU, which accepts any scores and writes the gates to y.

    Passes work on E = exp((s - ref)/eps). With m entries above a level and S the sum of the others, the next level is
    S/(k - m); it is the solution once it repeats.
    """
    n = s.shape[-1]
    base, solvable = _first_guess(s, k), None
    if not (s.amin().item() > -math.inf and k.amax().item() < n):
        count = (s > -math.inf).sum(-1, keepdim=True).to(s.dtype)
        # rows with a closed form get another k here, so that they end with the others; `_solve` redoes them
        solvable = k < count
        k = torch.where(solvable, k, 0.5 * count)
        base = torch.where(base.isfinite(), base, s.amax(-1, keepdim=True))
    one, columns = s.new_ones(()), s.new_full((), n)
    largest = one * torch.finfo(s.dtype).max
    edge = 1 - EDGE * torch.finfo(s.dtype).eps
    # a little above the guess, which is a score, so that scores equal to it are not saturated
    level = torch.full_like(base, 1.01)
    # as many elements as the caches hold beside the entries of E
    room = y.new_empty(min(y.numel(), CHUNK * torch.get_num_threads()))
    # finite, because entries above the level are multiplied by zero
    torch.minimum(torch.sub(s, base, out=y).div_(eps).exp_(), largest, out=y)
    # a row must repeat its level within a round and moves its ref after it, so that other rows don't change its bits
    stays = torch.ones_like(base, dtype=torch.bool)
    for _ in range(SWIFT_MOVES):
        for _ in range(SWIFT_PASSES):
            below, rest = _below(y, level * edge, room)
            lacking = k - (columns - below)
            last, level = level, rest / lacking
            if not lacking.amin().item() > 0:
                # with k or more above, Newton on the sum itself
                level = torch.where(lacking > 0, level, last * (1 - lacking * last / rest).exp_())
            if torch.equal(level, last):
                break
        c, stays = level.log(), stays & (level == last)
        moves = (c.abs() > REACH) & stays
        if not bool(moves.any()):
            break
        moved = torch.where(moves, base + eps * c, base)
        level = torch.where(moves, (c - (moved - base) / eps).exp_(), level)
        base = moved
        torch.minimum(torch.sub(s, base, out=y).div_(eps).exp_(), largest, out=y)
    torch.minimum(y.mul_(level.reciprocal()), one, out=y)
    c = level.log()
    # a sum too small may lack terms that underflowed
    found = stays & (level == last) & (lacking > 0) & (rest > 1e13 * torch.finfo(s.dtype).tiny) & (c.abs() <= REACH)
    return base, c, found if solvable is None else found & solvable


def _below(y: Tensor, level: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row the number of entries up to the level and their sum; long rows in pieces that stay cached."""
    counts, sums = [], []
    for piece in y.split(max(1, len(room) // len(y)), -1):  # type: ignore[no-untyped-call]
        below = torch.le(piece, level, out=room[: piece.numel()].view(piece.shape))
        counts.append(below.sum(-1, keepdim=True))
        sums.append(block_sums(below.mul_(piece)))
    if len(sums) == 1 and sums[0].shape[-1] == 1:
        return counts[0], sums[0]
    return torch.cat(counts, -1).sum(-1, keepdim=True), torch.cat(sums, -1).sum(-1, keepdim=True)


def _small(s: Tensor) -> float:
    """Return a Newton step whose square is below rounding."""
    return 1e-8 if s.dtype == torch.float64 else 2e-4


def _search(
    s: Tensor, base: Tensor, lo: Tensor, hi: Tensor, k: Tensor, n: Tensor, eps: Tensor, kind: int, done: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (ref, c) of any scores by the bracketed search, see `kernels_search.advance`."""
    tiny = torch.finfo(s.dtype).eps
    infinite = torch.full_like(lo, math.inf)
    lo = torch.maximum(_key(lo) - 1, _key(-infinite))
    hi = torch.minimum(_key(hi) + 1, _key(infinite))
    c, last = torch.zeros_like(base), torch.full_like(base, -1)
    fine, first = torch.zeros_like(done), torch.zeros_like(done)
    capped = kind == CAPPED_EXP
    for i in range(MAX_PASSES):
        excess, state, step = _measure(s, base, c, k, n, eps, kind)
        if capped:
            arrived = (state < k) & ((state == last) | (step == 0))
        else:
            arrived = excess.abs() <= 4 * tiny * torch.minimum(k, state) if kind == CLAMP else step.abs() <= _small(s)
        # no gate is further from its value than the sum is from k
        arrived |= excess.abs() <= 4 * tiny * k.clamp(max=1)
        low = excess >= 0
        at = _key(torch.where(fine, c, base))
        lo = torch.where(low, torch.maximum(lo, at - (~fine & (c < 0)).to(at.dtype)), lo)
        hi = torch.where(low, hi, torch.minimum(hi, at + (~fine & (c > 0)).to(at.dtype)))
        middle = (lo & hi) + ((lo ^ hi) >> 1)
        closed = middle <= lo
        aim = c + step
        moved = base + eps * aim
        left = torch.where(aim.abs() < FAR, aim - (moved - base) / eps, 0.0)
        goal = _key(torch.where(fine, aim, moved))
        flip = first & low
        newton = (goal > lo) & (goal < hi) & step.isfinite() & (i % 4 != 3) & (i % 64 < 32) & ~flip
        last = torch.where(newton & (state < k), state, -1.0)
        narrow = fine & closed
        arrived |= narrow
        # where many equal scores begin to saturate, the sum jumps over k and Newton's steps lead out of the bracket
        finish = torch.where(step.abs() < torch.ones_like(step).masked_fill_(narrow, EDGE * tiny), aim, c)
        if capped:
            # if k entries are saturated, the sum is k already, and a step would unsaturate some
            finish = torch.where(state < k, finish, c)
        if kind == CLAMP:
            finish = torch.where(excess.abs() <= state * tiny * c.abs(), c, finish)
        # once no number lies between the ends, search in units of eps from the nearer end
        end, gap = _number(lo), (_number(hi) - _number(lo)) / eps
        enter = closed & ~fine
        reach = _number(hi)
        next_base = torch.where(fine, base, torch.where(newton, moved, _number(middle)))
        next_c = torch.where(fine, torch.where(newton, aim, _number(middle)), torch.where(newton, left, 0.0))
        next_base = torch.where(enter, end, torch.where(flip, base + eps * reach, next_base))
        next_c = torch.where(enter, 0.5 * gap, torch.where(flip, 0.5 * (c - reach), next_c))
        lo = torch.where(enter, 0, torch.where(flip, _key(c - reach), lo))
        hi = torch.where(enter, _key(gap), torch.where(flip, 0, hi))
        base = torch.where(done | arrived, base, next_base)
        c = torch.where(done, c, torch.where(arrived, finish, next_c))
        fine, first = fine | enter, enter
        done = done | arrived
        if not s.is_cuda and bool(done.all()):
            break
    return base, c


def _solve(s: Tensor, k: Tensor, eps: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    n = s.shape[-1]
    # (aminmax along a dimension takes twenty times as long as these two)
    lo, hi = s.amin(-1, keepdim=True), s.amax(-1, keepdim=True)
    count, endless = torch.full_like(lo, n), torch.zeros_like(lo)
    if s.is_cuda or not bool((hi - lo).isfinite().all()):
        finite = s.isfinite()
        count = finite.sum(-1, keepdim=True).to(s.dtype)
        endless = (s == math.inf).sum(-1, keepdim=True).to(s.dtype)
        lo = torch.where(finite, s, math.inf).amin(-1, keepdim=True)
        hi = torch.where(finite, s, -math.inf).amax(-1, keepdim=True)
        poison = torch.zeros_like(lo).masked_fill_(s.isnan().any(-1, keepdim=True), math.nan)
        lo, hi = lo + poison, hi + poison
        full = torch.where(count > 0, lo, poison)
    else:
        full = lo
    k = torch.where((k > 0) & (eps > 0), k, math.nan)
    ones = k >= count + endless
    shared = ~ones & (endless >= k)
    # closed forms: all valid entries get 1, or the +inf scores share k evenly
    shift = torch.where(~ones & (endless > k), -inverse(k, endless, kind), ALL_ONES)
    ref = torch.where(ones, full, math.inf)
    closed = ones | shared | k.isnan() | full.isnan()
    ref = torch.where(k.isnan() | full.isnan(), math.nan, ref)

    # the thresholds of rows whose scores all equal lo, or all hi, bound this row's
    edge = eps * inverse(k - endless, count, kind)
    lo, hi = lo - edge, hi - edge
    guess = _first_guess(s, k)
    guess = torch.where((guess >= lo) & (guess <= hi), guess, 0.5 * lo + 0.5 * hi)
    rest, count = ~closed, count + endless
    if kind != CAPPED_EXP:
        base, c, found = _swift(s, guess, k, count, eps, kind, closed)
        ref, shift = torch.where(closed, ref, base), torch.where(closed, shift, c)
        rest &= ~found
    if s.is_cuda:
        base, c = _search(s, guess, lo, hi, k, count, eps, kind, ~rest)
        return torch.where(rest, base, ref), torch.where(rest, c, shift)
    if bool(rest.any()):
        at = rest[:, 0].nonzero()[:, 0]
        base, c = _search(s[at], guess[at], lo[at], hi[at], k[at], count[at], eps[at], kind, ~rest[at])
        ref, shift = ref.index_copy(0, at, base), shift.index_copy(0, at, c)
    return ref, shift


def soft_forward(s: Tensor, k: Tensor, eps: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Return gates (R, n) and the solution (R, 2) of every row: (ref, c) with Σ φ((s - ref)/eps - c) = k."""
    if not s.numel():
        return s.clone(), s.new_zeros(len(s), 2)
    y = torch.empty_like(s, memory_format=torch.contiguous_format)
    state = s.new_empty(len(s), 2)
    height = len(s) if s.is_cuda else max(1, CHUNK // s.shape[-1])
    chunks = (x.split(height) for x in (s, k, eps, y, state))  # type: ignore[no-untyped-call]
    for of_s, of_k, of_eps, gates, solution in zip(*chunks, strict=True):
        _fill(of_s, of_k, of_eps, gates, solution, kind)
    return y, state


def _fill(s: Tensor, k: Tensor, eps: Tensor, y: Tensor, state: Tensor, kind: int) -> None:
    """Write gates and solution of some rows."""
    if kind != CAPPED_EXP or s.is_cuda:
        ref, c = _solve(s, k, eps, kind)
        y.copy_(phi(offsets(s, ref, eps).sub_(c), kind))
    else:
        ref, c, found = _swift_capped(s, k, eps, y)
        if not bool(found.all()):
            at = (~found[:, 0]).nonzero()[:, 0]
            some, of_eps = s[at], eps[at]
            base, shift = _solve(some, k[at], of_eps, kind)
            y[at] = phi(offsets(some, base, of_eps).sub_(shift), kind)
            ref, c = ref.index_copy(0, at, base), c.index_copy(0, at, shift)
    torch.cat((ref, c), -1, out=state)


def soft_backward(
    gy: Tensor, s: Tensor, state: Tensor, eps: Tensor, kind: int, need_eps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ds (R, n), dk (R, 1), deps (R, 1) by the implicit function theorem: one formula for all kinds."""
    ds = torch.empty_like(s, memory_format=torch.contiguous_format)
    height = max(1, CHUNK // max(1, s.shape[-1]))
    if s.is_cuda or height >= len(s):
        return ds, *_gradients(gy, s, state, eps, ds, kind, need_eps)
    chunks = (x.split(height) for x in (gy, s, state, eps, ds))  # type: ignore[no-untyped-call]
    of_rows = [_gradients(a, b, c, d, out, kind, need_eps) for a, b, c, d, out in zip(*chunks, strict=True)]
    q, deps = (torch.cat(x) for x in zip(*of_rows, strict=True))
    return ds, q, deps


def _gradients(
    gy: Tensor, s: Tensor, state: Tensor, eps: Tensor, ds: Tensor, kind: int, need_eps: bool
) -> tuple[Tensor, Tensor]:
    """Write the gradient of some rows' scores to ds; return those of k and eps."""
    x = offsets(s, state[:, :1], eps).sub_(state[:, 1:])
    w = slope(x, kind)
    part = torch.mul(gy, w, out=ds).sum(-1, keepdim=True)
    if gy.is_cuda or not bool(part.isfinite().all()):
        # an upstream inf or NaN has no effect where the gate is constant
        ds.copy_(torch.where(w > 0, ds, 0.0))
        part = ds.sum(-1, keepdim=True)
    total = w.sum(-1, keepdim=True)
    q = torch.where(total == 0, 0.0, part / total)
    deps = torch.zeros_like(q)
    if need_eps:
        deps = torch.where(w > 0, (q * w - ds) * x, 0.0).sum(-1, keepdim=True) / eps
    ds.sub_(w.mul_(q)).div_(eps)
    return q, deps

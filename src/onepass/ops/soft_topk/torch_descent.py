"""The torch path of coor_descent: T steps on one number per row.

Rows are (R, n) in fp32 or fp64 with every entry that may not be chosen at -inf, k is (R, 1). After each step all that
is left of the iteration is the threshold -a: an entry above it is saturated. A threshold is kept as ref + off, ref
near it, and E = exp((s - ref)/eps) serves every step that shares an eps: the step is u ← Σ min(E, u)/k.

On a CPU, rows go in chunks that stay in the cache for all T steps, and comparisons give numbers, not bools, which
torch makes, applies and sums several times slower.

The trace (R, 2T) is what backward needs: T thresholds relative to a ref, T - 1 counts of entries above them, the ref.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# exponents of E stay trustworthy this many eps around its ref
WINDOW = 40.0
# elements of E, and of the copy that a step clips, that stay in the cache
CHUNK = 1 << 17
# steps of an eps whose thresholds backward compares with every entry: the next ones lie close to each other, so
# that few entries lie between them, and those are searched
APART = 7
# exponents are cut off here: what is larger was saturated, and its exponential would overflow
HIGHEST = 80.0


def schedule(n_iters: int, eps: float, eps_init: float | None, eps_decay: float) -> list[float]:
    """The eps of each of the T steps, and the one of the final gates."""
    out = [max(eps if eps_init is None else eps_init, eps)]
    for _ in range(n_iters):
        out.append(max(out[-1] * eps_decay, eps))
    return out


def _chunks(s: Tensor) -> list[slice]:
    """Rows that are solved together."""
    step = len(s) if s.is_cuda else max(1, CHUNK // s.shape[-1])
    return [slice(i, i + step) for i in range(0, len(s), step)]


def forward(s: Tensor, k: Tensor, epsilons: list[float], want_trace: bool) -> tuple[Tensor, Tensor]:
    """Gates (R, n) and the trace ((R, 0) when not wanted; here without the counts, which backward finds by itself)."""
    width = 2 * (len(epsilons) - 1) if want_trace else 0
    if not s.numel():
        return s.clone(), s.new_zeros(len(s), width)
    y, trace = torch.empty_like(s), s.new_zeros(len(s), width)
    clipped = torch.empty_like(s[_chunks(s)[0]])
    for rows in _chunks(s):
        _forward(s[rows], k[rows], epsilons, y[rows], clipped[: len(s[rows])], trace[rows])
    return y, trace


def _forward(s: Tensor, k: Tensor, epsilons: list[float], ratios: Tensor, clipped: Tensor, trace: Tensor) -> None:
    """Fill `ratios` with the gates of some rows, and their trace if it has room."""
    steps = len(epsilons) - 1
    k = torch.where(k > 0, k, math.nan)
    top = s.amax(-1, keepdim=True)
    full = not s.is_cuda and s.amin().item() > -math.inf
    if full:
        valid = torch.full_like(top, s.shape[-1])
    else:
        valid = torch.ne(s, -math.inf, out=clipped).sum(-1, keepdim=True)
    off = epsilons[0] * (valid.clamp(min=1) / k).log_()
    top = torch.where(valid > 0, top, off)
    start = ref = torch.minimum(top, off)
    off = off - ref
    nobody = (valid == 0).to(s.dtype) * k
    # one row of each for a step, which torch fills faster than it joins columns
    levels, refs = s.new_empty(steps, len(s), 1), s.new_empty(steps, len(s), 1)
    slots = levels.unbind()
    level, eps = torch.exp(off / epsilons[0], out=slots[0]), epsilons[0]
    refs[0] = ref
    t = 1
    while True:
        fresh = t == 1 or epsilons[t] != eps
        leaves = ~_within(level)
        if fresh or s.is_cuda or bool(leaves.any()):
            off = eps * level.log()
            moved = torch.minimum(top, ref + off)
            if not fresh:
                moved = torch.where(leaves, moved, ref)
            shifted = moved != ref
            level = torch.where(shifted | (epsilons[t] != eps), (((ref - moved) + off) / epsilons[t]).exp(), level)
            ref, eps = moved, epsilons[t]
            torch.sub(s, ref, out=ratios).div_(eps).exp_()
        if t == steps:
            break
        # a step is a clipped sum and a division; all steps of an eps go without a look, and those after one that
        # went too far go again
        end = t + 1
        while end < steps and epsilons[end] == eps and not s.is_cuda:
            end += 1
        for slot in slots[t:end]:
            torch.sum(torch.minimum(ratios, level, out=clipped), -1, keepdim=True, out=slot)
            level = (slot if full else slot.add_(nobody)).div_(k)
        if end - t > 1:
            fine = _within(levels[t:end]).flatten(1).all(-1)
            if not bool(fine.all()):
                end = t + 1 + int(fine.to(torch.uint8).argmin())
        level = slots[end - 1]
        refs[t:end] = ref
        t = end
    ratios.mul_(1 / level).clamp_(max=1)
    if trace.shape[-1]:
        thresholds = levels.log_().mul_(level.new_tensor(epsilons[:steps])[:, None, None]).add_(refs - start)
        trace[:, :steps] = thresholds[..., 0].t()
        trace[:, -1:] = start


def _within(level: Tensor) -> Tensor:
    """Where exponentials of these thresholds are trustworthy (or NaN)."""
    return ~((level > math.exp(WINDOW)) | (level < math.exp(-WINDOW)))


def backward(gy: Tensor, s: Tensor, trace: Tensor, k: Tensor, epsilons: list[float]) -> tuple[Tensor, Tensor]:
    """(ds (R, n), dk (R, 1)): a recursion over T numbers per row, and one exponential per element and distinct eps.

    An entry takes part in every step whose threshold before it was not yet passed.
    """
    if not s.numel():
        return s.clone(), torch.zeros_like(k)
    # rows in one piece, whatever the strides of s
    ds, dk = torch.empty_like(s, memory_format=torch.contiguous_format), torch.empty_like(k)
    buffers = [torch.empty_like(ds[_chunks(s)[0]]) for _ in range(4)]
    for rows in _chunks(s):
        z, *rest = (b[: len(s[rows])] for b in buffers)
        torch.sub(s[rows], trace[rows, -1:], out=z)
        dk[rows] = _backward(gy[rows], z, trace[rows, : len(epsilons) - 1], k[rows], epsilons, ds[rows], rest)
    return ds, dk


def _backward(
    gy: Tensor, z: Tensor, level: Tensor, k: Tensor, epsilons: list[float], g: Tensor, buffers: list[Tensor]
) -> Tensor:
    """Fill g with the scores' gradient of some rows; z and level (R, T) are measured from the same ref."""
    steps = len(epsilons) - 1
    ratios, above, weight = buffers
    last = level[:, -1:]
    groups = _groups(level, epsilons)
    _exponential(z, last, epsilons[-1], ratios)
    torch.le(z, last, out=above).mul_(ratios)
    torch.mul(gy, above, out=g)
    total = g.sum(-1, keepdim=True)
    if g.is_cuda or not bool(total.isfinite().all()):
        # an upstream inf or NaN where the gate can't change says nothing
        g.copy_(torch.where(above > 0, g, 0.0))
        total = g.sum(-1, keepdim=True)
    g.div_(epsilons[-1])
    total /= epsilons[-1]

    # how many entries lie above each threshold
    count = torch.empty_like(level[:, :-1])
    columns, counts = level.split(1, -1), count.split(1, -1)  # type: ignore[no-untyped-call]
    between = {}
    for first, end in groups:
        apart = min(end - 1, first - 1 + APART) if not z.is_cuda and end - first > 2 * APART else end - 1
        for t in range(first - 1, apart):
            torch.sum(torch.gt(z, columns[t], out=above), -1, keepdim=True, out=counts[t])
        if apart < end - 1:
            between[first] = _Between(z, level[:, apart : end - 1], above, weight)
            count[:, apart : end - 1] = between[first].count
    # da of step t is da of the last one times the shares that every later step passed on
    eps = level.new_tensor(epsilons[:-1])
    passed = count * ((level[:, :-1] - level[:, 1:]) / eps[1:]).exp_() / k
    passed = torch.where(count == 0, 0.0, passed).flip(-1).cumprod(-1).flip(-1)
    da = total * torch.cat((passed, torch.ones_like(last)), -1)
    for first, end in groups:
        base = level[:, end - 1 : end]
        shares = da[:, first:end] / k * ((base - level[:, first:end]) / epsilons[first]).exp_()
        if (end, epsilons[first]) != (steps, epsilons[-1]):
            _exponential(z, base, epsilons[first], ratios)
        searched = between.get(first)
        apart = end - first - (0 if searched is None else searched.level.shape[-1])
        if searched is None:
            weight.zero_()
        else:
            searched.weigh(shares[:, apart:], z, weight)
        for column, share in zip(columns[first - 1 :], shares.split(1, -1)[:apart], strict=False):  # type: ignore[no-untyped-call]
            weight.addcmul_(torch.le(z, column, out=above), share)
        g.addcmul_(ratios, weight, value=-1)
    return (da * eps).sum(-1, keepdim=True) / k


def _exponential(z: Tensor, base: Tensor, eps: float, out: Tensor) -> Tensor:
    """exp((z - base)/eps), finite: what is too large for that was saturated, and counts nowhere."""
    return torch.sub(z, base, out=out).div_(eps).clamp_(max=HIGHEST).exp_()


class _Between:
    """Thresholds (R, t) close to each other, and the entries between the lowest and the highest of them."""

    def __init__(self, z: Tensor, level: Tensor, buffer: Tensor, other: Tensor) -> None:
        self.level, self.order = level.sort(dim=-1)
        lowest, highest = self.level[:, :1], self.level[:, -1:]
        torch.gt(z, lowest, out=buffer)
        torch.gt(z, highest, out=other)
        beyond = other.sum(-1, keepdim=True)
        inside = buffer.sub_(other)
        sizes = inside.sum(-1, keepdim=True)
        self.at = inside.bool().view(-1).nonzero()[:, 0]
        # rows side by side for the search, filled up with entries below all thresholds
        self.filled = torch.arange(int(sizes.max()), device=z.device) < sizes
        rows = torch.full(self.filled.shape, -math.inf, dtype=z.dtype, device=z.device)
        rows.masked_scatter_(self.filled, z.view(-1)[self.at])
        self.place = torch.searchsorted(self.level, rows)
        # an entry at place p lies above the p lowest thresholds
        slots = level.shape[-1] + 1
        number = torch.arange(len(z), device=z.device)[:, None] * slots + self.place
        held = torch.bincount(number.view(-1), minlength=len(z) * slots).view(-1, slots)
        over = beyond + held.flip(-1).cumsum(-1).flip(-1)[:, 1:]
        self.count = torch.empty_like(level).scatter_(-1, self.order, over)

    def weigh(self, shares: Tensor, z: Tensor, weight: Tensor) -> None:
        """Fill `weight` with the sum, for every entry, of the shares (R, t) of the thresholds that it is not above."""
        sums = shares.gather(-1, self.order).flip(-1).cumsum(-1).flip(-1)
        torch.le(z, self.level[:, :1], out=weight).mul_(sums[:, :1])
        sums = torch.cat((sums, torch.zeros_like(sums[:, :1])), -1)
        weight.view(-1)[self.at] = sums.gather(-1, self.place).masked_select(self.filled)


def _groups(level: Tensor, epsilons: list[float]) -> list[tuple[int, int]]:
    """Runs [first, end) of steps that can share an exponential: one eps, thresholds within the window of the last."""
    out = []
    end = level.shape[-1]
    while end > 1:
        first = end - 1
        while first > 1 and epsilons[first - 1] == epsilons[end - 1] and not level.is_cuda:
            first -= 1
        if end - first > 1:
            spread = (level[:, first : end - 1] - level[:, end - 1 : end]).abs_().amax(0)
            far = (spread > WINDOW * epsilons[first]).nonzero()
            first += int(far[-1]) + 1 if len(far) else 0
        out.append((first, end))
        end = first
    return out

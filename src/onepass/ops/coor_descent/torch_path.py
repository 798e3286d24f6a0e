"""The torch path of coor_descent: T steps on one number per row.

Rows are (R, n) in fp32 or fp64 with -inf at masked entries, k is (R, 1). After each step the whole state of a row is
the threshold -a: entries above it are saturated. The threshold is kept as ref + off with ref near it, and
E = exp((s - ref)/eps) serves all steps with one eps: a step is u ← Σ min(E, u)/k.

On a CPU, rows are processed in chunks that stay in the cache for all T steps. Comparisons write numbers: torch creates,
applies and sums bools several times slower.

The trace (R, 2T) holds what backward needs: T thresholds relative to a ref, T - 1 counts of entries above, the ref.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.core.sums import block_sums

# E is accurate while the threshold lies within this many eps of ref
WINDOW = 40.0
# elements per core: E and its clipped copy stay in the cache of the core
CHUNK = 1 << 17
# backward compares every entry with the first thresholds of an eps, this many. Later thresholds lie close together, so
# it searches only the few entries between them
APART = 7
# larger exponents are capped: their entries were saturated, and their exponentials would overflow
HIGHEST = 80.0


def schedule(n_iters: int, eps: float, eps_init: float | None, eps_decay: float) -> list[float]:
    """Return the eps of each of the T steps, then that of the final gates."""
    out = [max(eps if eps_init is None else eps_init, eps)]
    for _ in range(n_iters):
        out.append(max(out[-1] * eps_decay, eps))
    return out


def _room() -> int:
    """Return how many elements stay in the caches of the cores that torch uses."""
    return CHUNK * torch.get_num_threads()


def _height(s: Tensor) -> int:
    """Return how many rows are processed together."""
    return len(s) if s.is_cuda else max(1, _room() // s.shape[-1])


class _Exponentials:
    """E = exp((s - ref)/eps) of some rows, kept in `out`; rows longer than `room` are processed in pieces."""

    def __init__(self, s: Tensor, out: Tensor, room: Tensor) -> None:
        width = max(1, len(room) // len(s))
        self.pieces = [
            (of_s, of_out, room[: of_s.numel()].view(of_s.shape))
            for of_s, of_out in zip(*(x.split(width, -1) for x in (s, out)), strict=True)  # type: ignore[no-untyped-call]
        ]

    def make(self, ref: Tensor, eps: Tensor) -> None:
        for s, out, _ in self.pieces:
            torch.sub(s, ref, out=out).div_(eps).exp_()

    def clipped_sum(self, level: Tensor) -> Tensor:
        """Return Σ min(E, level) of each row."""
        sums = [block_sums(torch.minimum(e, level, out=room)) for _, e, room in self.pieces]
        blocks = sums[0] if len(sums) == 1 else torch.cat(sums, -1)
        return blocks if blocks.shape[-1] == 1 else blocks.sum(-1, keepdim=True)

    def become_gates(self, level: Tensor) -> None:
        factor, one = level.reciprocal(), level.new_ones(())
        for _, out, _ in self.pieces:
            torch.minimum(out.mul_(factor), one, out=out)


def forward(s: Tensor, k: Tensor, epsilons: list[float], want_trace: bool) -> tuple[Tensor, Tensor]:
    """Return gates (R, n) and the trace, (R, 0) if not wanted; its counts stay 0, because `backward` computes them."""
    width = 2 * (len(epsilons) - 1) if want_trace else 0
    y, trace = torch.empty_like(s, memory_format=torch.contiguous_format), s.new_zeros(len(s), width)
    if s.numel():
        room = s.new_empty(s.numel() if s.is_cuda else min(s.numel(), _room()))
        chunks = (x.split(_height(s)) for x in (s, k, y, trace))  # type: ignore[no-untyped-call]
        for of_s, of_k, gates, notes in zip(*chunks, strict=True):
            _forward(of_s, of_k, epsilons, _Exponentials(of_s, gates, room), notes)
    return y, trace


def _forward(s: Tensor, k: Tensor, epsilons: list[float], ratios: _Exponentials, trace: Tensor) -> None:
    """Compute the gates of some rows and, if `trace` has columns, their trace."""
    steps, wanted = len(epsilons) - 1, trace.shape[-1] > 0
    # 0-d tensors: torch takes three times as long to combine a column with a Python number
    eps = s.new_full((), epsilons[0])
    top = s.amax(-1, keepdim=True)
    nobody = None
    if not s.is_cuda and s.amin().item() > -math.inf:
        off = (k / s.shape[-1]).log_().mul_(eps).neg_()
    else:
        valid = (s != -math.inf).sum(-1, keepdim=True)
        off = (k / valid.clamp(min=1)).log_().mul_(eps).neg_()
        top = torch.where(valid > 0, top, off)
        nobody = (valid == 0) * k
    start = ref = torch.minimum(top, off)
    off = off - ref
    if wanted:
        trace[:, :1], trace[:, -1:] = off, start
    level = (off / eps).exp_()
    t, now, leaves = 1, epsilons[0], None
    while True:
        if epsilons[t] != now or leaves is not None:
            off = eps * level.log()
            moved = torch.minimum(top, ref + off)
            if epsilons[t] != now:
                now, leaves = epsilons[t], None
                eps = s.new_full((), now)
            if leaves is not None:
                moved = torch.where(leaves, moved, ref)
            fresh = (ref - moved).add_(off).div_(eps).exp_()
            level = fresh if leaves is None else torch.where(leaves, fresh, level)
            ref = moved
        ratios.make(ref, eps)
        if t == steps:
            break
        # CPU: do all steps of an eps, then check E's range once. CUDA: do one step, as a check would make the host wait
        first = t
        levels: list[Tensor] = []
        while t < steps and epsilons[t] == now and not (levels and s.is_cuda):
            total = ratios.clipped_sum(level)
            level = (total if nobody is None else total.add_(nobody)).div_(k)
            levels.append(level)
            t += 1
        # levels are monotone while ref stays, so the last one shows whether any has left E's range
        leaves = _leaves(level)
        if leaves is not None and not s.is_cuda:
            # redo the steps after the first one that left
            at, leaves = next((i, out) for i, x in enumerate(levels) if (out := _leaves(x)) is not None)
            t, level = first + at + 1, levels[at]
        if wanted:
            thresholds = torch.cat(levels[: t - first]).log_().mul_(eps).view(t - first, len(s))
            trace[:, first:t] = thresholds.t() + (ref - start)
        if leaves is None and t == steps and epsilons[t] == now:
            break
    ratios.become_gates(level)


def _leaves(level: Tensor) -> Tensor | None:
    """Return a mask of the levels that have left E's range; None if there are none (never None on CUDA: no wait)."""
    lowest, highest = math.exp(-WINDOW), math.exp(WINDOW)
    if not level.is_cuda:
        low, high = torch.aminmax(level)
        if low.item() >= lowest and high.item() <= highest:
            return None
    # NaN compares false: its row keeps its ref
    out = (level > highest) | (level < lowest)
    return out if level.is_cuda or bool(out.any()) else None


def backward(gy: Tensor, s: Tensor, trace: Tensor, k: Tensor, epsilons: list[float]) -> tuple[Tensor, Tensor]:
    """Return ds (R, n), dk (R, 1): a recursion over T numbers per row, one exponential per element and distinct eps.

    An entry contributes to step t if it does not exceed the threshold of step t - 1.
    """
    if not s.numel():
        return s.clone(), torch.zeros_like(k)
    # contiguous, whatever the strides of s
    ds, dk = torch.empty_like(s, memory_format=torch.contiguous_format), torch.empty_like(k)
    height, thresholds = _height(s), trace[:, : len(epsilons) - 1]
    # one allocation: four separate ones would return to the system, and their pages would fault in at each call
    buffers = s.new_empty(4, min(height, len(s)), s.shape[-1])
    chunks = (x.split(height) for x in (gy, s, trace[:, -1:], thresholds, k, ds, dk))  # type: ignore[no-untyped-call]
    for upstream, of_s, ref, level, of_k, of_ds, of_dk in zip(*chunks, strict=True):
        z, *rest = (b[: len(of_s)] for b in buffers)
        torch.sub(of_s, ref, out=z)
        of_dk.copy_(_backward(upstream, z, level, of_k, epsilons, of_ds, rest))
    return ds, dk


def _backward(
    gy: Tensor, z: Tensor, level: Tensor, k: Tensor, epsilons: list[float], g: Tensor, buffers: list[Tensor]
) -> Tensor:
    """Write the gradient of some rows' scores to g and return that of k; z and level (R, T) share one ref."""
    steps = len(epsilons) - 1
    ratios, above, weight = buffers
    last = level[:, -1:]
    groups = _groups(level, epsilons)
    _exponential(z, last, epsilons[-1], ratios)
    torch.le(z, last, out=above).mul_(ratios)
    torch.mul(gy, above, out=g)
    total = g.sum(-1, keepdim=True)
    if g.is_cuda or not bool(total.isfinite().all()):
        # an upstream inf or NaN has no effect where the gate is constant
        g.copy_(torch.where(above > 0, g, 0.0))
        total = g.sum(-1, keepdim=True)
    g.div_(epsilons[-1])
    total /= epsilons[-1]

    # number of entries above each threshold
    count = torch.empty_like(level[:, :-1])
    between = {}
    for first, end in groups:
        apart = min(end - 1, first - 1 + APART) if not z.is_cuda and end - first > 2 * APART else end - 1
        for t in range(first - 1, apart):
            torch.sum(torch.gt(z, level[:, t : t + 1], out=above), -1, keepdim=True, out=count[:, t : t + 1])
        if apart < end - 1:
            between[first] = _Between(z, level[:, apart : end - 1], above, weight)
            count[:, apart : end - 1] = between[first].count
    # da of step t is da of the last step times the factors of all later steps
    if level.is_cuda:
        # numbers copied from the host's memory would make it wait
        eps = torch.cat([level.new_full((1,), e) for e in epsilons[:-1]])
    else:
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
        for t in range(apart):
            torch.le(z, level[:, first - 1 + t : first + t], out=above)
            weight.addcmul_(above, shares[:, t : t + 1])
        g.addcmul_(ratios, weight, value=-1)
    return (da * eps).sum(-1, keepdim=True) / k


def _exponential(z: Tensor, base: Tensor, eps: float, out: Tensor) -> Tensor:
    """Write exp((z - base)/eps) to `out`, capped to stay finite: capped entries were saturated and have weight 0."""
    return torch.sub(z, base, out=out).div_(eps).clamp_(max=HIGHEST).exp_()


class _Between:
    """Thresholds (R, t) that lie close together, and the entries between the lowest and the highest."""

    def __init__(self, z: Tensor, level: Tensor, buffer: Tensor, other: Tensor) -> None:
        self.level, self.order = level.sort(dim=-1)
        lowest, highest = self.level[:, :1], self.level[:, -1:]
        torch.gt(z, lowest, out=buffer)
        torch.gt(z, highest, out=other)
        beyond = other.sum(-1, keepdim=True)
        inside = buffer.sub_(other)
        sizes = inside.sum(-1, keepdim=True)
        self.at = inside.bool().view(-1).nonzero()[:, 0]
        # searchsorted needs rows of one length: pad with -inf, below all thresholds
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
        """Write to `weight`, for each entry, the sum of `shares` (R, t) over the thresholds that it does not exceed."""
        sums = shares.gather(-1, self.order).flip(-1).cumsum(-1).flip(-1)
        torch.le(z, self.level[:, :1], out=weight).mul_(sums[:, :1])
        sums = torch.cat((sums, torch.zeros_like(sums[:, :1])), -1)
        weight.view(-1)[self.at] = sums.gather(-1, self.place).masked_select(self.filled)


def _groups(level: Tensor, epsilons: list[float]) -> list[tuple[int, int]]:
    """Return runs [first, end) of steps that share an exponential: one eps, thresholds within WINDOW of the last."""
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

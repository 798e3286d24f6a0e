"""Rows of tokens that are spread over devices: what travels between the steps of a fused layer, without autograd.

A fused layer that is given a `Row` computes on this device's tokens. Scores, chosen keys and values, and the edges of
windows come from the other devices, and so do the parts of the gradients of what all of them read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .packing import Packing, Samples, of_rows
from .parts import Edges, Range, edges, parts

# keys of packed sequences are cut to a multiple of so many: steps and kernels meet few lengths
GRAIN = 64

# torch 2.13 renames both
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


def start_sending(
    x: Tensor, given: Sequence[Range], taken: Sequence[Range], group: Any
) -> tuple[Tensor, Callable[[], object]]:  # fmt: skip
    """Do as `send`, but return at once, with a call that waits until all is there."""
    into, out_of = ([b - a for a, b in ranges] for ranges in (taken, given))
    received = x.new_empty(sum(into), len(x), x.shape[2])
    work: Any = dist.all_to_all_single(
        received, x.transpose(0, 1).contiguous(), into, out_of, group=group, async_op=True
    )  # type: ignore[no-untyped-call]
    return received.transpose(0, 1), work.wait


def send(x: Tensor, given: Sequence[Range], taken: Sequence[Range], group: Any) -> Tensor:
    """Send tokens (batch, n, dim), those of range given[i] to device i in turn; return those sent here, in turn."""
    received, wait = start_sending(x, given, taken, group)
    wait()
    return received


def pieces(x: Tensor, ranges: Sequence[Range], begin: int) -> Tensor:
    """Return the tokens in ranges of a row, one range after another; x (batch, n, dim) has those from `begin` on."""
    found = [x[:, a - begin : b - begin] for a, b in ranges if a < b]
    return found[0] if len(found) == 1 else torch.cat(found, 1) if found else x[:, :0]


def put_pieces(x: Tensor, ranges: Sequence[Range], begin: int, more: Tensor, add: bool = True) -> None:
    """Add to x in place what :func:`pieces` would return of another x, or without `add` put it there."""
    done = 0
    for a, b in ranges:
        if a < b:
            into, part = x[:, a - begin : b - begin], more[:, done : done + b - a]
            into.add_(part) if add else into.copy_(part)
            done += b - a


class Chosen(NamedTuple):
    """Some of a row's chosen tokens, in their order; those of this device are all among them."""

    places: Tensor  # (batch, places): which of this device's tokens; < 0 or beyond them: one of another device, or none
    slots: Tensor  # which of the k they are


class Sorted(NamedTuple):
    """A choice (batch, k) in the order of the tokens."""

    at: Tensor
    order: Tensor  # which of the k they are
    starts: Tensor  # (batch, devices + 1): where those of each device begin


@lru_cache(64)
def _bounds(n: int, devices: int, batch: int, device: torch.device) -> Tensor:
    bounds = [begin for begin, _ in parts(n, devices)]
    # not of inference mode: a later call may be recorded
    with torch.inference_mode(False):
        return torch.tensor([[*bounds, n]] * batch, device=device)


@lru_cache(64)
def _places(k: int, devices: int, batch: int, places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the slots (k,), and where each device's places begin, row by row; last: beyond all of them."""
    with torch.inference_mode(False):
        first = torch.arange(devices * batch, device=device).view(devices, batch).t() * places
        return torch.arange(k, device=device), F.pad(first, (0, 1), value=devices * batch * places + k)


class Counts:
    """Small numbers on their way to the host."""

    def __init__(self, counts: Tensor) -> None:
        self._host, self._event = counts, None
        if counts.is_cuda:
            self._host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._host.copy_(counts, non_blocking=True)
            self._event = torch.cuda.current_stream(counts.device).record_event()

    def read(self) -> list[Any]:
        """Return them, when they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()  # type: ignore[no-any-return]


class Row:
    """A row of n tokens of which this device has those from `begin` to `end`, for one call of a layer.

    Attributes:
        mask, scores: of whole rows, and of this device's tokens, once the scores are there.
        packing: of packed sequences, whose choices are those of a batch; the rest is one row.
        own, gates: which of the chosen tokens are here, and their gates.
    """

    own: Chosen
    gates: Tensor
    missing = False  # whether fewer keys exist than were asked for
    scores: Tensor
    at: Tensor  # where in the row the chosen tokens are
    keys: Tensor  # places of the chosen keys here
    sources: Tensor  # of the keys: see `locate`
    key_slots: Tensor | None = None  # which of a batch's keys are attended to; None: all
    checks: Tensor | None = None  # what devices said of their packing

    def __init__(self, n: int, group: Any, packing: Packing | None = None) -> None:
        self.n, self.group, self.packing = n, group, packing
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.most = max(1, -(-n // self.size))
        self.begin, self.end = parts(n, self.size)[self.rank]
        self.mask: Tensor | None = None

    def whole(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Return the scores ([R,] batch, n) of whole rows, and keep these and their mask (batch, n): one all-gather."""
        self.scores, lead, own = scores, scores.shape[:-1], self.end - self.begin
        most = self.most + (self.packing is not None)
        here = scores if scores.shape[-1] == own else scores[..., :own]
        if mask is not None:
            here = torch.cat((here.view(lead[:-1].numel(), *mask.shape[:1], own), mask[None, :, :own].to(here.dtype)))
        sent = (F.pad(here, (0, most - own)) if own < most else here).contiguous()
        if self.packing is not None:
            self.packing.sign(sent)
        found = sent.new_empty(self.size * len(sent), *sent.shape[1:])
        _all_gather(found, sent, group=self.group)
        one = sent.numel() == most
        whole = found.view(*sent.shape[:-1], -1) if one else torch.cat(found.chunk(self.size), -1)
        if self.packing is not None:
            self.mask = self.packing.mask
            found, self.checks = self.packing.batch(whole.view(*lead, -1), self.most)
            return found
        whole = whole if whole.shape[-1] == self.n else whole[..., : self.n].contiguous()
        if mask is None:
            return whole
        self.mask = whole[-1] > 0
        return whole[:-1].view(*lead, self.n)

    def here(self, t: Tensor, tokens: int, left: int = 0, right: int = 0) -> Tensor:
        """Return of whole rows (…, n) this device's tokens and those beside them, then zeros up to `tokens` in all."""
        if self.packing is None:
            own = t[..., self.begin - left : self.end + right]
        else:
            own = t.flatten(-2).index_select(-1, self.packing.slots).unsqueeze(-2)
        return F.pad(own, (0, tokens - own.shape[-1])) if own.shape[-1] < tokens else own.contiguous()

    def flat(self, t: Tensor) -> Tensor:
        """Return what belongs to a choice (batch, k), of packed sequences as one row (1, sequences·k)."""
        return t if self.packing is None else self.packing.flat(t)

    def heard(self, t: Tensor) -> Tensor:
        """Return what belongs to all chosen keys as what belongs to those that are attended to, in their order."""
        return t if self.key_slots is None else self.flat(t).gather(1, self.key_slots)

    def sort(self, at: Tensor) -> Sorted:
        """Return a choice (batch, k) of whole rows in the order of the tokens, and so device after device."""
        at = at if self.packing is None else self.packing.of_row(at)
        ordered, order = at.sort(dim=-1)
        return Sorted(ordered, order, torch.searchsorted(ordered, _bounds(self.n, self.size, len(at), at.device)))

    def ask(self, *found: Sorted) -> Counts:
        """Start to tell the host where each device's tokens begin: ([choices,] batch, devices + 1)."""
        starts = found[0].starts if len(found) == 1 else torch.stack([s.starts for s in found])
        if self.packing is None:
            return Counts(starts)
        # after them, what tells whether all devices packed alike
        checks = self.packing.exchange(self.group) if self.checks is None else self.checks
        return Counts(torch.cat((starts, checks.expand(*starts.shape[:-1], self.size)), -1))

    def pick(self, found: Sorted, starts: list[list[int]], everyone: bool = False) -> Chosen:
        """Return the chosen tokens that are here, in as many places as the fullest row here or `everyone` needs."""
        if self.packing is not None:
            self.packing.agree(starts[0][self.size + 1 :], self.group)
        k = found.at.shape[1]
        ranks = range(self.size) if everyone else (self.rank,)
        most = max((row[r + 1] - row[r] for row in starts for r in ranks), default=0)
        # kernels take no empty tensors, and on a GPU few shapes repeat if each may differ
        grain = 64 if found.at.is_cuda else 1
        places = min(k, -(-max(1, most) // grain) * grain)
        if len(starts) == 1:
            first = min(starts[0][self.rank], k - places)
            at, slots = (t[:, first : first + places] for t in found[:2])
        else:
            # as many from there on, or the last ones
            slot = _places(k, self.size, len(starts), places, found.at.device)[0][:places]
            which = found.starts[:, self.rank, None].clamp_max(k - places) + slot
            at, slots = found.at.gather(1, which), found.order.gather(1, which)
        return Chosen(at - self.begin, slots)

    def choose(self, found: Sorted, gates: Tensor, starts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Keep which of the chosen tokens are here; return their places among this device's tokens, and gates."""
        self.own = self.pick(found, starts)
        self.gates = self.flat(gates).gather(1, self.own.slots)
        return self.own.places, self.gates

    def real(self, places: Tensor) -> Tensor:
        """Return which places are those of tokens here."""
        return (places >= 0) & (places < self.end - self.begin)

    def locate(self, found: Sorted, starts: list[list[int]], places: int) -> Tensor:
        """Return where each of the chosen (batch·k,) is in what :meth:`gather` receives, its length for one missing."""
        at, order, begins = found
        if self.packing is not None:
            return self._locate_packed(found, starts, places)
        slot, first = _places(at.shape[1], self.size, len(at), places, at.device)
        self.missing, owner = any(row[0] for row in starts), at.div(self.most, rounding_mode="floor")
        # a missing one, −1, has the last owner
        owner = owner.remainder(self.size + 1) if self.missing else owner
        # each device's places begin where `pick` has them begin
        source = (first - begins.clamp_max(at.shape[1] - places)).gather(1, owner) + slot
        source = torch.empty_like(source).scatter_(1, order, source).view(-1)
        return source.clamp_max(self.size * len(at) * places) if self.missing else source

    def _locate_packed(self, found: Sorted, starts: list[list[int]], places: int) -> Tensor:
        """Return the same of the chosen that exist, in the order of the tokens; keep which of all they are."""
        k = found.at.shape[1]
        missing = max(0, k - -(-(k - starts[0][0]) // GRAIN) * GRAIN)
        self.missing, self.key_slots, at = missing < starts[0][0], found.order[:, missing:], found.at[:, missing:]
        owner = at.clamp_min(0).div(self.most, rounding_mode="floor")
        source = (owner * places - found.starts.clamp_max(k - places).gather(1, owner)).view(-1)
        source += torch.arange(missing, k, device=at.device)
        return source.where(at.view(-1) >= 0, self.size * places) if self.missing else source

    def gather(self, rows: Tensor, sources: Tensor) -> Callable[[], Tensor]:
        """Start to gather all devices' rows (batch·places, dim); return a call for the chosen ones (batch·k, dim)."""
        every = rows.new_empty(self.size * len(rows), rows.shape[1])
        work = _all_gather(every, rows.contiguous(), group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            # one that does not exist is masked: any finite row will do
            return every.index_select(0, sources.clamp_max(len(every) - 1) if self.missing else sources)

        return finish

    def gather_backward(self, grad: Tensor, sources: Tensor, rows: int) -> Callable[[], Tensor]:
        """Start to sum over the devices; return a call for the gradient of this device's rows (batch·places, dim)."""
        every = self.size * rows
        sent = grad.new_zeros(every + self.missing, grad.shape[1]).index_copy_(0, sources, grad)
        sent = sent[:every] if self.missing else sent
        found = grad.new_empty(rows, grad.shape[1])
        work = _reduce_scatter(found, sent, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return found

        return finish

    def edges(self, window: int, causal: bool) -> Edges:
        """Return which keys of local attention travel."""
        return edges(self.n, self.size, self.rank, window, causal, self.packing is not None)

    def project(
        self, tokens: Tensor, weight: Tensor, batch: int, window: int, causal: bool
    ) -> tuple[int, Tensor, Callable[[], None]]:  # fmt: skip
        """Return `left`, tokens·weightᵀ (batch·(left + here + right), 3·inner), and a call that waits for the sides."""
        left, right, given, taken = self.edges(window, causal)
        here, columns = len(tokens) // batch, len(weight)
        qkv = tokens.new_empty(batch * (left + here + right), columns)
        rows = qkv.view(batch, -1, columns)
        if batch == 1:
            torch.mm(tokens, weight.t(), out=qkv[left : left + here])
        else:
            rows[:, left : left + here] = torch.mm(tokens, weight.t()).view(batch, here, columns)
        part = rows[..., columns // 3 :]
        received, wait = start_sending(pieces(part, given, self.begin - left), given, taken, self.group)

        def arrive() -> None:
            wait()
            put_pieces(part, taken, self.begin - left, received, add=False)

        return left, qkv, arrive

    def project_backward(self, grad: Tensor, batch: int, window: int, causal: bool) -> Callable[[], Tensor]:
        """Start to send the sides of the gradient of :meth:`project`; return a call for that of the tokens here."""
        left, right, given, taken = self.edges(window, causal)
        rows = grad.view(batch, -1, grad.shape[1])
        here = rows.shape[1] - left - right
        part = rows[..., grad.shape[1] // 3 :]
        received, wait = start_sending(pieces(part, taken, self.begin - left), taken, given, self.group)

        def finish() -> Tensor:
            wait()
            put_pieces(part, given, self.begin - left, received)
            return rows[:, left : left + here].reshape(-1, grad.shape[1])

        return finish

    def total(self, *tensors: Tensor) -> list[Tensor]:
        """Return the sums of tensors (batch, …) over the devices, by one all-reduce."""
        rows = [t if t.shape[0] == 1 else t.reshape(1, -1) for t in tensors]
        flat = torch.cat(rows, 1)
        dist.all_reduce(flat, group=self.group)
        split: Any = torch.split_with_sizes(flat, [t.shape[1] for t in rows], 1)
        return [t if t.shape == like.shape else t.view(like.shape) for t, like in zip(split, tensors, strict=True)]

    def backward(
        self, dy: Tensor | None, x: Tensor, mask: Tensor | None, inverse: Tensor,
        parts: Sequence[tuple[Tensor, Any, Tensor | None]], stride: int, weight: float,
    ) -> tuple[list[Tensor | None], Tensor | None]:  # fmt: skip
        """Return the gradients of whole rows' gates, by one all-reduce, and what exploration adds to the vector's.

        `dy` is the gradient of this device's outputs, x and `mask` are its tokens', `inverse` their 1/rms.
        `parts` holds, for each list of gates: the gates, this device's part of their gradient, and of which of them
        that is (None: all). Exploration has a `weight`, and samples one token of every `stride`; 0: none.
        """
        if dy is None:
            return [None] * len(parts), None
        grads: Any = [p if slots is None else self._spread(g, slots, p) for g, p, slots in parts]
        if not stride:
            return [*self.total(*grads)], None
        pick, real, total, back = self.samples(stride, mask)
        lengths: Tensor = torch.linalg.vector_norm(pick(dy), dim=-1, dtype=grads[0].dtype)
        inverse, tokens = pick(inverse.view(x.shape[:2])), pick(x).to(lengths.dtype)
        if real is None:
            *totals, sums = self.total(*grads, total(lengths))
            gain = lengths - sums / -(-self.n // stride)
        else:
            # keep the content of padding out, even NaN
            lengths, tokens = lengths.where(real, 0), tokens.where(real[..., None], 0)
            *totals, sums, numbers = self.total(*grads, total(lengths), total(real).to(lengths.dtype))
            gain = (lengths - back(sums / numbers.clamp_min(1))).where(real, 0)
        return [*totals], torch.mv(tokens.flatten(0, 1).mT, (gain * inverse).flatten()) * (-weight * stride)

    def _spread(self, gates: Tensor, slots: Tensor, part: Tensor) -> Tensor:
        whole = torch.zeros_like(gates)
        self.flat(whole).scatter_(1, slots, part)
        return whole

    def samples(self, stride: int, mask: Tensor | None) -> Samples:
        """Return every `stride`-th token of each row or packed sequence, of those that are here."""
        if self.packing is not None:
            return self.packing.samples(stride)
        here = slice(-self.begin % stride, max(0, self.end - self.begin), stride)
        return of_rows(here, mask)

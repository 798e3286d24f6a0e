"""Packed sequences on a row that is spread over devices: their choices are those of a padded batch, the rest of a row.

Each device knows all bounds, so nothing but one number travels: it tells whether the others have the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# odd numbers that spread the bits of an int64
_A, _B, _C = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


class Samples(NamedTuple):
    """Some of this device's tokens."""

    pick: Callable[[Tensor], Tensor]  # of what belongs to all of them (batch, tokens, …)
    real: Tensor | None  # which of these exist; None: all
    sums: Callable[[Tensor], Tensor]  # (batch, these) → sums over each row or sequence
    back: Callable[[Tensor], Tensor]  # what belongs to rows or sequences → what belongs to these


def of_rows(some: slice, mask: Tensor | None) -> Samples:
    """Return the samples that are a slice of each row."""
    real = None if mask is None else mask[:, some]
    return Samples(lambda t: t[:, some], real, lambda t: t.sum(-1, True), lambda t: t)


class Packing:
    """Sequences one after another on a row of n tokens, of which this device has those from `begin` to `end`.

    Attributes:
        mask: (sequences, longest): which places of the padded batch hold tokens.
        slots: where in the padded batch this device's tokens are.
    """

    def __init__(self, caller: str, cu_seqlens: Tensor, longest: int, n: int, begin: int, end: int) -> None:
        self._caller, self._given, self.longest, self._n, self.begin = caller, cu_seqlens, longest, n, begin

        def count(first: int, last: int) -> Tensor:
            return torch.arange(first, last, device=cu_seqlens.device)

        bounds = cu_seqlens.long()
        lengths = bounds.diff()
        fits = (bounds[0] == 0) & (bounds[-1] == n) & ((lengths >= 0) & (lengths <= longest)).all()
        mixed = (bounds * _A + count(0, len(bounds)) * _B + longest) * _C
        sum_ = (mixed ^ (mixed >> 31)).sum() % 2**22  # exact in fp32
        self._check = torch.where(fits, sum_, -1 - sum_)
        # wrong bounds are named when all devices know of them; until then they lead to no place that does not exist
        bounds = bounds.clamp(0, n).expand(max(2, len(bounds)))
        self._begins, self._ends = bounds[:-1], bounds[1:]
        places = count(0, longest)
        self.mask = places < (self._ends - self._begins)[:, None]
        self._tokens = (self._begins[:, None] + places).clamp_max(n - 1)
        self._own = count(begin, end)
        self._sequence = torch.searchsorted(self._ends, self._own, right=True).clamp_max(len(self.mask) - 1)
        self._start = self._begins.index_select(0, self._sequence)
        slots = self._sequence * longest + self._own - self._start
        self.slots = slots.clamp(0, self.mask.numel() - 1)

    def sign(self, sent: Tensor) -> None:
        """Write this device's number to what it sends of the scores: after its tokens."""
        sent[..., -1] = self._check

    def batch(self, sent: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return scores (…, 1, all that devices sent) as those of the batch (…, sequences, longest), and the numbers.

        Each device sent `most` scores, and its number.
        """
        at = (self._tokens + self._tokens.div(most, rounding_mode="floor")).flatten()
        checks = sent.flatten(0, -2)[0, most :: most + 1].long()
        return sent.index_select(-1, at).view(*sent.shape[:-2], *self.mask.shape), checks

    def agree(self, checks: list[int], group: Any) -> None:
        """Raise ValueError on every device if their numbers are not those of the same fitting bounds."""
        if checks[0] >= 0 and len(set(checks)) == 1:
            return
        said: list[Any] = [None] * len(checks)
        dist.all_gather_object(said, f"{self._given.tolist()} and {self.longest}", group=group)
        if len(set(said)) > 1:
            every = "; ".join(f"device {i}: {s}" for i, s in enumerate(said))
            raise ValueError(
                f"{self._caller}: devices that share a sequence must agree on cu_seqlens and max_seqlen; {every}"
            )
        raise ValueError(
            f"{self._caller}: cu_seqlens must rise from 0 to the {self._n} tokens of x by at most max_seqlen; got "
            f"{said[0]}"
        )

    def exchange(self, group: Any) -> Tensor:
        """Return the numbers of all devices."""
        checks = [torch.empty_like(self._check) for _ in range(dist.get_world_size(group))]
        dist.all_gather(checks, self._check, group=group)
        return torch.stack(checks)

    def padded(self, scores: Any) -> tuple[Any, Any]:
        """Return scores (1, [R,] n), a DTensor, as those of the batch (sequences, [R,] longest), and its mask."""
        from torch.distributed.tensor import DTensor, Replicate

        where = [Replicate()] * scores.device_mesh.ndim
        whole = scores.redistribute(placements=where).to_local()[0]
        batch = whole.index_select(-1, self._tokens.flatten()).unflatten(-1, self._tokens.shape).movedim(-2, 0)
        of_all = (
            DTensor.from_local(t, scores.device_mesh, where, run_check=False) for t in (batch.contiguous(), self.mask)
        )
        return tuple(of_all)  # type: ignore[return-value]

    def flat(self, t: Tensor) -> Tensor:
        """Return what belongs to a choice (sequences, [R,] k) as what belongs to one of the row, (R, sequences·k)."""
        return t.view(1, -1) if t.dim() == 2 else t.transpose(0, 1).contiguous().flatten(1)

    def of_row(self, at: Tensor) -> Tensor:
        """Return a choice (sequences, [R,] k) of the batch as one of the row, (R, sequences·k); −1 stays."""
        begins = self._begins.view(-1, *(1,) * (at.dim() - 1))
        return self.flat(torch.where(at >= 0, at + begins, -1))

    def windows(self, window: int, causal: bool, tokens: int, shift: int) -> tuple[Tensor, Tensor]:
        """Return first and last + 1 of the keys that this device's tokens see (1, tokens), counted from `shift` on."""
        own = self._start + (self._own - self._start).div(window, rounding_mode="floor") * window
        ends = self._ends.index_select(0, self._sequence)
        first = torch.maximum(own - window, self._start)
        last = self._own + 1 if causal else torch.minimum(own + 2 * window, ends)
        # a token that stands in for none sees itself
        more = 0, tokens - len(own)
        first, last = (F.pad(t - shift, more, value=i)[None].int() for i, t in enumerate((first, last)))
        return first, last

    def seen(self, keys: Tensor, queries: Tensor, at: Tensor, window: int) -> Tensor:
        """Return first and last + 1 of the keys that chosen queries see, (2, 1, queries) int32.

        `keys`: where in the row the chosen keys are, rising; `queries`: where these are, and `at` in their sequences.
        With a `window`, they see the keys of the windows before their own; without, of their sequence.
        """
        if window:
            last = queries - at % window
        else:
            sequence = torch.searchsorted(self._ends, queries, right=True).clamp_max(len(self.mask) - 1)
            last = self._ends[sequence]
        # a missing query, −1, comes first and sees less than others, so that neither decreases
        return torch.searchsorted(keys[0], torch.stack((queries - at, last)), out_int32=True)

    def samples(self, stride: int) -> Samples:
        """Return each `stride`-th token of each sequence, of those that are here."""
        position, sequences = self._own - self._start, len(self.mask)
        others = position % stride != 0
        at = others.sort(stable=True).indices[: len(others) // stride + sequences]
        real, sequence, each = ~others[at], self._sequence[at], -(-self.longest // stride)
        # places of their own, so that sums have the same bits each time; the last is for those that do not exist
        place = torch.where(real, sequence * each + position[at] // stride, sequences * each)

        def sums(t: Tensor) -> Tensor:
            every = t.new_zeros(sequences * each + 1).index_copy_(0, place, t[0])
            return every[:-1].view(1, sequences, each).sum(-1)

        return Samples(lambda t: t[:, at], real[None], sums, lambda t: t[:, sequence])

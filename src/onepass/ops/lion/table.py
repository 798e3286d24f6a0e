"""The table that a launch reads: addresses, sizes and hyperparameters of many tensors, on the device.

All words are int64, in this order, for n tensors in G param groups:

* 5·G words: per group 10 fp32 numbers, the fields of `Row` and one of padding;
* 5·n words: addresses of gradients, parameters, momenta, extras, scales;
* 2·n words: sizes in elements, param groups;
* n words: the first chunk of each tensor; then the tensor of every SPAN-th chunk.

A step copies only what changed, in one asynchronous copy from pinned memory: the hyperparameters, with the addresses of
gradients if those moved. The rest is copied at the first step and after parameters moved.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.launch import cdiv

from .definition import Row

ROW_FLOATS = 10
REAL = {torch.complex64: torch.float32, torch.complex32: torch.float16}
# dtypes that the kernels take; complex tensors as pairs of real numbers
KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int8, *REAL})


class Shape(NamedTuple):
    """Launch shape: elements per tile, tiles per program, warps."""

    block: int
    tiles: int
    num_warps: int


def shape_of(m_type: torch.dtype) -> Shape:
    """Return the launch shape of a momentum's dtype.

    Timed on an H200: two tiles per program hide the load latency of 16-bit tiles of 1024 (94 → 100 % of copy). With
    int8 momenta, a program is one warp: it holds all elements of a scale, so warps never wait for each other.
    """
    return Shape(256, 8, 1) if m_type == torch.int8 else Shape(1024, 2, 4)


class Scalars(NamedTuple):
    """Scalars on the device that a step reads there: the host does not wait for their values."""

    grad_scale: Tensor | None = None  # divides gradients
    clip: Tensor | None = None  # multiplies gradients
    found_inf: Tensor | None = None  # non-zero skips the step

    def to(self, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return all three as fp32 on the device."""
        return tuple(  # type: ignore[return-value]
            t if t is None or (t.dtype == torch.float32 and t.device == device)
            else t.to(device, torch.float32, non_blocking=True)
            for t in self
        )  # fmt: skip


class Rows(NamedTuple):
    """Hyperparameters of all groups as bytes; those that are tensors on a device overwrite them at their places."""

    packed: bytes
    places: Sequence[int] = ()
    scalars: Sequence[Tensor] = ()


def pack_rows(rows: Sequence[Row]) -> Rows:
    """Pack hyperparameters; rates and decays that are tensors stay on their device."""
    scalars = [(ROW_FLOATS * k + i, t) for k, row in enumerate(rows) for i, t in enumerate(row[:2])]
    scalars = [(place, t) for place, t in scalars if isinstance(t, Tensor)]
    packed = struct.pack("9f4x" * len(rows), *(0.0 if isinstance(x, Tensor) else x for row in rows for x in row))
    return Rows(packed, [place for place, _ in scalars], [t for _, t in scalars])  # type: ignore[misc]


class Columns(NamedTuple):
    """Parallel lists of tensors: parameters, gradients, momenta, remainders of parameters, scales of int8 momenta."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    extras: Sequence[Tensor | None]
    scales: Sequence[Tensor | None]

    def take(self, where: Sequence[int]) -> Columns:
        """Return the columns of the tensors at these places."""
        return Columns(*([c[i] for i in where] for c in self))  # type: ignore[arg-type]


# pinned memory from which graphs copy their tables at each replay. It is kept for ever: a graph may outlive its
# `Launch`, and nothing signals its end
_replayed: list[Tensor] = []


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Launch:
    """One launch per step: tensors alike in device, dtypes, alignment, caution, and in having remainders or not.

    Attributes:
        where: places of the tensors in the plan's columns.
        sizes: of the tensors, in elements.
        dtypes: of parameter, gradient, momentum; real, as a complex number counts as two.
    """

    def __init__(
        self, where: list[int], sizes: list[int], groups: list[int], cautious_decay: bool, device: torch.device,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], remainder: bool, aligned: bool, cautious: bool,
    ) -> None:  # fmt: skip
        self.device, self.dtypes, self.remainder, self.aligned = device, dtypes, remainder, aligned
        self.cautious, self.cautious_decay = cautious, cautious_decay
        self.where, self.sizes = where, sizes
        self.shape = shape_of(dtypes[2])
        self._table: Tensor | None = None
        self._sent: Any = None  # hyperparameters that the table on the device has, and which of them are tensors
        self._grads = array("q")
        self._fixed = b""  # all other addresses
        self._grads_moved = self._fixed_moved = True
        self._spare: list[Tensor] = []
        self.chunk = self.shape.block * self.shape.tiles
        chunks = torch.tensor([cdiv(n, self.chunk) for n in sizes], dtype=torch.int64, device="cpu")
        ends = chunks.cumsum(0)
        self.n_chunks = int(ends[-1])
        # `find_tensor` counts a span of 32 within one warp; a larger span makes a smaller map
        self.span = 32 if self.n_chunks <= 1 << 21 else 128
        coarse = torch.searchsorted(ends, torch.arange(0, self.n_chunks, self.span, device="cpu"), right=True)
        words = array("q", sizes)
        words.extend(groups)
        words.extend((ends - chunks).tolist())
        words.extend(coarse.tolist())
        self._body = words.tobytes()

    def take_grads(self, addresses: Sequence[int]) -> bool:
        """Take new addresses of gradients; if they lack the launch's alignment, keep the old ones and return False."""
        words = array("q", addresses)
        taken = not self.aligned or _multiples_of_16(words)
        if taken:
            self._grads, self._grads_moved = words, True
        return taken

    def take_fixed(self, addresses: Sequence[Sequence[int]]) -> bool:
        """Take new addresses of parameters and states; return False as `take_grads` does."""
        words = array("q", chain.from_iterable(addresses))
        taken = not self.aligned or _multiples_of_16(words)
        if taken:
            self._fixed, self._fixed_moved = words.tobytes(), True
        return taken

    def _pinned(self, n_bytes: int) -> Tensor | None:
        if self.device.type != "cuda":
            return None
        return torch.empty(n_bytes // 8, dtype=torch.int64, device="cpu", pin_memory=True)

    def _send(self, table: Tensor, data: bytes, pinned: Tensor | None) -> Tensor:
        source = torch.frombuffer(bytearray(data), dtype=torch.int64)
        if pinned is not None:
            # torch's pinned allocator reuses this memory only after the copy: steps neither wait nor overwrite it
            source = pinned[: len(source)].copy_(source)
        table[: len(source)].copy_(source, non_blocking=True)
        return source

    def table(self, rows: Rows, capturable: bool = False) -> Tensor:
        """Return the up-to-date table; `capturable` prepares memory for a later graph capture."""
        packed, sent = rows.packed, rows[:2]
        if _capturing(self.device):
            # at every replay the graph copies this memory to a table of its own, so nothing else may write to it. The
            # `moved` flags stay set: the table of steps outside the graph still has the old addresses
            data = packed + self._grads.tobytes() + self._fixed + self._body
            pinned = self._spare.pop() if self._spare else self._pinned(len(data))
            graph_table = torch.empty(len(data) // 8, dtype=torch.int64, device=self.device)
            _replayed.append(self._send(graph_table, data, pinned))
            return graph_table
        if self._table is None or self._fixed_moved:
            data = packed + self._grads.tobytes() + self._fixed + self._body
        elif self._grads_moved:
            data = packed + self._grads.tobytes()
        else:
            data = b"" if sent == self._sent else packed
        if data:
            if self._table is None:
                self._table = torch.empty(len(data) // 8, dtype=torch.int64, device=self.device)
            self._send(self._table, data, self._pinned(len(data)))
            self._sent, self._grads_moved, self._fixed_moved = sent, False, False
        table = self._table
        assert table is not None
        while capturable and table.is_cuda and len(self._spare) < 2:
            # pinned memory for the next capture, which should not allocate it: one table for a norm, one for a step
            self._spare.append(torch.empty(len(table), dtype=torch.int64, device="cpu", pin_memory=True))
        return table

    def step(self, rows: Rows, scalars: Scalars, capturable: bool) -> None:
        """Launch the update."""
        from . import kernels

        table = self.table(rows, capturable)
        if rows.places:
            fields = table.view(torch.float32)
            torch._foreach_copy_(
                [fields[i].reshape(t.shape) for i, t in zip(rows.places, rows.scalars, strict=True)],
                [t.to(self.device) for t in rows.scalars],
            )
        agreed = torch.empty(len(self.sizes), dtype=torch.int64, device=self.device) if self.cautious else None
        kernels.launch(self, table, len(rows.packed) // (4 * ROW_FLOATS), agreed, *scalars.to(self.device))


def _multiples_of_16(words: array[int]) -> bool:
    return not words or not bool((torch.frombuffer(words, dtype=torch.int64) & 15).any())


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


_data_ptr = torch.Tensor.data_ptr
# (tensors, addresses, places) → bool compares all addresses in one call; only torch's CUDA builds have it
_addresses_equal: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class Plan:
    """The launches of one set of parameters and states.

    Between steps, gradients and parameters may move in memory, and states together with their parameters. Dtypes and
    layouts must stay. The plan keeps no gradient alive.
    """

    def __init__(self, columns: Columns, groups: Sequence[int], cautious: Sequence[bool], cautious_decay: bool) -> None:
        self.fixed = columns._replace(params=list(columns.params), grads=())
        sizes = [p.numel() * (2 if p.is_complex() else 1) for p in columns.params]
        by_launch: dict[tuple[Any, ...], list[int]] = {}
        for i, (p, g, m, e, s) in enumerate(zip(*columns, strict=True)):
            aligned = not (_address(p) | _address(g) | _address(m) | _address(e) | _address(s)) & 15
            dtypes = (REAL.get(p.dtype, p.dtype), REAL.get(g.dtype, g.dtype), REAL.get(m.dtype, m.dtype))
            if sizes[i]:
                by_launch.setdefault((p.device, dtypes, e is not None, aligned, cautious[i]), []).append(i)
        self.launches = [
            Launch(where, [sizes[i] for i in where], [groups[i] for i in where], cautious_decay, *launch_key)
            for launch_key, where in by_launch.items()
        ]
        self._whole = len(self.launches) == 1 and len(self.launches[0].where) == len(columns.params)
        self._at_params: list[int] = []
        # code that assigns `state.data` (to the CPU and back) moves all states, so a check of up to 31 finds it;
        # checking each of a thousand would take a tenth of the host time
        self._some_states = columns.exp_avgs[:: max(1, len(columns.exp_avgs) // 16)]
        self._at_states = list(map(_data_ptr, self._some_states))
        self._at_grads: list[int] = []
        self._places = list(range(len(columns.params)))
        self._moved = True

    def states_moved(self) -> bool:
        """Return whether momenta moved in memory: then a new plan is needed."""
        return list(map(_data_ptr, self._some_states)) != self._at_states

    def params_moved(self) -> bool:
        """Return whether parameters moved in memory; the next `refresh` then takes their new addresses.

        The caller must check that their layouts are unchanged: a plan compares addresses only.
        """
        self._moved = not self._are_at(self.fixed.params, self._at_params)
        return self._moved

    def refresh(self, grads: list[Tensor]) -> bool:
        """Take the current addresses: of gradients, and after `params_moved` of parameters and states.

        Return False if an address lacks the alignment of its launch: then a new plan is needed.
        """
        if not self._are_at(grads, self._at_grads):
            at_grads = list(map(_data_ptr, grads))
            for launch in self.launches:
                if not launch.take_grads(at_grads if self._whole else [at_grads[i] for i in launch.where]):
                    self._at_grads = []
                    return False
            self._at_grads = at_grads
        if self._moved:
            at_params = list(map(_data_ptr, self.fixed.params))
            # states may have moved with their parameters: read their addresses too
            columns = [at_params, *(list(map(_address, c)) for c in self.fixed[2:])]
            for launch in self.launches:
                if not launch.take_fixed([[c[i] for i in launch.where] for c in columns]):
                    self._at_params = []
                    return False
            self._at_params, self._moved = at_params, False
        return True

    def _are_at(self, tensors: Sequence[Tensor], addresses: list[int]) -> bool:
        if len(addresses) != len(tensors):
            return False
        if _addresses_equal is None:
            return list(map(_data_ptr, tensors)) == addresses
        return bool(_addresses_equal(tensors, addresses, self._places))

    def step(self, rows: Rows, scalars: Scalars, capturable: bool = False) -> None:
        """Update all tensors; call `refresh` before."""
        for launch in self.launches:
            launch.step(rows, scalars, capturable)

    def norm(self, rows: Rows, max_norm: Tensor, grad_scale: Tensor | None) -> Tensor:
        """Return (sum of squares, norm, clip coefficient) of the gradients of one device; call `refresh` before."""
        from . import kernels

        device, n_groups = self.launches[0].device, len(rows.packed) // (4 * ROW_FLOATS)
        # rows of 4 keep each result at 16 bytes, the alignment that kernels are compiled for
        out = torch.empty(len(self.launches), 3, 4, dtype=torch.float32, device=device)
        scratch = (
            torch.empty(kernels.norm_programs(out), dtype=torch.float32, device=device),
            torch.zeros((), dtype=torch.int32, device=device),
        )
        before: Tensor | None = None
        for i, launch in enumerate(self.launches):
            # each launch adds to the sum of the one before
            table = launch.table(rows)
            kernels.launch_norm(launch, table, n_groups, before, scratch, out[i], max_norm, grad_scale)
            before = out[i, 0, 0]
        return out[-1, :, 0]

"""What one launch reads: a table on the device with the addresses, sizes and hyperparameters of many tensors.

All words are int64, in this order, for n tensors in G param groups:

* 5·G words: per group 10 fp32 hyperparameters, the fields of `Row` and one of padding;
* n each: addresses of gradients, parameters, momenta, extras, scales;
* n each: sizes in elements; param groups;
* n: first chunk of each tensor; then the tensor of every SPAN-th chunk.

Between steps only the hyperparameters are sent again, and the gradients' addresses when they moved: in one
asynchronous copy from pinned memory. The rest is sent once, and again when parameters moved.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.launch import cdiv

from .torch_path import Row

ROW_FLOATS = 10
REAL = {torch.complex64: torch.float32, torch.complex32: torch.float16}
# what the kernels have a type for
KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int8, *REAL})


class Shape(NamedTuple):
    """How a launch cuts tensors up: elements of a tile, tiles of a program, warps, streaming caches."""

    block: int
    tiles: int
    num_warps: int
    stream: bool


def shape_of(p_type: object, m_type: object) -> Shape:
    """Shape of a launch; the types as the kernel names them or as torch does.

    Timed on an H200: two tiles a program hide the load latency that 16-bit tiles of 1024 leave open (94 → 100 % of
    copy). With int8 momenta, programs of one warp, which has all elements of a scale, wait for no other warp.
    """
    return Shape(256, 8, 1, False) if m_type in ("i8", torch.int8) else Shape(1024, 2, 4, False)


class Scalars(NamedTuple):
    """Device scalars that a step takes into account without waiting for them."""

    grad_scale: Tensor | None = None  # gradients are divided by it
    clip: Tensor | None = None  # gradients are multiplied by it
    found_inf: Tensor | None = None  # non-zero skips the step

    def to(self, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return all of them as fp32 on the device."""
        return tuple(  # type: ignore[return-value]
            t if t is None or (t.dtype == torch.float32 and t.device == device)
            else t.to(device, torch.float32, non_blocking=True)
            for t in self
        )  # fmt: skip


class Rows(NamedTuple):
    """Hyperparameters of all groups: as bytes, and those that only the device knows with their places."""

    packed: bytes
    places: Sequence[int] = ()
    scalars: Sequence[Tensor] = ()


def pack_rows(rows: Sequence[Row], places: Sequence[tuple[int, int]] = (), scalars: Sequence[Tensor] = ()) -> Rows:
    """Lay out hyperparameters; `places` are (group, field) of the device scalars."""
    packed = struct.pack("9f4x" * len(rows), *(x for row in rows for x in row))
    return Rows(packed, [ROW_FLOATS * k + field for k, field in places], scalars)


class Columns(NamedTuple):
    """Parallel lists of tensors: parameters, gradients, momenta, what modes keep beside, scales of int8 momenta."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    extras: Sequence[Tensor | None]
    scales: Sequence[Tensor | None]

    def take(self, where: Sequence[int]) -> Columns:
        """Return the columns of some tensors."""
        return Columns(*([c[i] for i in where] for c in self))  # type: ignore[arg-type]


# what graphs copy their tables from at each replay: they may outlive the launch, and nobody tells when one ends
_replayed: list[Tensor] = []


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Launch:
    """The tensors of one device, dtype combination, mode and alignment: one kernel launch a step.

    Attributes:
        where: the tensors' places in the plan's columns.
        dtypes: of parameter, gradient, momentum (real ones: a complex number counts as two).
    """

    def __init__(
        self,
        device: torch.device,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        mode: int,
        aligned: bool,
        cautious: bool,
        cautious_decay: bool,
    ) -> None:
        self.device, self.dtypes, self.mode, self.aligned = device, dtypes, mode, aligned
        self.cautious, self.cautious_decay = cautious, cautious_decay
        self.where: list[int] = []
        self.sizes: list[int] = []
        self.groups: list[int] = []
        self.shape = shape_of(dtypes[0], dtypes[2])
        self._table: Tensor | None = None
        self._sent = b""  # hyperparameters of the table on the device
        self._grads = array("q")
        self._fixed = b""  # all other addresses
        self._grads_moved = self._fixed_moved = True
        self._spare: list[Tensor] = []

    def close(self) -> None:
        """Every tensor is known: lay out the chunks."""
        self.chunk = self.shape.block * self.shape.tiles
        chunks = torch.tensor([cdiv(n, self.chunk) for n in self.sizes], dtype=torch.int64, device="cpu")
        ends = chunks.cumsum(0)
        self.n_chunks = int(ends[-1])
        # a larger span makes a smaller map; a span of 32 is counted within one warp
        self.span = 32 if self.n_chunks <= 1 << 21 else 128
        coarse = torch.searchsorted(ends, torch.arange(0, self.n_chunks, self.span, device="cpu"), right=True)
        words = array("q", self.sizes)
        words.extend(self.groups)
        words.extend((ends - chunks).tolist())
        words.extend(coarse.tolist())
        self._body = words.tobytes()

    def take_grads(self, addresses: Sequence[int]) -> bool:
        """Take new addresses of gradients; False when the launch can't, with the old ones kept."""
        words = array("q", addresses)
        if self.aligned and not _multiples_of_16(words):
            return False
        self._grads, self._grads_moved = words, True
        return True

    def take_fixed(self, addresses: Sequence[Sequence[int]]) -> bool:
        """Take new addresses of everything else."""
        words = array("q")
        for column in addresses:
            words.extend(column)
        if self.aligned and not _multiples_of_16(words):
            return False
        self._fixed, self._fixed_moved = words.tobytes(), True
        return True

    def _pinned(self, n_bytes: int) -> Tensor | None:
        if self.device.type != "cuda":
            return None
        return torch.empty(n_bytes // 8, dtype=torch.int64, device="cpu", pin_memory=True)

    def _send(self, table: Tensor, data: bytes, pinned: Tensor | None) -> Tensor:
        source = torch.frombuffer(bytearray(data), dtype=torch.int64)
        if pinned is not None:
            # torch's pinned allocator keeps the memory until the copy is done: no step waits, and none overwrites it
            source = pinned[: len(source)].copy_(source)
        table[: len(source)].copy_(source, non_blocking=True)
        return source

    def table(self, packed: bytes, capturable: bool = False) -> Tensor:
        """Return the up-to-date table."""
        if _capturing(self.device):
            # a graph copies from this memory at every replay, so that nothing else may ever write to it; its table is
            # the graph's own. What moved stays marked: the table of steps outside the graph still has the old addresses
            data = packed + self._grads.tobytes() + self._fixed + self._body
            pinned = self._spare.pop() if self._spare else self._pinned(len(data))
            own = torch.empty(len(data) // 8, dtype=torch.int64, device=self.device)
            _replayed.append(self._send(own, data, pinned))
            return own
        if self._table is None or self._fixed_moved:
            data = packed + self._grads.tobytes() + self._fixed + self._body
        elif self._grads_moved:
            data = packed + self._grads.tobytes()
        else:
            data = b"" if packed == self._sent else packed
        if data:
            if self._table is None:
                self._table = torch.empty(len(data) // 8, dtype=torch.int64, device=self.device)
            self._send(self._table, data, self._pinned(len(data)))
            self._sent, self._grads_moved, self._fixed_moved = packed, False, False
        table = self._table
        assert table is not None
        while capturable and table.is_cuda and len(self._spare) < 2:
            # for the next capture, during which no pinned memory should be allocated: one for a norm, one for a step
            self._spare.append(torch.empty(len(table), dtype=torch.int64, device="cpu", pin_memory=True))
        return table

    def step(self, rows: Rows, scalars: Scalars, capturable: bool) -> None:
        """Launch the update."""
        from . import kernels_triton

        table = self.table(rows.packed, capturable)
        if rows.places:
            fields = table.view(torch.float32)
            torch._foreach_copy_(
                [fields[i].reshape(t.shape) for i, t in zip(rows.places, rows.scalars, strict=True)],
                [t.to(self.device) for t in rows.scalars],
            )
        agreed = torch.empty(len(self.sizes), dtype=torch.int64, device=self.device) if self.cautious else None
        kernels_triton.launch(
            table, self.n_chunks, len(self.sizes), len(rows.packed) // (4 * ROW_FLOATS), self.dtypes, self.mode,
            self.aligned, agreed, self.cautious_decay, *scalars.to(self.device), (self.span, *self.shape),
        )  # fmt: skip

    def norm(self, rows: Rows, before: Tensor | None, room: Any, out: Tensor, max_norm: Tensor, scale: Any) -> None:
        """Launch the norm of the gradients, on top of the sum of squares `before`."""
        from . import kernels_triton

        kernels_triton.launch_norm(
            self.table(rows.packed), self.n_chunks, len(self.sizes), len(rows.packed) // (4 * ROW_FLOATS),
            self.dtypes[1], self.aligned, before, room, out, max_norm, scale, self.span, self.chunk,
        )  # fmt: skip


def _multiples_of_16(words: array[int]) -> bool:
    return not words or not bool((torch.frombuffer(words, dtype=torch.int64) & 15).any())


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


_data_ptr = torch.Tensor.data_ptr
# torch's CUDA builds compare addresses in one call: (tensors, addresses, places) → bool
_addresses_equal: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class Plan:
    """The launches of one set of parameters and states.

    Memory may move from step to step (that of states only when their parameters' does); dtypes and layouts may not.
    Gradients are not kept.
    """

    def __init__(
        self,
        columns: Columns,
        modes: Sequence[int],
        groups: Sequence[int],
        cautious: Sequence[bool] | None = None,
        cautious_decay: bool = False,
    ) -> None:
        self.fixed = columns._replace(params=list(columns.params), grads=())
        self.launches: list[Launch] = []
        launches: dict[object, Launch] = {}
        for i, (p, g, m, e, s) in enumerate(zip(*columns, strict=True)):
            size = p.numel() * (2 if p.is_complex() else 1)
            if not size:
                continue
            aligned = not (_address(p) | _address(g) | _address(m) | _address(e) | _address(s)) & 15
            dtypes = (REAL.get(p.dtype, p.dtype), REAL.get(g.dtype, g.dtype), REAL.get(m.dtype, m.dtype))
            careful = cautious is not None and cautious[i]
            key = (p.device, dtypes, modes[i], aligned, careful)
            if key not in launches:
                launches[key] = Launch(p.device, dtypes, modes[i], aligned, careful, cautious_decay)
            launch = launches[key]
            launch.where.append(i)
            launch.sizes.append(size)
            launch.groups.append(groups[i])
        self.launches = list(launches.values())
        for launch in self.launches:
            launch.close()
        self._whole = len(self.launches) == 1 and len(self.launches[0].where) == len(columns.params)
        self._at_params: list[int] = []
        # who writes `state.data` moves all states, to the CPU and back: some of them tell; a look at each of a thousand
        # would be a tenth of the host's time
        self._some_states = columns.exp_avgs[:: max(1, len(columns.exp_avgs) // 16)]
        self._at_states = list(map(_data_ptr, self._some_states))
        self._at_grads: list[int] = []
        self._places = list(range(len(columns.params)))
        self._moved = True

    def states_moved(self) -> bool:
        """Tell whether momenta got other memory: then a new plan is needed."""
        return list(map(_data_ptr, self._some_states)) != self._at_states

    def params_moved(self) -> bool:
        """Look where the parameters are now; the next `refresh` takes it from here.

        Memory that they moved to may be laid out otherwise, for which a plan has no eyes: that is the caller's to ask.
        """
        self._moved = not self._are_at(self.fixed.params, self._at_params)
        return self._moved

    def refresh(self, grads: list[Tensor]) -> bool:
        """Take the addresses of now, those of parameters and states if `params_moved` found that they did.

        Returns False when an address is not as aligned as its launch relies on: then a new plan is needed.
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
            # states move along with parameters; otherwise the same tensors are where they were
            others = [at_params, *(list(map(_address, c)) for c in self.fixed[2:])]
            for launch in self.launches:
                if not launch.take_fixed([[c[i] for i in launch.where] for c in others]):
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
        """Update everything, after `refresh`."""
        for launch in self.launches:
            launch.step(rows, scalars, capturable)

    def norm(self, rows: Rows, max_norm: Tensor, grad_scale: Tensor | None) -> Tensor:
        """(sum of squares, norm, clip coefficient) of the gradients of a single device, after `refresh`."""
        from .kernels_triton import norm_programs

        device = self.launches[0].device
        # 16 bytes apart, which is what kernels are compiled for
        out = torch.empty(len(self.launches), 3, 4, dtype=torch.float32, device=device)
        room = (
            torch.empty(norm_programs(out), dtype=torch.float32, device=device),
            torch.zeros((), dtype=torch.int32, device=device),
        )
        before: Tensor | None = None
        for i, launch in enumerate(self.launches):
            # each on top of the one before
            launch.norm(rows, before, room, out[i], max_norm, grad_scale)
            before = out[i, 0, 0]
        return out[-1, :, 0]


__all__ = ["KERNEL_DTYPES", "Columns", "Launch", "Plan", "Rows", "Scalars", "Shape", "pack_rows", "shape_of"]

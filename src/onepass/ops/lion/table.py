"""What one launch reads: a table on the device with the addresses, sizes and hyperparameters of many tensors.

All words are int64, in this order, for n tensors in G param groups:

* 4·G words: per group 8 fp32 hyperparameters, the fields of `Row`;
* n each: addresses of gradients, parameters, momenta, extras;
* n each: sizes in elements; param groups;
* n: first tile of each tensor; then the tensor of every SPAN-th tile.

The head (hyperparameters and addresses) is sent again when one of them changed, in one asynchronous copy from
pinned memory; the rest is sent once.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onepass.core.launch import cdiv

from .torch_path import NONE, Row

ROW_BYTES = 32
REAL = {torch.complex64: torch.float32, torch.complex32: torch.float16}


def rows_to_bytes(rows: Sequence[Row]) -> bytes:
    """All groups' hyperparameters as fp32."""
    return struct.pack(f"{8 * len(rows)}f", *(x for row in rows for x in row))


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass
class Launch:
    """The tensors of one device, dtype combination and alignment: one kernel launch a step.

    Attributes:
        where: the tensors' places in the step's lists.
        dtypes: of parameter, gradient, momentum (real ones: a complex number counts as two).
    """

    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    mode: int
    aligned: bool
    n_groups: int
    where: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    block: int = 1024
    num_warps: int = 4

    _table: Tensor | None = None
    _hyper: bytes = b""
    _addresses: list[list[int]] = field(default_factory=list)
    _moved: bool = True
    _body: bytes = b""
    _captured: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _spare: Tensor | None = None
    n_tiles: int = 0
    span: int = 32

    def close(self) -> None:
        """Every tensor is known: lay out the tiles."""
        tiles = torch.tensor([cdiv(n, self.block) for n in self.sizes], dtype=torch.int64)
        ends = tiles.cumsum(0)
        self.n_tiles = int(ends[-1])
        # a larger span makes a smaller map; a span of 32 is counted within one warp
        self.span = 32 if self.n_tiles <= 1 << 21 else 128
        coarse = torch.searchsorted(ends, torch.arange(0, self.n_tiles, self.span), right=True)
        words = array("q", self.sizes)
        words.extend(self.groups)
        words.extend((ends - tiles).tolist())
        words.extend(coarse.tolist())
        self._body = words.tobytes()

    def _send(self, table: Tensor, data: bytes, pinned: Tensor | None) -> Tensor:
        source = torch.frombuffer(bytearray(data), dtype=torch.int64)
        if pinned is not None:
            # torch's pinned allocator keeps the memory until the copy is done: no step waits, and none overwrites it
            source = pinned[: len(source)].copy_(source)
        table[: len(source)].copy_(source, non_blocking=True)
        return source

    def _pinned(self, n_bytes: int) -> Tensor | None:
        if self.device.type != "cuda":
            return None
        return torch.empty(n_bytes // 8, dtype=torch.int64, pin_memory=True)

    def move(self, addresses: list[list[int]]) -> bool:
        """Take the addresses of gradients, parameters, momenta and extras; False when the launch can't."""
        if addresses != self._addresses:
            if self.aligned and any(a & 15 for column in addresses for a in column):
                return False
            self._addresses, self._moved = addresses, True
        return True

    def table(self, hyper: bytes, capturable: bool) -> Tensor:
        """Return the up-to-date table."""
        capturing = _capturing(self.device)
        if self._table is not None and not capturing and not self._moved:
            if hyper != self._hyper:
                self._send(self._table, hyper, self._pinned(len(hyper)))
                self._hyper = hyper
            self._keep_spare(capturable)
            return self._table
        words = array("q")
        for column in self._addresses:
            words.extend(column)
        head = hyper + words.tobytes()
        n_words = (len(head) + len(self._body)) // 8
        if capturing:
            # a graph copies from this memory at every replay, so that nothing else may write to it or to its table
            spare, self._spare = self._spare, None
            pinned = spare if spare is not None and len(spare) >= n_words else self._pinned(8 * n_words)
            table = torch.empty(n_words, dtype=torch.int64, device=self.device)
            self._captured.append((table, self._send(table, head + self._body, pinned)))
            return table  # `_moved` stays: the table of steps outside the graph still has the old addresses
        if self._table is None:
            self._table = torch.empty(n_words, dtype=torch.int64, device=self.device)
            self._send(self._table, head + self._body, self._pinned(8 * n_words))
        else:
            self._send(self._table, head, self._pinned(len(head)))
        self._hyper, self._moved = hyper, False
        self._keep_spare(capturable)
        return self._table

    def _keep_spare(self, capturable: bool) -> None:
        # pinned memory for the next capture, during which none should be allocated
        if capturable and self._spare is None and self._table is not None:
            self._spare = self._pinned(8 * len(self._table))

    def run(
        self,
        hyper: bytes,
        *,
        device_rows: tuple[Sequence[int], Sequence[Tensor]] = ((), ()),
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        capturable: bool = False,
    ) -> None:
        """Launch, after `move`.

        `device_rows`: positions in the flattened hyperparameters, and the device scalars that go there.
        """
        from . import kernels_triton

        table = self.table(hyper, capturable)
        if device_rows[0]:
            scalars = table.view(torch.float32)
            torch._foreach_copy_(
                [scalars[i].reshape(t.shape) for i, t in zip(*device_rows, strict=True)],
                [t.to(self.device) for t in device_rows[1]],
            )
        kernels_triton.launch(
            table, self.n_tiles, len(self.where), self.n_groups, self.dtypes, self.mode, self.aligned, self.span,
            _scalar(grad_scale, self.device), _scalar(found_inf, self.device), self.block, self.num_warps,
        )  # fmt: skip


def _scalar(value: Tensor | None, device: torch.device) -> Tensor | None:
    if value is None or (value.dtype == torch.float32 and value.device == device):
        return value
    return value.to(device, torch.float32, non_blocking=True)


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


class Plan:
    """The launches of one set of parameters and states.

    Memory may move from step to step (that of states only when their parameters' does); dtypes and layouts may not.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        extras: Sequence[Tensor | None],
        modes: Sequence[int],
        groups: Sequence[int],
        n_groups: int,
        *,
        block: int = 1024,
        num_warps: int = 4,
    ) -> None:
        launches: dict[object, Launch] = {}
        for i, (p, g, m, e, mode) in enumerate(zip(params, grads, exp_avgs, extras, modes, strict=True)):
            size = p.numel() * (2 if p.is_complex() else 1)
            if not size:
                continue
            aligned = not (_address(p) | _address(g) | _address(m) | _address(e)) & 15
            dtypes = (REAL.get(p.dtype, p.dtype), REAL.get(g.dtype, g.dtype), REAL.get(m.dtype, m.dtype))
            key = (p.device, dtypes, mode, aligned)
            if key not in launches:
                launches[key] = Launch(p.device, dtypes, mode, aligned, n_groups, block=block, num_warps=num_warps)
            launch = launches[key]
            launch.where.append(i)
            launch.sizes.append(size)
            launch.groups.append(groups[i])
        self.launches = list(launches.values())
        for launch in self.launches:
            launch.close()
        self._whole = len(self.launches) == 1 and len(self.launches[0].where) == len(params)
        self._extra = any(mode != NONE for mode in modes)
        self._at_params: list[int] = []
        self._at_exp_avgs: list[int] = []
        self._at_extras: list[int] = [0] * len(params)

    def run(
        self,
        columns: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None]],
        hyper: bytes,
        *,
        device_rows: tuple[Sequence[int], Sequence[Tensor]] = ((), ()),
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        capturable: bool = False,
    ) -> bool:
        """Update (parameters, gradients, momenta, extras).

        Returns False, with nothing done, when an address is not as aligned as its launch relies on.
        """
        params, grads, exp_avgs, extras = columns
        address = torch.Tensor.data_ptr
        at_params = list(map(address, params))
        if at_params != self._at_params:
            # states move along with parameters; otherwise the same tensors are where they were
            self._at_params, self._at_exp_avgs = at_params, list(map(address, exp_avgs))
            if self._extra:
                self._at_extras = list(map(_address, extras))
        addresses = [list(map(address, grads)), at_params, self._at_exp_avgs, self._at_extras]
        for launch in self.launches:
            if not launch.move(addresses if self._whole else [[c[i] for i in launch.where] for c in addresses]):
                return False
        for launch in self.launches:
            launch.run(
                hyper, device_rows=device_rows, grad_scale=grad_scale, found_inf=found_inf, capturable=capturable
            )
        return True


__all__ = ["Launch", "Plan", "rows_to_bytes"]

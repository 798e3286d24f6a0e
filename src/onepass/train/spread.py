"""`--sequence-parallel`: each process has an equal part of the tokens of every row.

Hooks give layers the tokens of other processes: routed layers take DTensors (`onepass.nn.over_sequence`), the
convolution fetches its neighbours, full attention gathers keys and values. The weights are whole, gathered by FSDP2,
which adds up their gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from onepass.fused.parts import parts
from onepass.nn import RoutedBlock, RoutedFeedForward
from onepass.nn.halo import fetch
from onepass.train.commands.errors import UserError
from onepass.train.config import Config
from onepass.train.data import Batch
from onepass.train.model import Attention, Model, angles

IGNORED = -100  # torch's label of a position that does not count in the loss


def check(config: Config, size: int) -> None:
    """Raise UserError if `size` processes can't share the rows of a configuration."""
    if config.seq % size:
        raise UserError(
            f"--seq {config.seq:,}: {size} processes take equal parts of a row with --sequence-parallel; "
            f"give a multiple of {size}"
        )


class Spread:
    """The tokens of rows over the processes of a mesh of one axis.

    Attributes:
        on: whether the model gets parts of rows; else it gets whole rows and hooks do nothing.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.on = False

    def part(self, batch: Batch) -> Batch:
        """Return this process's tokens and the bytes to guess among them; IGNORED fills rows that have fewer."""
        n = batch.tokens.shape[1]
        begin, end = parts(n, self.size)[self.rank]
        here = (batch.hidden >= begin) & (batch.hidden < end)
        order = np.argsort(~here, axis=1, kind="stable")[:, : np.max(np.sum(here, axis=1))]
        places, values = np.where(here, batch.hidden - begin, 0), np.where(here, batch.bytes, IGNORED)
        places, values = (np.take_along_axis(each, order, axis=1) for each in (places, values))
        return Batch(batch.tokens[:, begin:end], places, values)

    def attach(self, model: Model) -> None:
        """Add the hooks, before FSDP2 adds its own: those then see plain tensors."""
        model.neighbours.register_forward_pre_hook(self._fetch)
        model.neighbours.register_forward_hook(self._cut)
        for module in model.modules():
            if isinstance(module, Attention):
                module.register_forward_pre_hook(self._positions)
                module.whole_row = self._whole_row  # type: ignore[method-assign]
        for block in model.blocks:
            layer = block if isinstance(block, RoutedBlock) else block.feed_forward
            if isinstance(layer, RoutedBlock | RoutedFeedForward):
                layer.register_forward_pre_hook(self._to_dtensor)
                layer.register_forward_hook(self._to_local)

    def _fetch(self, conv: Any, args: tuple[Tensor]) -> tuple[Tensor] | None:
        """Give a convolution (batch, dim, tokens) the tokens beside those of this process."""
        if not self.on:
            return None
        # a convolution without padding is causal: its caller has put the padding in front
        reach = conv.kernel_size[0] - 1
        left, right = (reach // 2, reach // 2) if conv.padding[0] else (reach, 0)
        x = args[0][..., 0 if conv.padding[0] else left :].mT
        n = x.shape[1] * self.size
        ranges = parts(n, self.size)
        wants = [(max(0, begin - left), min(n, end + right)) for begin, end in ranges]
        around = fetch(x, ranges, wants, self.group).mT
        fetched = ranges[self.rank][0] - wants[self.rank][0]
        return (around if conv.padding[0] else F.pad(around, (left - fetched, 0)),)

    def _cut(self, conv: Any, args: tuple[Tensor], y: Tensor) -> Tensor | None:
        """Cut off the outputs at tokens of other processes."""
        if not (self.on and conv.padding[0]):
            return None
        reach = conv.kernel_size[0] // 2
        first = reach if self.rank else 0
        last = reach if self.rank + 1 < self.size else 0
        return y[..., first : y.shape[-1] - last]

    def _positions(self, attention: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        """Give attention the angles of this process's positions in place of the first ones."""
        if not self.on:
            return None
        x, cos, _ = args
        here = x.shape[1]
        own = slice(self.rank * here, (self.rank + 1) * here)
        return x, *(angle[own] for angle in angles(here * self.size, 2 * cos.shape[1], x.device))

    def _whole_row(self, t: Tensor) -> Tensor:
        """Return the keys or values (batch, heads, n, d) of all processes; their gradient is summed over these."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        if not self.on:
            return t
        spread = DTensor.from_local(t.contiguous(), self.mesh, [Shard(2)], run_check=False)
        return spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _to_dtensor(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...] | None:
        from torch.distributed.tensor import DTensor, Shard

        if not self.on:
            return None
        return DTensor.from_local(args[0].contiguous(), self.mesh, [Shard(1)], run_check=False), *args[1:]

    def _to_local(self, layer: nn.Module, args: Any, output: Any) -> Any:
        return _local(output) if self.on else None


def _local(value: Any) -> Any:
    """Return a tensor, or a tuple of them, with each DTensor as this process's part."""
    if isinstance(value, tuple):
        found = map(_local, value)
        return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
    return value.to_local() if hasattr(value, "to_local") else value

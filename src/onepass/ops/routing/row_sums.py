"""`RowSums`: the sums over rows that a backward pass needs, added up together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass.core.launch import uses_triton

from . import torch_path


class RowSums:
    """Sums over rows for several slots; a slot of width 0 is one that nobody asked for.

    Kernels leave parts of the sums in one buffer, a row for each program, and one kernel adds them all up in the end;
    the torch path adds up at once.
    """

    def __init__(self, like: Tensor, rows: int, widths: Sequence[int]) -> None:
        self.widths = list(widths)
        self.fused = uses_triton(like)
        self.parts: Tensor | None = None
        self.found: dict[int, Tensor] = {}
        total = sum(self.widths)
        if self.fused and total:
            from . import kernels_branch

            shape = (kernels_branch.programs(like, rows), total)
            self.parts = torch.empty(shape, dtype=torch.float32, device=like.device)

    def _offset(self, slot: int) -> int:
        return sum(self.widths[:slot])

    def of(self, slot: int, x: Tensor) -> None:
        """Sum x (rows, width)."""
        if self.parts is not None and self.widths[slot]:
            from . import kernels_branch

            kernels_branch.column_sums(x, self.parts, self._offset(slot))
        elif self.widths[slot]:
            self.found[slot] = x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))

    def gelu_backward(self, slot: int, dh: Tensor, u: Tensor) -> Tensor:
        """Du of h = gelu(u), possibly in the place of dh, and its sum."""
        if not self.fused:
            du = torch.ops.aten.gelu_backward(dh, u)
            self.of(slot, du)
            return du  # type: ignore[no-any-return]
        from . import kernels_branch

        kernels_branch.gelu_backward(dh, u, self.parts if self.widths[slot] else None, self._offset(slot))
        return dh

    def norm_backward(
        self, slot: int, dy: Tensor, x: Tensor, indices: Tensor, weight: Tensor | None, stats: Tensor, need_x: bool
    ) -> Tensor | None:
        """Dx of the norm of chosen rows, and the gradient of its weight."""
        wanted = bool(self.widths[slot])
        if not self.fused:
            dx, grads = torch_path.norm_backward(
                dy, x, indices, weight, None, stats, None, None, None, 1, need_x, wanted
            )  # fmt: skip
            if grads is not None:
                self.found[slot] = grads[0]
            return dx
        from . import kernels_norm

        parts = self.parts[:, self._offset(slot) :] if wanted and self.parts is not None else None
        (dx,) = kernels_norm.backward(dy, x, indices, weight, None, stats, None, None, None, 1, need_x, parts)
        return dx  # type: ignore[no-any-return]

    def finish(self) -> list[Tensor | None]:
        """The sum of each slot, fp32 or wider; None where the width is 0."""
        if self.parts is not None:
            sums = torch.split(self.parts.sum(0), self.widths)
            return [s if width else None for s, width in zip(sums, self.widths, strict=True)]
        return [self.found.get(slot) for slot in range(len(self.widths))]

"""What a call of a module returns, for type checkers alone: `torch.nn.Module` declares that every call returns Any.

A module that declares ``__call__`` with one of these under `TYPE_CHECKING` is called as before; nothing here runs.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar, overload

from torch import Tensor

Routing = TypeVar("Routing", covariant=True)


class NormCall(Protocol):
    """``norm(x, residual=None)``: a residual brings the sum as well."""

    @overload
    def __call__(self, x: Tensor, residual: None = ...) -> Tensor: ...
    @overload
    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...


class RoutedCall(Protocol[Routing]):
    """``layer(x, mask=None, return_routing=False, *, cu_seqlens=None, max_seqlen=None)``."""

    @overload
    def __call__(
        self, x: Tensor, mask: Tensor | None = ..., return_routing: Literal[False] = ..., *,
        cu_seqlens: Tensor | None = ..., max_seqlen: int | None = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, mask: Tensor | None = ..., *, return_routing: Literal[True],
        cu_seqlens: Tensor | None = ..., max_seqlen: int | None = ...,
    ) -> tuple[Tensor, Routing]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, mask: Tensor | None, return_routing: Literal[True], *,
        cu_seqlens: Tensor | None = ..., max_seqlen: int | None = ...,
    ) -> tuple[Tensor, Routing]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, mask: Tensor | None = ..., return_routing: bool = ..., *,
        cu_seqlens: Tensor | None = ..., max_seqlen: int | None = ...,
    ) -> Tensor | tuple[Tensor, Routing]: ...  # fmt: skip

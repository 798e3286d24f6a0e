"""`LayerNorm` and `RMSNorm`: torch's modules on onepass kernels, with the residual sum and `stable` on top."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from onepass.core import check
from onepass.ops.norm.op import layer_norm, rms_norm

torch.fx.wrap("layer_norm")  # torch.fx traces the call as one node, as it does torch's norms
torch.fx.wrap("rms_norm")


def _check(name: str, shape: Any, eps: Any) -> None:
    """Raise unless shape is an int or a sequence of ints, and neither they nor eps are negative."""
    sizes = tuple(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else (shape,)
    if not sizes or not all(isinstance(n, (numbers.Integral, torch.SymInt)) for n in sizes):
        raise TypeError(f"{name}: normalized_shape must be an int or a sequence of ints, got {shape!r}")
    if any(n < 0 for n in sizes):
        raise ValueError(f"{name}: normalized_shape must be ≥ 0, got {shape!r}")
    check.not_negative(name, "eps", eps)


class LayerNorm(nn.LayerNorm):
    r"""``torch.nn.LayerNorm`` with the same arguments and state_dict, plus `stable` and a residual sum.

    ``stable=True`` normalises :math:`x/\max(x)` instead of :math:`x` (see `onepass.layer_norm`), and
    ``forward(x, residual)`` normalises ``x + residual`` and returns ``(y, x + residual)``.

    Args:
        normalized_shape: the last dimensions of x, an int or a sequence.
        eps: added to the variance.
        elementwise_affine: learn a weight (and a bias); weight starts at 1, bias at 0.
        bias: learn a bias.
        device, dtype: of weight and bias; their dtype may differ from that of x.
        stable: keep rows of huge activations in range.

    The result has the dtype of x; statistics are in fp32 whatever the dtypes (fp64 for fp64).

    Raises:
        TypeError: x or residual is not a floating-point tensor, or normalized_shape not made of ints.
        ValueError: x does not end in normalized_shape, or residual has another shape.

    Example:
        >>> import torch
        >>> from onepass.nn import LayerNorm
        >>> norm = LayerNorm(4)
        >>> norm(torch.tensor([1.0, 1.0, 3.0, 3.0])).detach()
        tensor([-1.0000, -1.0000,  1.0000,  1.0000])
        >>> y, s = norm(torch.ones(2, 4), residual=torch.ones(2, 4))
        >>> s.detach().unique()
        tensor([2.])
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *, stable: bool = False,
    ) -> None:  # fmt: skip
        _check(type(self).__name__, normalized_shape, eps)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.stable = stable

    @overload
    def forward(self, x: Tensor, residual: None = ...) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Y, or ``(y, x + residual)``."""
        return layer_norm(
            x, self.normalized_shape, self.weight, self.bias, eps=self.eps, stable=self.stable, residual=residual
        )

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return super().extra_repr() + (", stable=True" if self.stable else "")


class RMSNorm(nn.RMSNorm):
    r"""``torch.nn.RMSNorm`` with the same arguments and state_dict, plus `offset` and a residual sum.

    ``offset=1.0`` multiplies by ``1 + weight``, as Gemma does, and ``forward(x, residual)`` normalises
    ``x + residual`` and returns ``(y, x + residual)``.

    Args:
        normalized_shape: the last dimensions of x, an int or a sequence.
        eps: added to the mean of squares; None: the machine epsilon of the statistics (fp32, or fp64 for fp64).
        elementwise_affine: learn a weight, which starts at 1 − offset.
        device, dtype: of the weight; its dtype may differ from that of x.
        offset: added to the weight; without a weight it has no effect.
        rounding: ``"twice"`` rounds as the RMS norms of Llama, Qwen and T5 do (see `onepass.rms_norm`); not with an
            offset.

    Dtypes and errors are those of `LayerNorm`.

    Example:
        >>> import torch
        >>> from onepass.nn import RMSNorm
        >>> RMSNorm(2, elementwise_affine=False)(torch.tensor([3.0, 4.0]))
        tensor([0.8485, 1.1314])
        >>> RMSNorm(2, offset=1.0).weight.detach()
        tensor([0., 0.])
    """

    # a class attribute: modules that were pickled before it existed have it too
    rounding: Literal["once", "twice"] = "once"

    def __init__(
        self, normalized_shape: Any, eps: float | None = None, elementwise_affine: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *, offset: float = 0.0,
        rounding: Literal["once", "twice"] = "once",
    ) -> None:  # fmt: skip
        if rounding not in ("once", "twice"):
            raise ValueError(f"RMSNorm: rounding must be 'once' or 'twice', got {rounding!r}")
        if rounding == "twice" and offset:
            raise ValueError("RMSNorm: rounding='twice' takes no offset")
        _check(type(self).__name__, normalized_shape, 0.0 if eps is None else eps)
        # set first: torch's constructor calls reset_parameters
        self.offset = check.number(type(self).__name__, "offset", offset)
        self.rounding = rounding
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    @overload
    def forward(self, x: Tensor, residual: None = ...) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Y, or ``(y, x + residual)``."""
        return rms_norm(
            x, self.normalized_shape, self.weight, eps=self.eps, offset=self.offset, rounding=self.rounding,
            residual=residual,
        )  # fmt: skip

    if TYPE_CHECKING:
        __call__ = forward

    def eps_for(self, x: Tensor) -> float:
        """Return the ε that x is normalised with."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return torch.finfo(wide).eps if self.eps is None else self.eps

    def reset_parameters(self) -> None:
        """Set the weight to 1 − offset."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1 - self.offset)

    def extra_repr(self) -> str:
        options = (f", offset={self.offset}" if self.offset else "", ", rounding='twice'" * (self.rounding == "twice"))
        return super().extra_repr() + "".join(options)

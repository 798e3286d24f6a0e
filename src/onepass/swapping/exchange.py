"""Give a module another class and take it back: the module, its parameters and its hooks stay the same objects."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.nn import RMSNorm
from onepass.ops.norm.op import rms_norm


class MixedRMSNorm(RMSNorm):
    """An `RMSNorm` whose result has another dtype than x where x and weight have two: the wider, as Llama's.

    With `narrow` it is T5's, which rounds the normalised row to a 16-bit weight's dtype, and to none for a wider one.
    """

    narrow = False

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Y, or ``(y, x + residual)``."""
        own = self.weight.dtype
        if x.dtype == own or residual is not None:
            return super().forward(x, residual)  # type: ignore[arg-type]
        eps, dtype = self.eps_for(x), torch.promote_types(x.dtype, own)
        x = x.double() if dtype == torch.float64 else x  # which has no other result in float64
        if self.narrow and own.itemsize == 2:
            return self.weight * rms_norm(x, eps=eps, out_dtype=own)
        rounding = "once" if self.narrow else self.rounding
        return rms_norm(x, self.weight, eps=eps, offset=self.offset, rounding=rounding, out_dtype=dtype)


class Target(NamedTuple):
    """What a norm becomes."""

    cls: type[nn.Module]
    fields: dict[str, Any]  # the attributes that the constructor of cls sets
    parameters: tuple[str, ...]  # the names that cls registers, used or None
    label: str

    @classmethod
    def like(cls, made: nn.Module) -> Target:
        """Return the target that gives a module the class and the options of `made`."""
        state = vars(nn.Module())
        fields = {name: value for name, value in vars(made).items() if name not in state}
        offset, twice = getattr(made, "offset", 0.0), getattr(made, "rounding", "once") == "twice"
        option = f"(offset={offset:g})" if offset else "(rounding='twice')" if twice else ""
        label = f"onepass.nn.{'RMSNorm' if isinstance(made, RMSNorm) else 'LayerNorm'}{option}"
        return cls(type(made), fields, tuple(made._parameters), label)

    def mixed(self, narrow: bool) -> Target:
        """Return the target as a `MixedRMSNorm`."""
        return self._replace(cls=MixedRMSNorm, fields={**self.fields, "narrow": narrow})


class Exchange:
    """One module that has the class of a target, until `undo`.

    A change of class keeps all that other objects hold: references to the module, handles of hooks, hooks that are
    bound to the module, the optimizer's parameters. Copies of the dictionaries would lose some of these.
    """

    def __init__(self, module: nn.Module, target: Target) -> None:
        self.module = module
        self.target = target
        self._cls = type(module)
        own, parameters = vars(module), module._parameters
        self._fields = {name: own[name] for name in target.fields if name in own}
        self._unused = [name for name in target.parameters if name not in parameters]
        module.__class__ = target.cls  # TypeError, with nothing changed, if the layouts in memory differ
        own.update(target.fields)
        parameters.update(dict.fromkeys(self._unused))

    def undo(self) -> None:
        """Restore the class and the attributes that the exchange set."""
        own, parameters = vars(self.module), self.module._parameters
        self.module.__class__ = self._cls
        for name in self.target.fields:
            own.pop(name, None)
        own.update(self._fields)
        for name in self._unused:
            if parameters.get(name) is None:
                parameters.pop(name, None)

"""Give a module another class and take it back: the module, its parameters and its hooks stay the same objects."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.nn import RMSNorm
from onepass.ops.norm.op import rms_norm


class MixedRMSNorm(RMSNorm):
    """An `RMSNorm` whose result has the wider dtype where x and weight have two, as Llama's.

    With `narrow`, as T5's: the normalised row is rounded to the weight's dtype if that has 16 bits, else not at all.
    """

    narrow = False

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Y, or ``(y, x + residual)``."""
        weight_dtype = self.weight.dtype
        if x.dtype == weight_dtype or residual is not None:
            return super().forward(x, residual)  # type: ignore[arg-type]
        eps, dtype = self.eps_for(x), torch.promote_types(x.dtype, weight_dtype)
        x = x.double() if dtype == torch.float64 else x  # which has no other result in float64
        if self.narrow and weight_dtype.itemsize == 2:
            return self.weight * rms_norm(x, eps=eps, out_dtype=weight_dtype)
        rounding = "once" if self.narrow else self.rounding
        return rms_norm(x, self.weight, eps=eps, offset=self.offset, rounding=rounding, out_dtype=dtype)


class Target(NamedTuple):
    """What a norm becomes."""

    cls: type[nn.Module]
    fields: dict[str, Any]  # the attributes that the constructor of cls sets
    parameters: tuple[str, ...]  # the names that cls registers, used or None
    label: str

    @classmethod
    def like(cls, norm: nn.Module) -> Target:
        """Return the target that gives a module the class and the options of `norm`."""
        state = vars(nn.Module())
        fields = {name: value for name, value in vars(norm).items() if name not in state}
        offset, twice = getattr(norm, "offset", 0.0), getattr(norm, "rounding", "once") == "twice"
        option = f"(offset={offset:g})" if offset else "(rounding='twice')" if twice else ""
        label = f"onepass.nn.{'RMSNorm' if isinstance(norm, RMSNorm) else 'LayerNorm'}{option}"
        return cls(type(norm), fields, tuple(norm._parameters), label)

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
        attributes, parameters = vars(module), module._parameters
        self._fields = {name: attributes[name] for name in target.fields if name in attributes}
        self._unused = [name for name in target.parameters if name not in parameters]
        module.__class__ = target.cls  # TypeError, with nothing changed, if the layouts in memory differ
        attributes.update(target.fields)
        parameters.update(dict.fromkeys(self._unused))

    def undo(self) -> None:
        """Restore the class and the attributes that the exchange set."""
        attributes, parameters = vars(self.module), self.module._parameters
        self.module.__class__ = self._cls
        for name in self.target.fields:
            attributes.pop(name, None)
        attributes.update(self._fields)
        for name in self._unused:
            if parameters.get(name) is None:
                parameters.pop(name, None)

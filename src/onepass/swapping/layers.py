"""Layers that add two tensors and norm the sum: give them a forward in which the norm adds."""

from __future__ import annotations

import functools
import linecache
import re
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from onepass.nn import LayerNorm, RMSNorm
from onepass.nn.feed_forward import has_no_overrides

from .recognise import altered
from .report import Layer
from .trace import EXTRA, Step, Trace, UntraceableError, trace

_NORMS = (LayerNorm, RMSNorm)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def norm_of_sum(norm: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return norm(a + b) and a + b: in one kernel if the norm is onepass's and a call runs nothing else.

    A hook reads or changes the norm's one tensor, and adapters replace the norm: both get the sum. Tensors of two
    dtypes, or a tensor and a number, are added first, as y has the dtype of the sum.
    """
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    if both and type(norm) in _NORMS and a.dtype == b.dtype and a.shape == b.shape and has_no_overrides(norm):
        return norm(a, b)  # type: ignore[no-any-return]
    total = a + b
    return norm(total), total


def fused(module: nn.Module, norms: set[str]) -> tuple[type[nn.Module], tuple[str, ...]]:
    """Return the class of the module with a forward in which norms add, and the names of these norms.

    `norms` names the modules inside that are, or will be, norms of onepass.

    Raises:
        UntraceableError: the forward does more than a trace says, or no sum goes straight into one of the norms.
    """
    cls = type(module)
    if problem := altered(module):
        raise UntraceableError(problem)
    found = trace(module, cls)
    adding = _sums(found.steps, norms)
    if not adding:
        raise UntraceableError("no sum of two tensors goes straight into one of its norms")
    made = fused_class(cls, found, adding)  # type: ignore[arg-type]  # classes are hashable
    if _wrappers(made) != _wrappers(cls):
        raise UntraceableError("its forward is decorated")
    if trace(module, made) != found:
        raise UntraceableError("a forward made from its trace does something else")
    return made, adding


def _sums(steps: tuple[Step, ...], norms: set[str]) -> tuple[str, ...]:
    """Return the norms whose input is the sum that the step before them made."""
    return tuple(b.module for a, b in pairwise(steps) if b.module in norms and _norms_sum(a, b))


def _norms_sum(a: Step, b: Step) -> bool:
    """Return whether step b calls a module on the sum that step a made, and on nothing else."""
    return a.module == "+" and b.module != "+" and b.args == (a.out,) and not b.options


@functools.cache
def fused_class(cls: type[nn.Module], found: Trace, adding: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass of `cls` by the same name with the forward of the trace, in which the norms `adding` add.

    A subclass keeps what the layer's own class does around its forward (gradient checkpointing of transformers) and
    what others find by isinstance or by the class's name. All layers of one kind share it: torch.compile compiles
    again for each class that it meets.
    """
    text = source(found, adding)
    file = f"<onepass {cls.__qualname__}.forward {zlib.crc32(text.encode()):08x}>"
    # so that tracebacks and inspect.getsource show the lines
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {}
    # with the globals of this file, in which torch.compile looks names up
    exec(compile(text, file, "exec"), globals(), names)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # pickle does not find the class by its name: copies and pickles make it again
        _, given, *rest = tuple(cls.__reduce_ex__(self, max(protocol, 2)))
        return (_new, (cls, found, adding, *given[1:]), *rest)

    own: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    own |= {"_onepass_class": cls, "forward": names["forward"], "__reduce_ex__": reduce}
    return type(cls.__name__, (cls,), own)


def _new(cls: type[nn.Module], found: Trace, adding: tuple[str, ...], *arguments: Any) -> nn.Module:
    made = fused_class(cls, found, adding)  # type: ignore[arg-type]  # classes are hashable
    return cls.__new__(made, *arguments)


def source(found: Trace, adding: tuple[str, ...]) -> str:
    """Return the forward of a trace as source text, in which the norms `adding` add."""
    lines = [f"def forward(self, {', '.join(found.parameters)}):"]
    others = [f"{name} is not {default}" for name, default in found.plain]
    others += [found.extra] if found.extra_is_plain else []
    if others:
        lines += [
            f"    if {' or '.join(others)}:",
            f"        return self._onepass_class.forward(self, {_handed_on(found)})",
        ]
    statements: list[tuple[str, str]] = []
    for step, after in zip(found.steps, (*found.steps[1:], None), strict=True):
        if after is not None and after.module in adding and _norms_sum(step, after):
            called = f"norm_of_sum(self.{after.module}, {', '.join(step.args)})"
            statements.append((f"{after.out}, {step.out}", called))
        elif not (statements and statements[-1][0].startswith(f"{step.out}, ")):
            statements.append((step.out, _expression(step, found)))
    values = [p for p in found.parameters if p.isidentifier()]
    for i, (outs, expression) in enumerate(statements):
        lines.append(f"    {outs} = {expression}")
        values += outs.split(", ")
        # a value is freed after its last use, as in a forward that uses its name again
        later = _names(" ".join([*(e for _, e in statements[i + 1 :]), found.result]))
        lines.append(f"    {' = '.join([v for v in values if v not in later] or ['_'])} = None")
        values = [v for v in values if v in later]
    return "\n".join([*lines, f"    return {found.result}", ""])


def _handed_on(found: Trace) -> str:
    """Return the arguments of a call with what forward was given."""
    names, by_keyword = [], False
    for p in found.parameters:
        by_keyword |= p.startswith("*, ")
        name = p.removeprefix("*, ").partition("=")[0]
        names.append(f"{name}={name}" if by_keyword and not name.startswith("**") else name)
    return ", ".join(names)


def _expression(step: Step, found: Trace) -> str:
    if step.module == "+":
        return " + ".join(step.args)
    options = [f"**{found.extra}" if key == EXTRA else f"{key}={value}" for key, value in step.options]
    return f"self.{step.module}({', '.join([*step.args, *options])})"


def _names(text: str) -> set[str]:
    """Return the names of values in source text, without those of attributes and keywords."""
    return set(re.findall(r"(?<![.\w])[a-zA-Z_]\w*(?![\w=])", text))


def _wrappers(cls: type[nn.Module]) -> int:
    """Return how many decorators stand around a class's forward."""
    forward, count = cls.forward, 0
    while hasattr(forward, "__wrapped__"):
        forward, count = forward.__wrapped__, count + 1
    return count


def around(model: nn.Module, norms: set[nn.Module]) -> Iterator[tuple[Layer, nn.Module, type[nn.Module] | None]]:
    """Yield the layers that hold one of `norms` or a norm of onepass, each with the class that it can have.

    Modules that hold lists of layers, and containers without a forward of their own, have no line.
    """
    found: dict[nn.Module, tuple[str, ...]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[module] = (*found.get(module, ()), name)
    for module, names in found.items():
        children = module._modules.values()
        if isinstance(module, _CONTAINERS) or any(isinstance(m, _CONTAINERS[1:]) for m in children):
            continue
        inside = {name for name, m in module._modules.items() if m in norms or type(m) in _NORMS}
        if not inside or hasattr(type(module), "_onepass_class"):
            continue
        kind = type(module).__name__
        try:
            cls, adding = fused(module, inside)
        except UntraceableError as e:
            yield Layer(names, kind, "", str(e)), module, None
        except Exception as e:
            # a class that can't be derived from, or whose attributes can't be copied
            yield Layer(names, kind, "", f"it can't be run on stand-ins: {type(e).__name__}: {e}"[:120]), module, None
        else:
            yield Layer(names, kind, f"{kind}(sums in {', '.join(adding)})", ""), module, cls


__all__ = ["around"]

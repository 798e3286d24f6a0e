"""Register functions with torch's dispatcher, for torch.compile, export, FakeTensor and dispatch modes."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import GenericAlias
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor
from torch.library import Library, infer_schema
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .sharding import Rule, add_rule, register_rules

# the package's name: a copy of the package under another name registers operators of its own
NAMESPACE = __name__.partition(".")[0]
_LIBRARY: Any = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
# each operator's multiplications and additions by the shapes of its arguments; torch.utils.flop_counter imports Triton,
# so the formulas wait here until the user has imported it
FORMULAS: dict[Any, Callable[..., int]] = {}


def filled(results: Iterable[Tensor | None], args: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return the results with an empty tensor for each None, which no operator can return: like the first of `args`."""
    groups = (a if isinstance(a, (list, tuple)) else (a,) for a in args)
    first_tensor: Any = next((t for group in groups for t in group if isinstance(t, Tensor)), None)
    return tuple(first_tensor.new_empty(0) if t is None else t for t in results)


def there(t: Tensor | None) -> Tensor | None:
    """Return None if t is the empty tensor that stands for None, else t."""
    return None if t is None or (t.dim() == 1 and t.shape[0] == 0) else t


@functools.cache
def _fields(kind: Any) -> dict[str, Any] | None:
    return get_type_hints(kind) if isinstance(kind, type) and hasattr(kind, "_fields") else None


def flat(value: Any) -> list[Any]:
    """Return the items of a tuple or list, nested ones flattened; any other value as the only item."""
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, (tuple, list)) else [value]


def gathered(kind: Any, items: Iterator[Any]) -> Any:
    """Rebuild a value of this type from the items that `flat` made of it."""
    fields = _fields(kind)
    return next(items) if fields is None else kind(*(gathered(of, items) for of in fields.values()))


def _leaves(name: str, kind: Any, inside: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and types of what `flat` returns of an argument; names of its fields begin with `inside`."""
    for field, of in (_fields(kind) or {}).items():
        yield from _leaves(inside + field, of, f"{field}_")
    if _fields(kind) is None:
        yield name, kind


def register(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], rule: Rule | None = None, results: int = 0
) -> Any:
    """Return the operator `onepass::name` that runs `function` on every device; `rule` is for DTensor (core.sharding).

    `fake` makes empty results, for FakeTensor and meta tensors. The schema follows from the annotations, without
    arguments that have a default, and with each field of a NamedTuple as an argument of its own (`flat`). An empty
    tensor stands for a result that is None; `results` is their number where the annotation does not tell it.

    The arguments are left as they are, and no output shares memory with one:
    `torch.library.custom_op` checks both at each call, for 6 µs and more
    (benchmarks/results/cpu/raw/registration.json); here the tests check it, by `torch.library.opcheck`.
    """
    signature = inspect.signature(function, eval_str=True)
    required = [p for p in signature.parameters.values() if p.default is p.empty]
    result_types = get_args(signature.return_annotation)
    may_be_none = bool(results) or any(kind != Tensor for kind in result_types)
    results = results or len(result_types)

    def prototype() -> None: ...

    def run(*args: Any) -> Any:
        items = iter(args)
        outputs = function(*(gathered(p.annotation, items) for p in required)) if grouped else function(*args)
        return filled(outputs, args) if may_be_none and [t for t in outputs if t is None] else outputs

    parameters = [p.replace(name=n, annotation=t) for p in required for n, t in _leaves(p.name, p.annotation)]
    grouped = len(parameters) > len(required)
    returned = GenericAlias(tuple, (Tensor,) * results) if results else Tensor
    prototype.__signature__ = signature.replace(parameters=parameters, return_annotation=returned)  # type: ignore[attr-defined]
    _LIBRARY.define(name + infer_schema(prototype, mutates_args=()))
    _LIBRARY.impl(name, run if may_be_none or grouped else function, "CompositeExplicitAutograd")
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if rule is not None:
        add_rule(op, rule)

    def run_fake(*args: Any) -> Any:
        register_rules()
        outputs = fake(*args)
        return filled(outputs, args) if isinstance(outputs, tuple) else outputs

    torch.library.register_fake(op, run_fake, lib=_LIBRARY)
    return op


def register_formulas() -> None:
    """Add the formulas to torch's flop counter, and to active counters, which copied its registry."""
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None or torch.compiler.is_compiling():
        return
    for op, formula in FORMULAS.items():
        if op not in module.flop_registry:
            module.register_flop_formula(op)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.update({op: module.flop_registry[op] for op in FORMULAS if op not in registry})

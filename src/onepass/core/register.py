"""Register functions with torch's dispatcher, for torch.compile, export, FakeTensor and dispatch modes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from types import GenericAlias
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.library import Library, infer_schema

from .sharding import Rule, add_rule, register_rules

F = TypeVar("F", bound=Callable[..., Any])

# the package's name: a copy of the package under another name registers operators of its own
NAMESPACE = __name__.partition(".")[0]
_LIBRARY: Any = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def register(name: str, function: Callable[..., Any], rule: Rule | None = None, results: Any = None) -> Any:
    """Return the operator `onepass::name` that runs `function` on every device; `rule` is for DTensor (core.sharding).

    Its schema follows from the annotations, without arguments that have a default, and with each field of a NamedTuple
    as an argument of its own; `results` replaces that of the results. The arguments are left as they are, and no output
    shares memory with one. `torch.library.custom_op` checks both at each call, for 6 µs and more
    (benchmarks/results/cpu/raw/registration.json); here the tests check it, by `torch.library.opcheck`.
    """
    signature = inspect.signature(function, eval_str=True)
    required = [p for p in signature.parameters.values() if p.default is p.empty]
    fields = [get_type_hints(p.annotation) if hasattr(p.annotation, "_fields") else None for p in required]
    results = signature.return_annotation if results is None else results

    def prototype() -> None: ...

    def gathered(*args: Any) -> Any:
        given = iter(args)
        return function(*(next(given) if names is None else tuple(islice(given, len(names))) for names in fields))

    flat = [
        p.replace(name=name, annotation=kind)
        for p, names in zip(required, fields, strict=True)
        for name, kind in ({p.name: p.annotation} if names is None else names).items()
    ]
    prototype.__signature__ = signature.replace(parameters=flat, return_annotation=results)  # type: ignore[attr-defined]
    _LIBRARY.define(name + infer_schema(prototype, mutates_args=()))
    _LIBRARY.impl(name, gathered if any(fields) else function, "CompositeExplicitAutograd")
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if rule is not None:
        add_rule(op, rule)
    return op


def register_fake(op: Any) -> Callable[[F], F]:
    """Decorate the function that makes the outputs' shapes and dtypes for FakeTensor and meta tensors."""

    def decorate(function: F) -> F:
        @wraps(function)
        def fake(*args: Any) -> Any:
            register_rules()
            return function(*args)

        torch.library.register_fake(op, fake, lib=_LIBRARY)
        return function

    return decorate


def register_backward(name: str, function: Callable[..., Any], rule: Rule, of: tuple[str, ...]) -> Any:
    """Return the operator `onepass::name` of a backward pass, and register its fake.

    `function` returns the gradients of the arguments named in `of`. Its last arguments are bools: which of them are
    needed. It may return None for the others. The operator then returns an empty tensor, since an op cannot return
    None, with the dtype of the argument, or of the first one for an argument that is None.
    """
    names = list(inspect.signature(function).parameters)
    places = [names.index(argument) for argument in of]

    def likes(args: tuple[Any, ...]) -> Iterator[Tensor]:
        return (args[places[0] if args[i] is None else i] for i in places)

    @wraps(function)
    def run(*args: Any) -> tuple[Tensor, ...]:
        found = zip(function(*args), likes(args), strict=True)
        return tuple(like.new_empty(0) if g is None else g for g, like in found)

    op = register(name, run, rule, GenericAlias(tuple, (Tensor,) * len(of)))

    @register_fake(op)
    def _(*args: Any) -> tuple[Tensor, ...]:
        needs = (need and args[i] is not None for need, i in zip(args[-len(of) :], places, strict=True))
        return tuple(t.new_empty(t.shape if need else 0) for t, need in zip(likes(args), needs, strict=True))

    return op

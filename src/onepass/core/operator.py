"""An operator from its forward and backward: the names of backward's arguments say what is kept, and what it makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_type_hints

from torch import Tensor

from .bind import bind
from .launch import replayed
from .register import register, there
from .sharding import PARTIAL, REPLICATE, Rule, Way, gradient

# filled in for the operator's arguments: loops over them would take µs of each eager call
_PROGRAM = """
def save(ctx, inputs, output):
    {taken} = inputs
    {results} = output
    ctx.save_for_backward({saved})
    ctx.numbers = {numbers}
    ctx.set_materialize_grads({zeros})

def gradients(ctx, run, {upstream} *_):
    if {unknown}:
        return {nothing}
    {needs_of_taken} = ctx.needs_input_grad
    {kept} = ctx.saved_tensors
    {numbers} = ctx.numbers
    {grads} = run({back})
    return {wanted}
"""


def listed(items: Iterable[Any]) -> str:
    """Return the items as Python writes a tuple without its brackets, each with a comma."""
    return "".join(f"{item}, " for item in items) or "()"


def operator(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], results: tuple[str, ...], *,
    fake: Callable[..., Any], ways: Rule, of: tuple[str, ...] = (), fake_back: Callable[..., Any] | None = None,
    registered: str | None = None, n_public: int = 1, check: Callable[..., None] = lambda *args: None,
    check_fake: Callable[..., None] | None = None, **bound: Any,
) -> tuple[Callable[..., Any], Any, Any]:  # fmt: skip
    """Return the operator of these functions: a differentiable call, and the two that it is registered as.

    Args:
        name: of the public function, for messages.
        forward: see `core.bind`; arguments with a default are not the operator's.
        backward: takes by their names arguments and results of forward, last `need_x` for each x whose gradient it
            returns. Other names are the gradients of public results, zeros for a missing one unless it takes None; one
            named `d_x` is x's, as it is.
        results: names of what forward returns; one that may be None is of type `Tensor | None`.
        fake: returns empty tensors like these, for FakeTensors.
        ways: how DTensors may be placed, see `core.sharding`; those of backward follow from it.
        of: where backward has no `need_x`: the arguments whose gradients it always makes.
        fake_back: returns empty tensors like these gradients, where backward does not take all of the arguments.
        registered: the operator's name in `torch.ops`, by default that of the public function.
        n_public: how many results the user sees, the first ones.
        check: raises on bad arguments, in eager calls and in the fake.
        check_fake: takes the place of `check` in the fake.
        bound: further arguments of `core.bind`.
    """
    taken, back = (
        [p.name for p in inspect.signature(f).parameters.values() if p.default is p.empty] for f in (forward, backward)
    )
    tensors = [a for a in taken if "Tensor" in str(forward.__annotations__[a])]
    needs = [a for a in back if a.startswith("need_")]
    graded = [a.removeprefix("need_") for a in needs] or [*of]
    upstream = [a for a in back if a not in (*taken, *results, *needs)]
    d_args = [f"d_{a}" for a in graded]
    kept = [a for a in back if a in tensors or a in results]
    numbers = [a for a in back if a in taken and a not in tensors]
    zeros = len(upstream) > 1 and "None" not in str(backward.__annotations__[upstream[0]])
    kinds = dict(zip(results, get_args(get_type_hints(forward)["return"]), strict=False))
    may_be_none = [a for a, kind in kinds.items() if kind != Tensor]
    text = {
        "taken": listed(taken), "kept": listed(kept),
        "saved": listed(f"there({a})" if a in may_be_none else a for a in kept), "numbers": listed(numbers),
        "back": listed(back), "results": results[0] if len(results) == 1 else listed(results),
        "zeros": zeros, "upstream": listed(upstream),
        "unknown": " and ".join(f"{g} is None" for g in upstream),
        "nothing": listed("None" for _ in taken), "needs_of_taken": listed(f"need_{a}" for a in taken),
        "grads": ("".join if len(of) == 1 else listed)(d_args),
        "wanted": listed(f"d_{a} if need_{a} else None" if f"d_{a}" in (*d_args, *upstream) else "None" for a in taken),
    }  # fmt: skip
    names: dict[str, Any] = {"there": there}
    exec(compile(_PROGRAM.format(**text), f"<operator {name}>", "exec"), names)

    def ways_back(*args: Any) -> list[Way]:
        by_name = dict(zip(back, args, strict=True))
        back_ways: list[Way] = []
        for of_results, of_tensors in ways(*(by_name.get(a, by_name.get(f"d_{a}")) for a in taken)):
            placements = dict(zip((*tensors, *results), (*of_tensors, *of_results), strict=True))
            grads = [gradient(placements[a], by_name.get(f"need_{a}", True)) for a in graded]
            placements |= zip(upstream, (REPLICATE if p == PARTIAL else p for p in of_results), strict=False)
            back_ways.append((grads, [None if by_name[a] is None else placements[a] for a in back if a in placements]))
        return back_ways

    def direct(function: Callable[..., Any]) -> Callable[..., Any]:
        return replayed(function, bound.get("state")) if bound.get("replay") else function

    def checked_fake(*args: Any) -> Any:
        (check_fake or check)(*args)
        return fake(*args)

    def like_arguments(*args: Any) -> Any:
        pairs = zip((args[back.index(a)] for a in graded), args[-len(needs) :] if needs else of, strict=True)
        gradients = [t.new_empty(t.shape) if need and t is not None else None for t, need in pairs]
        return gradients[0] if len(of) == 1 else tuple(gradients)

    registered, back_fake = registered or name, fake_back or like_arguments
    forward_op = register(registered, direct(forward), checked_fake, ways)
    backward_op = register(f"{registered}_backward", direct(backward), back_fake, ways_back, len(needs))

    def public(outputs: Any) -> Any:
        if len(results) == 1:
            return outputs
        return outputs[0] if n_public == 1 else tuple(outputs[:n_public])

    call = bind(
        name=name, public=public, forward=forward, forward_op=forward_op, backward=backward, backward_op=backward_op,
        save=names["save"], check=check, **{"gradients": names["gradients"], **bound},
    )  # fmt: skip
    return call, forward_op, backward_op

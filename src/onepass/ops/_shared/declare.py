"""An operator as a declaration: its arguments have roles, and from these follows all that is not the operator's own.

That is: checks, the schema, the fake, what backward keeps and which gradients it makes, shards of DTensors, vmap. Its
own are the public function and `way`, which returns what computes a call: kernels, or the definition in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.operator import listed, operator
from onepass.core.sharding import PARTIAL, REPLICATE, Placement, Way, beside, row_dims

from . import arguments


class Role(NamedTuple):
    """What an argument is. Strings are code: {a} is its name, {rows} that of the rows, _f is `arguments.f`."""

    type: Any
    # raises an error unless the argument fits
    check: str = ""
    # the argument as kernels take it
    flat: str = "{a}"
    # its gradient from the kernels' d_{a}, in its shape; empty: it has none
    shaped: str = ""
    # (tensor, dimensions of the rows, sharded dimension) → its placement beside them; None: not a tensor
    placed: Callable[[Any, int, int], Placement] | None = None
    # per row: code that gives a tensor or None, and a number
    split: str = ""
    # columns are added up, so a shard of columns gives a part of the sum
    summed: bool = False


# (..., n), any strides: every operator's first argument
ROWS = Role(
    Tensor, "_rows({op!r}, {a!r}, {a})", shaped="d_{a}.view({a}.shape) if need_{a} else None", placed=lambda t, n, d: d
)
SUMMED = ROWS._replace(summed=True)
# (n,) or (R, n), the same for all rows
VECTORS = Role(
    Tensor, "_vectors({op!r}, {a!r}, {a}, {rows!r}, {rows})", shaped="d_{a} if need_{a} else None",
    placed=lambda t, n, d: REPLICATE,
)  # fmt: skip
# a positive number, or a tensor of them that broadcasts to the rows without their last dimension. The operator takes a
# tensor or None, and beside it the number {a}_value
PER_ROW = Role(
    Tensor | None, "_positive({op!r}, {a!r}, {a}, {rows})", "_per_row({a}, {rows})",
    "_to_shape(d_{a}, {a}, {rows}) if need_{a} and {a} is not None else None", lambda t, n, d: beside(t, n - 1, d),
    "_split({a})",
)  # fmt: skip
# the same of a k, which may follow from a symbolic shape
COUNT = PER_ROW._replace(split="_split_count({a}, {rows})")
# bool, broadcasts to the rows
MASK = Role(Tensor | None, "_mask({op!r}, {a}, {rows})", "_mask_rows({a}, {rows})", placed=beside)
# dtype of the result, or None
RESULT_DTYPE = Role(torch.dtype | None, "_result_dtype({op!r}, {a!r}, {a})")


# filled in for the operator's arguments, as the program of `core.operator` is
_PROGRAM = """
def check({public}):
    {checks}

def check_taken({taken}):
    check({as_public})

def forward({taken}):
    return way({taken}).forward({flat})

def backward(gy, {back}):
    {grads} = way({taken}).backward(gy, {flat_back})
    return {shaped}

def call({public}):
    check({public})
    {split}
    return bound({taken})
"""


def declare(
    name: str, roles: Mapping[str, Role], way: Callable[..., Any], *,
    result: Callable[..., tuple[Any, torch.dtype]] = lambda rows, *_: (rows.shape, rows.dtype),
    state: Callable[..., int] | None = None, replay: bool = False,
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Any, Any]:  # fmt: skip
    """Return the operator `name`: what its public function calls, forward and backward, and both as registered.

    Its arguments are tensors with gradients, other tensors, options, and the call takes them in this order.

    Args:
        name: of the public function.
        roles: of the arguments, by their names.
        way: `way(*taken)` → what computes this call: `forward(*flat)` → the result or (result, state), and
            `backward(gy, *flat, *needs)` → the gradients, of rows in any shape. `taken` are the tensors, then the
            number beside each that is per row, then the options; `flat` are these as kernels take them. Backward has
            the state after the tensors.
        result: `result(*taken)` → shape and dtype of the result; by default those of the rows.
        state: `state(*options)` → how many numbers of each row forward keeps for backward.
        replay: as `core.bind` has it; a replayed call checks nothing, so no argument may be per row.
    """
    rows = next(iter(roles))
    tensors = [a for a, role in roles.items() if role.placed is not None]
    graded = [a for a in tensors if roles[a].shaped]
    per_row = [a for a in tensors if roles[a].split]
    options = [a for a in roles if a not in tensors]
    numbers = [*(f"{a}_value" for a in per_row), *options]
    taken, needs = [*tensors, *numbers], [f"need_{a}" for a in graded]
    states = [] if state is None else ["state"]

    def code(part: str) -> dict[str, str]:
        return {a: getattr(role, part).format(a=a, rows=rows, op=name) for a, role in roles.items()}

    flat, shaped, back = code("flat"), code("shaped"), [*tensors, *states, *numbers, *needs]
    lists = {
        "public": roles, "taken": taken, "flat": [*map(flat.get, tensors), *numbers], "back": back,
        "flat_back": [*map(flat.get, tensors), *(f"{k}.contiguous()" for k in states), *numbers, *needs],
        "grads": [f"d_{a}" for a in graded], "shaped": map(shaped.get, graded),
        "as_public": [f"{a}_value if {a} is None else {a}" if a in per_row else a for a in roles],
    }  # fmt: skip
    text = {key: listed(items) for key, items in lists.items()}
    text["checks"] = "; ".join(line for line in code("check").values() if line) or "pass"
    text["split"] = "; ".join(f"{a}, {a}_value = {code('split')[a]}" for a in per_row) or "pass"
    names = {**{f"_{f}": v for f, v in vars(arguments).items()}, "way": way}
    exec(compile(_PROGRAM.format(**text), f"<declared {name}>", "exec"), names)
    forward, backward = names["forward"], names["backward"]
    types = {a: roles[a].type if a in roles else float for a in taken}
    types |= {"gy": Tensor, "state": Tensor, **dict.fromkeys(needs, bool)}
    forward.__annotations__ = {a: types[a] for a in taken} | {"return": tuple[Tensor, Tensor] if states else Tensor}
    backward.__annotations__ = {a: types[a] for a in ("gy", *back)} | {"return": tuple[Tensor | None, ...]}

    def fake(like: Tensor, *rest: Any) -> Any:
        shape, dtype = result(like, *rest)
        y = like.new_empty(shape, dtype=dtype)
        if state is None:
            return y
        width = state(*rest[len(rest) - len(options) :])
        return y, like.new_empty((*like.shape[:-1], width), dtype=arguments.accumulator(like))

    def ways(*args: Any) -> list[Way]:
        by_name = dict(zip(tensors, args, strict=False))
        ndim, summed = args[0].ndim, roles[rows].summed
        accepted: list[Way] = [
            ((d,) * (1 + len(states)), [roles[a].placed(t, ndim, d) for a, t in by_name.items()])  # type: ignore[misc]
            for d in (range(ndim - 1) if summed else row_dims(args[0]))
        ]
        if summed:
            # the columns of rows and vectors, or the vectors, may be sharded as well
            accepted.append(((PARTIAL,), [t.ndim - 1 for t in by_name.values()]))
            if args[1].ndim == 2:
                accepted.append(((ndim - 1,), (REPLICATE, 0)))
        return accepted

    # arguments per row are checked before they are split
    checks = {"check_fake": names["check_taken"]} if per_row else {"check": names["check"]}
    bound, forward_op, backward_op = operator(
        name, forward, backward, ("y", *states), fake=fake, ways=ways, **checks, replay=replay, rows=True
    )
    names["bound"] = bound
    return names["call"] if per_row else bound, forward, backward, forward_op, backward_op

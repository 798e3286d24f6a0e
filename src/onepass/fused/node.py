"""A fused layer from three functions: one autograd node in plain eager, operators where torch's dispatcher takes part.

Nodes are faster than a composition of modules: they norm and score x in one read, norm the chosen tokens while they
gather them, add the heavy branch's output and gradients in place, cast all weights together, and compute weight
gradients directly in the weights' dtype. torch computes the matrix products; all kernels between two products are one
call for `core.launch.replay`, so that the host does little more than launch them.

* ``forward(plan, *arguments)`` → ``(Public, Saved)``: what the caller gets, and what forward makes for backward.
* ``backward_products(saved, plan, needs, dtypes, dy, *kept)`` → gradients of what went into the products: those that
  `backward_tokens` takes, then those of the weights, in `dtypes`. It deletes the fields of `saved` that it has used, so
  that each tensor is free after its last use.
* ``backward_tokens(plan, needs, *d, residual, *g, *kept)`` → gradients of the other arguments.

A parameter ``d_…`` is a gradient from `backward_products`, ``g_…`` that of a public result, `residual` that of y where
y is x + y. Every other name is a kept tensor: a field of Saved, a result in Public, or an argument. A weight that was
cast is a field with the argument's name. `saved` has the fields that `backward_tokens` does not name. `needs` has a
bool for each argument but the mask; a gradient is None where it is False.

torch.compile, export, FakeTensor and dispatch modes see one operator where a composition of modules has dozens, and two
in backward, so that what the first needs is free when the second allocates the gradient of x. They run the functions of
the eager node, on real tensors and on FakeTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from operator import itemgetter
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.library import register_autograd
from torch.utils._pytree import tree_leaves, tree_map_only

from onepass.core.eager import fast_apply, no_second, once, outside_autocast, plain
from onepass.core.operator import listed
from onepass.core.register import FORMULAS, flat, gathered, register, register_formulas, there


def _memoryless(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` for FakeTensors: it runs as on a CPU, because kernels need real memory."""

    def fake(*args: Any) -> Any:
        device = next(t.device for t in tree_leaves(args) if isinstance(t, Tensor))
        if device.type == "cpu":
            return run(*args)

        def on(where: Any) -> Callable[[Tensor], Tensor]:
            return lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=where)

        return tree_map_only(Tensor, on(device), run(*tree_map_only(Tensor, on("cpu"), args)))

    return fake


def fused(
    name: str, plan: type[Any], forward: Callable[..., Any], backward_products: Callable[..., Any],
    backward_tokens: Callable[..., Any], multiplications: Callable[..., int], weights: int,
) -> tuple[Callable[..., Any], Any]:  # fmt: skip
    """Return the layer that these functions (see the module's docstring) define, and its forward operator.

    ``layer(plan, *arguments)`` returns the public results; `plan` is the type of its settings, which are hashable.

    The operators have the `name` in small letters. ``multiplications(plan, x, *weights)`` counts multiplications and
    additions of the products from shapes. The last `weights` arguments are the matrices and biases of the products.
    """
    hints = get_type_hints(forward)
    public, saved = get_args(hints["return"])
    arguments = [a for a in hints if a not in ("plan", "return")]
    fields = list(get_type_hints(saved))
    n_args, n_public, mask = len(arguments), len(public._fields), arguments.index("mask")
    names = list(signature(backward_tokens).parameters)
    n_products = sum(n.startswith("d_") for n in names)
    upstream = ["y", *(n.removeprefix("g_") for n in names if n.startswith("g_"))]

    # the expression of each kept tensor in forward; then which kept tensors each backward function takes
    source = {a: f"args[{i}]" for i, a in enumerate(arguments)} | {p: f"results.{p}" for p in public._fields}
    source |= {f: f"made.{f}" for f in fields}
    for_tokens = [n for n in names if n in source]
    for_products = [n for n in signature(backward_products).parameters if n in source]
    activation_names = [f for f in fields if f not in for_tokens]
    kept_names = list(dict.fromkeys((*activation_names, *for_products, *for_tokens)))
    fixed = [p for p in public._fields if p not in upstream]
    # generated without loops, because every call runs it
    save = eval(
        f"lambda ctx, args, results, made: (ctx.save_for_backward({listed(source[n] for n in kept_names)}),"
        f" ctx.mark_non_differentiable({listed(source[p] for p in fixed)}))"
    )
    products_of, tokens_of = (itemgetter(*map(kept_names.index, some)) for some in (for_products, for_tokens))
    # Saved's fields from (None, *kept); index 0 stands for those that only `backward_tokens` takes
    fields_of = itemgetter(*(1 + kept_names.index(f) if f in activation_names else 0 for f in fields))
    arguments_of = itemgetter(*(i for i in range(n_args) if i != mask))
    upstream_of = itemgetter(*map(public._fields.index, upstream))

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, plan: Any, *args: Any) -> Any:
            results, made = forward(plan, *args)
            save(ctx, args, results, made)
            ctx.plan, ctx.dtypes = plan, [None if w is None else w.dtype for w in args[-weights:]]
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        @functools.partial(once, name, leaves=True)
        @outside_autocast
        def backward(ctx: Any, *grads_out: Tensor | None) -> Any:
            if any(g is not None and is_legacy_batchedtensor(g) for g in grads_out):
                raise NotImplementedError(f"{name}: is_grads_batched=True is not implemented; take torch.func.jacrev")
            dy, *others = upstream_of(grads_out)
            tensors = ctx.saved_tensors
            ctx.maybe_clear_saved_tensors()  # `activations` is now the only owner, unless the graph is retained
            activations, inputs, rest = saved(*fields_of((None, *tensors))), products_of(tensors), tokens_of(tensors)
            del tensors
            plan, needs = ctx.plan, arguments_of(ctx.needs_input_grad[1:])
            d_products: Any = (None,) * (n_products + weights)
            if dy is not None:
                d_products = backward_products(activations, plan, needs, ctx.dtypes, dy, *inputs)
            residual = dy if plan.residual else None
            grads = backward_tokens(plan, needs, *d_products[:n_products], residual, *others, *rest)
            return None, *grads[:mask], None, *grads[mask:], *d_products[n_products:]

    # the name that profilers and autograd's errors show
    Node._backward_cls.__name__ = f"_{name}Backward"
    eager = fast_apply(Node)

    def run_forward(*args: Any) -> tuple[Tensor | None, ...]:
        tensors = args[:n_args]
        results, made = forward(args[n_args], *tensors)
        # an operator must return new tensors: None for an argument that Saved holds as it is
        argument_ids = {id(t) for t in tensors}
        return *results, *(None if id(t) in argument_ids else t for t in (getattr(made, f) for f in fields))

    typed = *((a, hints[a]) for a in arguments), ("plan", plan)
    run_forward.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, annotation=t) for n, t in typed]
    )

    def run_products(
        dy: Tensor, kept: Sequence[Tensor | None], beside: Sequence[Tensor | None], weights: Sequence[Tensor | None],
        needs: Sequence[bool], of_plan: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        by_name = dict(zip(arguments[-len(weights) :], weights, strict=True))
        # a matrix that forward did not cast was multiplied as it is
        by_field = {f: by_name.get(f) if there(t) is None else t for f, t in zip(activation_names, kept, strict=True)}
        activations, dtypes = saved(*map(by_field.get, fields)), [None if w is None else w.dtype for w in weights]
        return backward_products(activations, of_plan, needs, dtypes, dy, *beside)  # type: ignore[no-any-return]

    def run_tokens(
        products: Sequence[Tensor | None], of_residual: Tensor | None, upstream: Sequence[Tensor | None],
        kept: Sequence[Tensor | None], needs: Sequence[bool], of_plan: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        d_products, tensors = map(there, products), [*map(there, kept)]
        return backward_tokens(of_plan, needs, *d_products, of_residual, *upstream, *tensors)  # type: ignore[no-any-return]

    prefix = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).strip("_")

    def registered(suffix: str, run: Callable[..., Any], results: int) -> Any:
        run_outside: Any = outside_autocast(run)  # the caller's autocast has become the plan's dtype
        as_written = signature(run, eval_str=True)
        typed = [p.replace(annotation=plan) if p.annotation is Any else p for p in as_written.parameters.values()]
        run_outside.__signature__ = as_written.replace(parameters=typed)
        size = len(typed) - 1
        fake = _memoryless(lambda *args: run_outside(*args[:size], gathered(plan, iter(args[size:]))))
        return register(prefix + suffix, run_outside, fake, results=results)

    forward_op = registered("", run_forward, n_public + len(fields))
    products_op = registered("_products_backward", run_products, n_products + weights)
    tokens_op = registered("_tokens_backward", run_tokens, n_args - 1 - weights)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        by_name = dict(zip((*arguments, *public._fields, *fields), (*inputs[:n_args], *output), strict=True))
        ctx.numbers = inputs[n_args:]
        ctx.save_for_backward(*map(by_name.get, kept_names), *inputs[n_args - weights : n_args])
        ctx.mark_non_differentiable(*map(by_name.get, fixed), *output[n_public:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *grads_out: Tensor | None) -> tuple[Any, ...]:
        none = (None,) * (n_args + len(ctx.numbers))
        dy, *others = upstream_of(grads_out)
        if dy is None and not any(g is not None for g in others):
            return none
        tensors, needs = ctx.saved_tensors, list(arguments_of(ctx.needs_input_grad))
        d_products: Any = none[: n_products + weights]
        if dy is not None:
            activations, weight_tensors = tensors[: len(activation_names)], tensors[len(kept_names) :]
            d_products = products_op(dy, activations, products_of(tensors), weight_tensors, needs, *ctx.numbers)
        residual = dy if gathered(plan, iter(ctx.numbers)).residual else None
        grads = tokens_op(d_products[:n_products], residual, others, tokens_of(tensors), needs, *ctx.numbers)
        grads = [*map(there, (*grads, *d_products[n_products:]))]
        return *grads[:mask], None, *grads[mask:], *none[n_args:]

    register_autograd(forward_op, differentiate, setup_context=setup_context)

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(no_second(name))

    for op in (products_op, tokens_op):
        register_autograd(op, refuse, setup_context=lambda ctx, inputs, output: None)

    def count_forward(*args: Any, **_: Any) -> int:
        return multiplications(gathered(plan, iter(args[n_args:])), args[0], *args[n_args - weights : n_args])

    def count_products(dy: Any, kept: Any, beside: Any, shapes: Any, needs: Any, *of_plan: Any, **_: Any) -> int:
        both = any(needs[:-weights]) + any(needs[-weights:])
        return multiplications(gathered(plan, iter(of_plan)), dy, *shapes) * both

    FORMULAS.update({forward_op.overloadpacket: count_forward, products_op.overloadpacket: count_products})

    def call(plan: Any, *args: Any) -> Any:
        if plain(args[0], args[mask - 1], args[mask]):
            return eager(plan, *args)
        register_formulas()
        return forward_op(*args, *flat(plan))[:n_public]

    return call, forward_op

"""Bind one operator's kernels to autograd, three ways.

A call takes one of three entries, depending on what intercepts it:

* **the dispatcher** (torch.compile, export, jit.trace, FakeTensor, DTensor, any dispatch mode): the registered op.
  Dynamo never traces our autograd.Function: with one tensor passed twice it returns wrong gradients silently.
* **torch.func** (grad, vmap): a `setup_context` Function whose backward is itself a Function.
* **plain eager**: a Function that calls the kernels directly, skipping 10 to 60 µs of dispatcher.

The three share one `save` and one `gradients`, so there is one set of formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.library import register_autograd, register_vmap

from .eager import fast_apply, forward_mode, is_plain_eager_call, no_second, once, outside_autocast
from .launch import replayed
from .register import flat, register_formulas
from .sharding import PARTIAL, rules

Outputs = Tensor | tuple[Tensor | None, ...]


def _at_once(op: Any, size: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> Any:
    """Run a whole batch in one call, as further rows; return results and their batch dimensions, or None if it can't.

    The rule for shards says which arguments and results have a batch dimension: those that could be sharded along it.
    """
    dims = list(zip(args, in_dims, strict=True))
    examples = (a if not isinstance(a, Tensor) else a[None] if d is None else a.movedim(d, 0)[:1] for a, d in dims)
    rule = rules[op]
    results, places = rule(*examples)[0]
    tensor_places, batched = iter(places), []
    for (a, dim), argument in zip(dims, op._schema.arguments, strict=True):
        place = next(tensor_places) if "Tensor" in str(argument.type) else None
        if isinstance(a, Tensor) and isinstance(place, int):
            a = a.expand(size, *a.shape).movedim(0, place) if dim is None else a.movedim(dim, place)
        elif dim is not None:
            return None
        batched.append(a)
    out_dims = [p if isinstance(p, int) else None for p in results]
    if PARTIAL in results or not any(d is not None for d in out_dims):
        return None
    return op(*batched), tuple(out_dims) if len(out_dims) > 1 else out_dims[0]


def _vmap_rule(op: Any, rows: bool) -> Callable[..., Any]:
    """Return an op's vmap rule: one call if rows may be further ones, else one per element (torch's own rule warns)."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        size = info.batch_size
        if rows and size and (batched := _at_once(op, size, in_dims, args)) is not None:
            return batched
        if not size:
            # empty batch: run one dummy element to learn the output shapes
            args = tuple(
                a if d is None else a.new_zeros((*a.shape[:d], 1, *a.shape[d + 1 :]))
                for a, d in zip(args, in_dims, strict=True)
            )

        def element(i: int) -> tuple[Any, ...]:
            # kernels read saved tensors by address, so an element must be contiguous
            return tuple(a if d is None else a.select(d, i).contiguous() for a, d in zip(args, in_dims, strict=True))

        results = [op(*element(i)) for i in range(max(size, 1))]
        if isinstance(results[0], Tensor):
            return torch.stack(results)[:size], 0
        stacked = tuple(torch.stack(parts)[:size] for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


def _flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` called with its arguments flattened: a registered operator takes each item by itself."""
    return lambda *args: function(*flat(args))


def bind(
    *, name: str, forward: Callable[..., Outputs], forward_op: Any, backward: Callable[..., Outputs], backward_op: Any,
    save: Callable[[Any, tuple[Any, ...], Any], None], gradients: Callable[..., tuple[Any, ...]],
    public: Callable[[Any], Any] = lambda outputs: outputs, inference: Callable[..., Any] | None = None,
    check: Callable[..., None] = lambda *args: None, replay: bool = False, state: Callable[[], Any] | None = None,
    native: Callable[..., Any] | None = None, rows: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Return `call(*args)`, differentiable on every path, giving the public outputs.

    Args:
        name: of the public function, for messages.
        forward: the kernels; positional arguments, returns a tensor or a tuple, of which some outputs belong to the
            user and others are saved for backward.
        forward_op: the operator that `core.register` made of `forward`. Where `forward` or `backward` take a tuple of
            options or a list of tensors, the operator, and `save` from it, get each by itself.
        backward: the backward kernels. They return None or an empty tensor for a gradient that is not needed.
        backward_op: the operator made of `backward`; an empty tensor stands for a gradient that is not needed.
        save: `save(ctx, inputs, output)` keeps what backward needs.
        gradients: `gradients(ctx, run, *grads)` → one gradient or None per argument of `forward`;
            `run` is `backward` in the form that suits the path.
        public: `public(outputs)` → the outputs that the user sees; each costs autograd 0.7 µs, even if it is None.
        inference: `forward` for plain eager calls without gradients: it makes only the public outputs.
        check: raises on bad arguments; a replayed call skips it.
        native: torch's own differentiable operator where it is as good: a plain eager call tries it first, and
            continues with the kernels if it returns None.
        rows: rows may have any number of dimensions, so that torch.vmap makes one call with the batch as one more.
        replay: replay calls of known layouts; `forward` and `backward` must launch by `core.launch.launch` alone.
        state: what else their launches depend on, see `replayed`.
    """

    gradients = outside_autocast(gradients)
    call_forward_op, call_backward_op = _flat(forward_op), _flat(backward_op)

    def checked(kernels: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            check(*args)
            return kernels(*args)

        return run

    def prepared(function: Callable[..., Any]) -> Callable[..., Any]:
        function = outside_autocast(function)
        return replayed(function, state) if replay else function

    forward, backward = prepared(checked(forward)), prepared(backward)

    def refuse_tangents(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(f"{name}: forward-mode derivatives are not implemented")

    def refuse_second(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(no_second(name))

    def run_backward(ctx: Any, *grads: Any) -> Any:
        for g in grads:
            if g is not None and is_legacy_batchedtensor(g):
                # is_grads_batched=True: the dispatcher unpacks such a batch; it has no memory for a kernel to read
                return gradients(ctx, call_backward_op, *grads)
        return gradients(ctx, backward, *grads)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            out = forward(*args)
            save(ctx, args, out)
            return public(out)

        backward = staticmethod(once(name, run_backward))
        jvp = staticmethod(refuse_tangents)

    eager: Callable[..., Any] = fast_apply(Eager)

    class FuncBackward(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(lambda *args: backward_op(*args))  # noqa: PLW0108  # dynamo compiles this frame
        setup_context = staticmethod(lambda ctx, inputs, output: None)
        backward = staticmethod(refuse_second)
        jvp = staticmethod(refuse_tangents)

    class Func(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(lambda *args: forward_op(*args))  # noqa: PLW0108  # dynamo compiles this frame
        setup_context = staticmethod(save)  # type: ignore[assignment]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradients(ctx, _flat(FuncBackward.apply), *grads)

        jvp = staticmethod(refuse_tangents)

    register_autograd(forward_op, lambda ctx, *grads: gradients(ctx, call_backward_op, *grads), setup_context=save)
    register_vmap(forward_op, _vmap_rule(forward_op, rows))
    register_autograd(backward_op, refuse_second, setup_context=lambda ctx, inputs, output: None)
    register_vmap(backward_op, _vmap_rule(backward_op, rows))

    @outside_autocast
    def through_dispatcher(*args: Any) -> Any:
        check(*args)
        # a Function raises on tangents; the op would silently drop them
        if torch._C._are_functorch_transforms_active() or forward_mode():
            return public(_flat(Func.apply)(*args))
        register_formulas()
        return public(call_forward_op(*args))

    infer = None if inference is None else prepared(checked(inference))

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            if forward_mode():
                refuse_tangents(None)
            check(*args)
            return public(call_forward_op(*args))
        if not is_plain_eager_call(args):
            return through_dispatcher(*args)
        if native is not None and isinstance(args[0], Tensor):
            out = native(*args)
            if out is not None:
                return out
        if torch.is_grad_enabled():
            for a in args:
                if isinstance(a, Tensor) and a.requires_grad:
                    return eager(*args)
        return public(forward(*args)) if infer is None else infer(*args)

    return call

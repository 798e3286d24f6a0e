"""Bind one operator's kernels to autograd, three ways.

What will look at a call decides how it may enter:

* **the dispatcher** (torch.compile, export, FakeTensor, DTensor, any dispatch mode): the registered op.
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
from torch.autograd.function import once_differentiable

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
# what most calls consist of
_PLAIN_ARGUMENTS = frozenset((*_PLAIN_TYPES, type(None), bool, int, float))

Outputs = Tensor | tuple[Tensor, ...]


def _is_plain(args: tuple[Any, ...]) -> bool:
    """True when nothing but eager autograd will look at this call: no mode, no tensor subclass."""
    if torch._C._len_torch_dispatch_stack():
        return False
    if _PLAIN_ARGUMENTS.issuperset(map(type, args)):
        return True
    return all(type(a) in _PLAIN_TYPES for a in args if isinstance(a, torch.Tensor))


def _vmap_by_loop(op: Any) -> Callable[..., Any]:
    """Give an op's vmap rule: one call per batch element, stacked (as torch's fallback does, without its warning)."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        def element(i: int) -> tuple[Any, ...]:
            return tuple(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True))

        results = [op(*element(i)) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


def _outside_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Run fn with autocast off: the dtypes handed in decide, and inner matmuls keep their precision."""

    def run(*args: Any) -> Any:
        if torch._C._is_any_autocast_enabled():
            for device in ("cuda", "cpu"):
                if torch.is_autocast_enabled(device):
                    with torch.autocast(device, enabled=False):
                        return run(*args)
        return fn(*args)

    return run


def bind(
    *,
    forward: Callable[..., Outputs],
    forward_op: Any,
    backward: Callable[..., Outputs],
    backward_op: Any,
    save: Callable[[Any, tuple[Any, ...], Any], None],
    gradients: Callable[..., tuple[Any, ...]],
    n_public: int = 1,
) -> Callable[..., Any]:
    """Return `call(*args)`, differentiable on every path, giving the first `n_public` outputs.

    Args:
        forward: the kernels; positional arguments, returns a tensor or a tuple of which the first
            `n_public` belong to the user and the rest are saved for backward.
        forward_op: the `torch.library.custom_op` around `forward`.
        backward: the backward kernels. A gradient that was not asked for comes back as an empty tensor.
        backward_op: the `custom_op` around `backward`.
        save: `save(ctx, inputs, output)`: what backward will need.
        gradients: `gradients(ctx, run, *grads)` → one gradient or None per argument of `forward`;
            `run` is `backward` in the form that suits the path.
        n_public: how many outputs the user sees.
    """

    gradients = _outside_autocast(gradients)

    def public(out: Outputs) -> Any:
        if isinstance(out, torch.Tensor):
            return out
        return out[0] if n_public == 1 else tuple(out[:n_public])

    @once_differentiable
    def refuse_second(ctx: Any, *grads: Any) -> Any:
        return gradients(ctx, backward, *grads)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            out = forward(*args)
            save(ctx, args, out)
            return public(out)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            # gradients are recorded only under create_graph=True; the guard against that costs time otherwise
            return refuse_second(ctx, *grads) if torch.is_grad_enabled() else gradients(ctx, backward, *grads)

    # what Function.apply does beyond this concerns torch.func, which never gets here
    eager: Callable[..., Any] = super(torch.autograd.Function, Eager).apply

    class FuncBackward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return backward_op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise NotImplementedError(f"{forward_op._qualname}: second derivatives are not implemented")

    class Func(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return forward_op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            save(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradients(ctx, FuncBackward.apply, *grads)

    forward_op.register_autograd(
        lambda ctx, *grads: gradients(ctx, backward_op, *grads),
        setup_context=save,
    )

    def enter(*args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return public(Func.apply(*args))  # type: ignore[no-untyped-call]
        if _is_plain(args):
            if torch.is_grad_enabled() and any(a.requires_grad for a in args if isinstance(a, torch.Tensor)):
                return eager(*args)
            return public(forward(*args))
        return public(forward_op(*args))

    for op in (forward_op, backward_op):
        op.register_vmap(_vmap_by_loop(op))

    eager_enter = _outside_autocast(enter)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return public(forward_op(*args))
        return eager_enter(*args)

    return call

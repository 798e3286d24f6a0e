"""Whether a call is plain eager PyTorch: what is asked before taking a path that nothing else can look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
# what most calls consist of
_PLAIN_ARGUMENTS = PLAIN_TYPES | {type(None), bool, int, float, str, torch.dtype}


def forward_mode() -> bool:
    """Whether tensors may carry tangents (`forward_ad.dual_level`, jvp, linearize), which no kernel would see."""
    return forward_ad._current_level >= 0


def is_plain_eager_call(args: tuple[Any, ...]) -> bool:
    """True when nothing but autograd will look at these arguments: no transform, no mode, no tensor subclass.

    Nor is the first a meta tensor: there is nothing to compute with, and the dispatcher knows shapes and dtypes.
    """
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() or forward_mode():
        return False
    if args and getattr(args[0], "is_meta", False):
        return False
    if _PLAIN_ARGUMENTS.issuperset(map(type, args)):
        return True
    return all(type(a) in PLAIN_TYPES for a in args if isinstance(a, torch.Tensor))


def plain(*tensors: torch.Tensor | None) -> bool:
    """`is_plain_eager_call`, and no compiler either."""
    return not torch.compiler.is_compiling() and is_plain_eager_call(tensors)


class _Refused(torch.autograd.Function):
    """The first n of some tensors, as if computed from all the others: differentiating them raises."""

    @staticmethod
    def forward(ctx: Any, message: str, n: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.message = message
        return tuple(t.detach() for t in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(ctx.message)


def no_second(name: str) -> str:
    """What to say to someone who differentiates a gradient of the operator `name`."""
    return (
        f"{name}: second derivatives are not implemented; "
        "build this part of the model from torch's own operators where you need them"
    )


def once(name: str, backward: Callable[..., Any], leaves: bool = False) -> Callable[..., Any]:
    """A Function's backward whose gradients can't be differentiated again; they say so, by the operator's name.

    Torch's `once_differentiable` looks at the upstream gradients alone, and ties its error to nothing that a
    `torch.autograd.grad` asks for: a penalty on the gradient would lose its part without a word. Here gradients depend
    on what they were computed from: upstream gradients and what was saved, and with `leaves` the leaves among the
    inputs, for a Function that saves copies of them.
    """

    def run(ctx: Any, *grads: Any) -> Any:
        # gradients are recorded only under create_graph=True; the guard costs time otherwise
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        sources = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
        if leaves:
            sources += [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not sources:
            return found
        several = found if isinstance(found, tuple) else (found,)
        own = [g for g in several if g is not None]
        refused = iter(_Refused.apply(no_second(name), len(own), *own, *sources))  # type: ignore[no-untyped-call]
        return tuple(None if g is None else next(refused) for g in several)

    return run

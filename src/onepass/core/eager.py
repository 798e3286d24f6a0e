"""Detect plain eager calls: they may call kernels directly, because nothing but autograd takes part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_OF_OPERATORS = PLAIN_TYPES | {FakeTensor}
# the types of most calls' arguments, a tuple of options included: one set comparison replaces a loop
_PLAIN_ARGUMENTS = PLAIN_TYPES | {type(None), bool, int, float, str, torch.dtype, tuple}


def forward_mode() -> bool:
    """Return whether tensors may carry tangents (`forward_ad.dual_level`, jvp, linearize); kernels ignore tangents."""
    return forward_ad._current_level >= 0


def is_fake(t: torch.Tensor) -> bool:
    """Return whether the tensor has a shape but no memory."""
    return type(t) is FakeTensor


def is_plain_eager_call(args: tuple[Any, ...]) -> bool:
    """Return whether the call involves no transform, no mode, no trace, no tangents and no tensor subclass.

    A meta tensor as first argument gives False: it has no data, and the dispatcher computes shapes and dtypes. So does
    a lazily negated one (`z.conj().imag`): the dispatcher negates it, kernels would read its memory. torch.jit.trace
    records operators; the operations behind them depend on values. torch.onnx takes operations alone.
    """
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() or forward_mode():
        return False
    if (torch._C._is_tracing() and not torch.onnx.is_in_onnx_export()) or (args and getattr(args[0], "is_meta", False)):
        return False
    is_known = _PLAIN_ARGUMENTS.issuperset(map(type, args))
    if not is_known and any(isinstance(a, torch.Tensor) and type(a) not in PLAIN_TYPES for a in args):
        return False
    return not [a for a in args if type(a) in PLAIN_TYPES and a.is_neg()]


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record operations for autograd, even inside a registered operator, where torch records none."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def plain(*tensors: torch.Tensor | None) -> bool:
    """Return whether `is_plain_eager_call` holds for these tensors outside torch.compile."""
    return not torch.compiler.is_compiling() and is_plain_eager_call(tensors)


def visible(*tensors: torch.Tensor | None) -> bool:
    """Return whether the host may read the values of these tensors: it waits for no device, and breaks no trace."""
    return all(t is None or t.device.type == "cpu" for t in tensors) and plain(*tensors)


def takes_operators(*tensors: torch.Tensor | None) -> bool:
    """Return whether a call with these tensors may go to one large operator through the dispatcher.

    True under torch.compile, dispatch modes and FakeTensor. False for transforms of torch.func, tangents and other
    subclasses of Tensor, whose rules are written for smaller operators, and for meta and lazily negated tensors.
    """
    present = [t for t in tensors if t is not None]
    if forward_mode() or not all(type(t) in _OF_OPERATORS for t in present):
        return False
    is_eager = not torch.compiler.is_compiling()
    if is_eager and (torch._C._are_functorch_transforms_active() or any(t.is_neg() for t in present)):
        return False
    return not any(t.device.type == "meta" for t in present)  # `is_meta` would use each weight in a compiled graph


def fast_apply(function: Any) -> Callable[..., Any]:
    """Return `function.apply` without its functorch dispatch; callers guarantee plain eager."""
    return super(torch.autograd.Function, function).apply  # type: ignore[no-any-return]


class _Refused(torch.autograd.Function):
    """Return the first n tensors as if computed from all of them: differentiating the result raises."""

    @staticmethod
    def forward(ctx: Any, message: str, n: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.message = message
        return tuple(t.detach() for t in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(ctx.message)


def no_second(name: str) -> str:
    """Return the error message for a second derivative of the operator `name`."""
    return (
        f"{name}: second derivatives are not implemented; "
        "build this part of the model from torch's own operators where you need them"
    )


def once(name: str, backward: Callable[..., Any], leaves: bool = False) -> Callable[..., Any]:
    """Wrap a Function's backward so that differentiating its gradients raises an error that names the operator.

    The error of torch's `once_differentiable` has no path to the inputs: a gradient penalty would silently lose this
    term. Here gradients depend on all that they were computed from: the upstream gradients, the saved tensors and, with
    `leaves`, the leaves among the inputs (for a Function that saves copies of them).
    """

    def run(ctx: Any, *grads: Any) -> Any:
        # a kernel reads memory, which has the other sign where a gradient is lazily negated
        grads = tuple([g.resolve_neg() if g is not None and g.is_neg() else g for g in grads])
        # gradients are recorded only under create_graph=True; skip the guard's cost otherwise
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        # a checkpoint hands out a saved tensor once
        snapshot = SimpleNamespace(**vars(ctx), saved_tensors=ctx.saved_tensors, needs_input_grad=ctx.needs_input_grad)
        snapshot.maybe_clear_saved_tensors = lambda: None
        sources = [t for t in (*grads, *snapshot.saved_tensors) if t is not None and t.requires_grad]
        sources += [node.variable for node, _ in ctx.next_functions if leaves and hasattr(node, "variable")]
        with torch.no_grad():
            results = backward(snapshot, *grads)
        gradients = results if isinstance(results, tuple) else (results,)
        present = [g for g in gradients if g is not None]
        refused = iter(_Refused.apply(no_second(name), len(present), *present, *sources))  # type: ignore[no-untyped-call]
        return tuple(None if g is None else next(refused) for g in gradients)

    return run


def outside_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return fn with autocast off: its arguments' dtypes decide, and inner matmuls keep their precision.

    Switching it off takes the host at least 10 µs, so this is done only where autocast is on.
    """

    def run(*args: Any) -> Any:
        if torch._C._is_any_autocast_enabled():
            for device in ("cuda", "cpu"):
                if torch.is_autocast_enabled(device):
                    with torch.autocast(device, enabled=False):
                        return run(*args)
        return fn(*args)

    return run

"""`graphed`: forward and backward of a module as two CUDA graphs, for layers whose kernels take less than the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from onepass.core.garbage import collected

from .count import check_int


class _Fresh(torch.autograd.Function):
    """Identity on tensors, whose backward copies the gradients.

    The graph writes its gradients to the same memory in every replay. Autograd keeps the first gradient of a leaf
    without copying it: the next replay would overwrite what has been accumulated.
    """

    @staticmethod
    def forward(ctx: Any, calls: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        calls[0] += 1
        ctx.calls, ctx.call = calls, calls[0]
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if ctx.call != ctx.calls[0]:
            raise RuntimeError(
                "graphed: another call came between a call and its backward, and overwrote what backward needs: "
                "run backward before the next call, or capture the module once for each"
            )
        return None, *(None if g is None else g.clone() for g in grads)


_SIMPLE = {bool, int, float, str, torch.dtype, type(None)}


def settings(module: nn.Module, device: torch.device, owner: object = None) -> dict[str, Any]:
    """Return by name what a captured graph repeats: of torch, of a module, and of the object that captured it.

    Of all modules: numbers, flags, classes, hooks, forwards set on instances, addresses of parameters and buffers. Of
    the owner: numbers, flags, functions and addresses of tensors.
    """
    kind = device.type
    repeated: dict[str, Any] = {}
    for key, value in () if owner is None else vars(owner).items():
        if type(value) in _SIMPLE or callable(value):
            repeated[key] = value
        elif isinstance(value, Tensor):
            repeated[key] = value.data_ptr(), value.requires_grad
    for name, m in module.named_modules():
        prefix, state = f"{name}." if name else "", m.__dict__
        repeated[f"{prefix}__class__"] = type(m)
        for key, value in state.items():
            if type(value) in _SIMPLE or key == "forward":
                repeated[prefix + key] = value
            elif value and key.endswith("_hooks"):
                repeated[prefix + key] = list(value)
        for key, t in (*state["_parameters"].items(), *state["_buffers"].items()):
            repeated[prefix + key] = None if t is None else (t.data_ptr(), t.requires_grad)
    return repeated | {
        "autocast": torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "the precision of fp32 products": torch.get_float32_matmul_precision(),
        "a hook of all modules": torch_module._has_any_global_hook(),  # type: ignore[no-untyped-call]
    }


def refuse_changed(before: dict[str, Any], now: dict[str, Any], caller: str = "graphed") -> None:
    """Raise ValueError for a setting that differs, by value or by type: k=1 is one token, k=1.0 all."""
    for name in before | now:
        was, is_now = before.get(name), now.get(name)
        if type(was) is not type(is_now) or was != is_now:
            change = "was replaced" if isinstance(is_now, tuple) else f"was {was!r}, is now {is_now!r}"
            raise ValueError(f"{caller}: {name} {change} since the capture: capture another")


def graphed(module: nn.Module, *tensors: Tensor, warmup: int = 3) -> Callable[..., Any]:
    """Capture forward and backward of a module as CUDA graphs; return a function that replays them.

    A graph costs the host a few µs where a routed block's launches take milliseconds. Results are bit-equal to those of
    the module. Gradients accumulate in ``.grad`` as always; an optimizer reads and writes the same parameters.

    A graph repeats one shape, one dtype, one set of settings, and what hooks did to tensors. The function refuses any
    other call by name. The values in the tensors, masks included, are free to change.

    Args:
        module: any module of tensors, on a CUDA device. Call `graphed` under the autocast that calls will have.
        tensors: sample arguments, all tensors, with the shapes, dtypes and ``requires_grad`` of later calls.
        warmup: eager passes before the capture; ≥ 1.

    Returns:
        A function of as many tensors, which returns what the module returns. Its next call overwrites its outputs: use
        or copy them, and run backward, before that.

    Raises:
        TypeError: module is not an `nn.Module`, an argument is not a tensor, or warmup is not an int.
        ValueError: a tensor is not on a CUDA device, gradients are disabled, or warmup < 1. In a call: a tensor,
            module, mode or parameter's address is not as it was captured.
        RuntimeError: in backward: the function was called again in between.

    Source: CUDA graphs by `torch.cuda.make_graphed_callables`.

    Example:
        >>> import torch
        >>> from onepass.nn import RoutedBlock, graphed
        >>> if torch.cuda.is_available():
        ...     block, x = RoutedBlock(64, 1 / 8).cuda(), torch.randn(2, 128, 64, device="cuda")
        ...     run = graphed(block, x)
        ...     run(x).sum().backward()
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"graphed: module must be an nn.Module, got {type(module).__name__}")
    check_int("graphed", "warmup", warmup)
    samples = _described(tensors)
    for i, t in enumerate(tensors):
        if not t.is_cuda:
            raise ValueError(f"graphed: tensor {i} must be on a CUDA device, got one on {t.device}")
    if not tensors:
        raise ValueError("graphed: give the sample arguments; a module without arguments has nothing to replay for")
    if not torch.is_grad_enabled():
        raise ValueError("graphed: it captures a backward pass too: call it with gradients enabled")
    device, n = tensors[0].device, len(tensors)
    captured = settings(module, device)
    autocast = captured["autocast"]
    # parameters become arguments, so that each call hands in new views; a frozen one needs no gradient
    parameters = [p for p in module.parameters() if p.requires_grad]
    # the number of calls so far: a graph holds the activations of the last one alone
    calls = [0]

    def body(*inputs: Tensor) -> Any:
        return module(*inputs[:n])

    # autocast's cache would tie the graph to casts that live only as long as the context
    with collected(), torch.autocast(device.type, autocast, enabled=autocast is not None, cache_enabled=False):
        replay = torch.cuda.make_graphed_callables(  # type: ignore[no-untyped-call]
            body, (*tensors, *parameters), num_warmup_iters=warmup, allow_unused_input=True
        )

    def run(*inputs: Tensor) -> Any:
        refuse_changed(samples, _described(inputs))
        refuse_changed(captured, settings(module, device))
        return replay(*_Fresh.apply(calls, *inputs, *parameters))  # type: ignore[no-untyped-call]

    return run


def _described(tensors: tuple[Any, ...]) -> dict[str, Any]:
    """Return by name what a graph fixes of its arguments; raise TypeError unless they are tensors."""
    described: dict[str, Any] = {"the number of tensors": len(tensors)}
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise TypeError(f"graphed: argument {i} must be a tensor, got {type(t).__name__}")
        described[f"the shape of tensor {i}"] = list(t.shape)
        described |= {f"the {name} of tensor {i}": getattr(t, name) for name in ("dtype", "device", "requires_grad")}
    return described

"""Triton's interpreter with NumPy 2.4, and in less time: one patch per launch, reductions on whole arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


def speed_up() -> None:
    """All of this file."""
    patch_once_per_launch()
    leave_tensors_to_themselves()
    # it saves time alone: a Triton with other insides does without
    with contextlib.suppress(AttributeError, TypeError):
        make_types_once()
    reduce_by_halves()


def patch_once_per_launch() -> None:
    """Let the interpreter exchange the builtins of triton.language once per launch.

    It goes through the whole language again at every call of a device function, although the launch around it has
    patched it and restores it at its end. A module counts as patched while its `load` is no builtin.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    tensor_patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        tensor_patch(tensor, scope)
        # Triton 3.6 calls int() on an array of one element, which NumPy 2.4 refuses
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
    patch = interpreter._patch_lang
    unchanged = SimpleNamespace(restore=lambda: None)

    @functools.cache
    def languages(fn: Callable[..., Any]) -> list[ModuleType]:
        return [m for m in (tl, tl.core) if any(value is m for value in fn.__globals__.values())]

    def patch_lang(fn: Callable[..., Any]) -> Any:
        return patch(fn) if any(tl.core.is_builtin(m.load) for m in languages(fn)) else unchanged

    interpreter._patch_lang = patch_lang


def leave_tensors_to_themselves() -> None:
    """Let `CONSTANT * tensor` be the tensor's product: in Triton 3.8 the constant of a module makes another of it."""
    import triton.language as tl

    for name in ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge"):
        method = getattr(tl.constexpr, f"__{name}__")

        def operate(self: Any, other: Any, method: Callable[..., Any] = method) -> Any:
            return NotImplemented if isinstance(other, tl.tensor) else method(self, other)

        setattr(tl.constexpr, f"__{name}__", operate)


def make_types_once() -> None:
    """Let a block's type and the shape of a tensor be worked out once for each, and no overflow be computed.

    Half of the interpreter's time. It adds in int64 beside every int32 and hands the result to an assertion, which
    without `debug` is none.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    numpy_dtype, of_block, of_tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    dtypes: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(dtype)
        return dtypes[name]

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        if key not in blocks:
            of_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in tensors:
            of_tensor(self, handle, type)
            tensors[key] = dict(vars(self))
        vars(self).update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    interpreter._get_np_dtype = get_np_dtype
    tl.block_type.__init__ = make_block
    tl.tensor.__init__ = make_tensor


def reduce_by_halves() -> None:
    """Let a reduction with a combine function of its own run on whole arrays, as a tree; it goes element by element."""
    import numpy as np
    from triton.runtime import interpreter

    def reduce(self: Any, given: tuple[Any, ...]) -> list[Any]:
        if self.combine_fn.fn.__name__ in ("add_pairs", "add_triples"):
            return [self.sum(t) for t in given]
        flat = self.axis is None
        tensors, axis = self.unravel(given, self.axis)
        while (width := tensors[0].handle.data.shape[axis]) > 1:
            halves = [np.split(t.handle.data, 2, axis) for t in tensors]
            pairs = [[self.to_tensor(h[i], t.dtype) for h, t in zip(halves, tensors, strict=True)] for i in (0, 1)]
            out = self.combine_fn.fn(*pairs[0], *pairs[1])
            tensors = out if isinstance(out, tuple) else (out,)
            assert tensors[0].handle.data.shape[axis] == width // 2
        results = []
        for t in tensors:
            data = t.handle.data if self.keep_dims else np.squeeze(t.handle.data, axis)
            if flat and self.keep_dims:
                data = data.reshape((1,) * len(given[0].shape))
            results.append(self.to_tensor(data, t.dtype))
        return results

    interpreter.ReduceOps.generic_reduce = reduce

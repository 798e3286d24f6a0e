"""Triton's interpreter with NumPy 2.4, and without the half of its time that it spends on patching what is patched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


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

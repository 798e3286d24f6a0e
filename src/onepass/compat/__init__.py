"""The names, argument order and defaults of well-known public kernels, on top of onepass.

One module per original. To switch, change the import line of any name that the module has:

=====================  =============================================================================================
`lion_pytorch`         `Lion`, `update_fn`
`colt5_attention`      `coor_descent`, `triton_coor_descent`, `topk`; modules: `contrib/colt5` in the repository
`triton_transformer`   `layernorm`; no other layer
`cs336`                `WeightedSumFunc`
=====================  =============================================================================================

A module is imported at its first use: ``onepass.compat.lion_pytorch.Lion`` works after ``import onepass``.
Importing a name that only the original has raises an ImportError that names the replacement.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["colt5_attention", "cs336", "lion_pytorch", "triton_transformer"]

if TYPE_CHECKING:
    from onepass.compat import colt5_attention, cs336, lion_pytorch, triton_transformer
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""PyTorch operators that pass over memory once, and the conditional computation they exist for."""

import importlib
from typing import TYPE_CHECKING, Any

from onepass._interrupt import is_loaded as _is_loaded
from onepass.ops.coor_descent.op import coor_descent
from onepass.ops.experts.op import expert_order, experts
from onepass.ops.norm.op import Quantized, layer_norm, rms_norm
from onepass.ops.qk_norm_rope.op import qk_norm_rope
from onepass.ops.soft_topk.op import soft_topk
from onepass.ops.topk.op import TopK, kth_value, topk
from onepass.ops.weighted_sum.op import weighted_sum

_is_loaded()

__version__ = "0.1.0"

_LAZY = ("compat", "nn", "optim")
_LAZY_NAMES = ("SwapReport", "swap")


if TYPE_CHECKING:
    from onepass import compat as compat
    from onepass import nn as nn
    from onepass import optim as optim
    from onepass.swapping import SwapReport, swap
else:

    def __getattr__(name: str) -> Any:
        """`onepass.nn` and its like are imported when first touched, so that `import onepass` stays quick."""
        if name in _LAZY:
            return importlib.import_module(f"onepass.{name}")
        if name in _LAZY_NAMES:
            return getattr(importlib.import_module("onepass.swapping"), name)
        # a newcomer's onepass.Lion: say where it is; names with an underscore are asked for by machines
        rooms = () if name.startswith("_") else ("nn", "optim")
        homes = [room for room in rooms if name in importlib.import_module(f"onepass.{room}").__all__]
        hint = f"; it is onepass.{homes[0]}.{name}" if homes else ""
        raise AttributeError(f"module 'onepass' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_NAMES})


__all__ = [
    "Quantized",
    "SwapReport",
    "TopK",
    "__version__",
    "coor_descent",
    "expert_order",
    "experts",
    "kth_value",
    "layer_norm",
    "qk_norm_rope",
    "rms_norm",
    "soft_topk",
    "swap",
    "topk",
    "weighted_sum",
]

"""Whether a call is plain eager PyTorch: what is asked before taking a path that nothing else can look into."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
# what most calls consist of
_PLAIN_ARGUMENTS = PLAIN_TYPES | {type(None), bool, int, float, str, torch.dtype}


def forward_mode() -> bool:
    """Whether tensors may carry tangents (`forward_ad.dual_level`, jvp, linearize), which no kernel would see."""
    return forward_ad._current_level >= 0


def unwatched(args: tuple[Any, ...]) -> bool:
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
    """`unwatched`, and no compiler either."""
    return not torch.compiler.is_compiling() and unwatched(tensors)

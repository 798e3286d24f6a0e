"""Whether a call is plain eager PyTorch: what a module asks before it takes a path that nothing else can look into."""

from __future__ import annotations

import torch

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def plain(*tensors: torch.Tensor | None) -> bool:
    """True when only eager autograd will see these tensors: no compiler, no torch.func, no mode, no tensor subclass."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and all(t is None or type(t) in _PLAIN_TYPES for t in tensors)
    )

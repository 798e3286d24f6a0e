"""Which modules look like a norm, and which of them can't be exchanged, as far as no computation is needed."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from onepass.nn import LayerNorm, RMSNorm

from .exchange import Target

_EPS = ("eps", "variance_epsilon", "epsilon")
# libraries whose classes named LayerNorm or RMSNorm are known
LIBRARIES = ("transformers.models.", "timm.", "torchvision.", "diffusers.")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# torch's other norms, its parametrizations, and modules named like them
_OTHERS = ("batchnorm", "groupnorm", "instancenorm", "localresponsenorm", "weightnorm", "spectralnorm")
# a class may define these without changing what a module saves, loads or does beyond its output
_HARMLESS = {"__init__", "forward", "extra_repr", "__repr__"}


def is_known(module: nn.Module, also: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a class may be exchanged: torch's, plain norms of four libraries, and those that `also` names."""
    cls: type = type(module).__base__ if parametrize.is_parametrized(module) else type(module)  # type: ignore[assignment]
    if cls in (nn.LayerNorm, nn.RMSNorm, *also):
        return True
    by_name = cls.__name__.lower().removesuffix("fp32").endswith(("rmsnorm", "layernorm"))
    return by_name and cls.__module__.startswith(LIBRARIES)


def path_of(cls: type) -> str:
    """Return a class's name with its module, by which an import finds it."""
    if cls in (nn.LayerNorm, nn.RMSNorm):
        return f"torch.nn.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def looks_like_norm(module: nn.Module, also: tuple[type[nn.Module], ...] = ()) -> bool:
    """Return whether the report has a line for the module: a LayerNorm or RMSNorm by type, or a norm by name."""
    if isinstance(module, (LayerNorm, RMSNorm)):
        return False
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or type(module) in also:
        return True
    names = [cls.__name__.lower() for cls in type(module).__mro__]
    if any(other in name for name in names for other in _OTHERS):
        return False
    if not module._modules:
        return any(name.endswith("norm") or "rmsnorm" in name or "layernorm" in name for name in names)
    if not any(name.endswith(("rmsnorm", "layernorm")) for name in names):
        return False
    # a container such as PreLayerNorm has an inner norm with a line of its own
    inside = list(module.modules())[1:]
    return not any(isinstance(m, (LayerNorm, RMSNorm)) or looks_like_norm(m) for m in inside)


def targets(module: nn.Module, also: tuple[type[nn.Module], ...]) -> list[Target] | str:
    """Return what the module may become, the likeliest first, or why it is left alone."""
    problem = _obstacle(module) or _parameter_problem(module)
    if problem:
        return problem
    if not is_known(module, also):
        return f"its class is not known; also=({path_of(type(module))},) if it computes a norm of every input"
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    shape: tuple[int, ...]
    eps: Any
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        shape, eps = module.normalized_shape, module.eps
    else:
        assert weight is not None
        shape = tuple(weight.shape)
        names = [name for name in _EPS if name in vars(module)]
        if not names:
            return f"it has no attribute {' or '.join(_EPS)}"
        eps = vars(module)[names[0]]
    if not math.prod(shape):
        return "its width is 0"
    is_rms = isinstance(module, nn.RMSNorm)
    if not ((is_rms and eps is None) or (type(eps) in (int, float) and 0 <= eps < math.inf)):
        return f"its eps is {eps!r}"
    affine = weight is not None
    rms = [RMSNorm(shape, eps, affine, "meta")]
    if affine:
        rms += [RMSNorm(shape, eps, device="meta", rounding="twice"), RMSNorm(shape, eps, device="meta", offset=1.0)]
    if is_rms:
        return [Target.like(norm) for norm in rms]
    only_layer = isinstance(module, nn.LayerNorm) or bias is not None
    if math.prod(shape) == 1 and only_layer:
        return "its width is 1: a layer norm of one number is its bias"
    layer = LayerNorm(shape, eps, affine, bias is not None, "meta")
    return [Target.like(norm) for norm in ([layer] if only_layer else [*rms, layer])]


def _obstacle(module: nn.Module) -> str:
    """Return why a call of the module may do more than compute a norm, or an empty string."""
    if parametrize.is_parametrized(module):
        return "it has parametrizations"
    if "forward" in vars(module):
        return "its forward is overwritten on the instance"
    if vars(module).get("_compiled_call_impl") is not None:
        return "it is compiled on its own"
    if module._modules:
        return f"it has modules inside: {', '.join(module._modules)}"
    if module._buffers:
        return f"it has buffers: {', '.join(module._buffers)}"
    for cls in type(module).__mro__:
        if cls in (nn.LayerNorm, nn.RMSNorm, nn.Module):
            break
        for name in sorted(vars(cls).keys() & vars(nn.Module).keys() - _HARMLESS):
            if inspect.isroutine(vars(cls)[name]) and not name.startswith("__annotat"):
                return f"its class overrides {name}"
    parameters = list(inspect.signature(type(module).forward).parameters.values())
    if len(parameters) != 2 or parameters[1].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        return f"its forward takes {', '.join(map(str, parameters[1:])) or 'nothing'}; a norm's takes one tensor"
    return ""


def _parameter_problem(module: nn.Module) -> str:
    """Return why the parameters are not those of a norm, or an empty string."""
    is_torchs = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    names = ("weight",) if isinstance(module, nn.RMSNorm) else ("weight", "bias")
    present = {name: p for name, p in module._parameters.items() if p is not None}
    if not present.keys() <= set(names) or any(vars(module).get(name) is not None for name in names):
        return f"its parameters are {', '.join(present) or 'hidden by attributes'}; a norm's are {' and '.join(names)}"
    if "weight" not in present and (present or not is_torchs or module.elementwise_affine):
        return "it has no weight"
    for name, p in present.items():
        if type(p) is not nn.Parameter:
            return f"its {name} is of type {type(p).__name__}"
        if p.dtype not in _DTYPES:
            return f"its {name} is {str(p.dtype).removeprefix('torch.')}"
        shape = module.normalized_shape if is_torchs else (present["weight"].numel(),)
        if tuple(p.shape) != shape:
            return f"its {name} has the shape {tuple(p.shape)}"
    if len({p.device for p in present.values()}) > 1:
        return "its parameters are on two devices"
    return ""

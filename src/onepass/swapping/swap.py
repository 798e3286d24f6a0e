"""`swap`: find the norms of a model, check each, exchange those that compute the same."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onepass.nn import LayerNorm, RMSNorm

from .check import choose
from .exchange import Exchange, Target
from .recognise import is_known, looks_like_norm, path_of, targets
from .report import Layer, SwapReport


def swap(
    model: nn.Module, *, include: str | Iterable[str] = "*", exclude: str | Iterable[str] = (), strict: bool = False,
    dry_run: bool = False, also: type[nn.Module] | Iterable[type[nn.Module]] = (),
) -> SwapReport:  # fmt: skip
    r"""Exchange the LayerNorms and RMSNorms of a model for those of `onepass.nn`, which read x once.

    Exchanged are ``nn.LayerNorm``, ``nn.RMSNorm``, the LayerNorms and RMSNorms of transformers, timm, torchvision and
    diffusers, and classes that `also` names, with a vector ``weight`` (and perhaps ``bias``) and an ``eps``. Each is
    compared with its replacement first, in fp32 with random weights: an output, and gradients. RMS norms that multiply
    by 1 + weight (Gemma) become ``RMSNorm(offset=1.0)``. The report says why a norm is left alone: no comparison shows
    what unknown code does with every input, so subclasses and norms of other libraries are left alone unless named.

    The model keeps its module objects: an exchange changes the class of a module and adds the attributes of the new
    class. Parameters, hooks of all kinds, dtype, device, training flag and state_dict keys stay as they are, and an
    optimizer that holds the parameters goes on. Models on the meta device are checked on the CPU. The check calls no
    hook and leaves the random state as it was.

    Rounding: in fp32 outputs agree within the rounding of the sums. In 16 bits a norm that rounds the normalised x and
    its product with the weight (Llama, Qwen, T5) becomes ``RMSNorm(rounding="twice")``; others round once. On a CPU the
    bits are the same; a module that rounds otherwise differs by at most ``1.5 * torch.finfo(dtype).eps`` of its size,
    plus a few of fp16's subnormal steps. The result has the dtype that it had, also where those of x and weight
    differ; but under CUDA autocast that of torch's LayerNorm is fp32, and afterwards that of x.

    Args:
        model: any module; swap first, then wrap it in DistributedDataParallel or FSDP, or compile it.
        include: a glob or several, as in ``"model.layers.*"``; norms with such a name are exchanged.
        exclude: a glob or several; norms with such a name are left alone.
        strict: raise if a norm of a known class is left alone that include and exclude chose; nothing is exchanged
            then.
        dry_run: check and report only.
        also: a class or several, exactly these and not their subclasses, that compute a norm of every input.

    Returns:
        a `SwapReport`: ``str()`` is a table, ``undo()`` takes the exchange back, ``with`` does so at its end.

    Raises:
        TypeError: model is not a module, a glob not a string, or `also` holds something else than classes of modules.
        ValueError: a glob matches no norm, model has a DistributedDataParallel or FSDP in it, or strict and a norm is
            left alone.

    Example:
        >>> import torch, onepass
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> report = onepass.swap(model)
        >>> print(report)
        exchanged  1  torch.nn.LayerNorm -> onepass.nn.LayerNorm  1
        >>> report.undo()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap: model must be a torch.nn.Module, got {type(model).__name__}")
    _refuse_wrappers(model)
    named = (also,) if isinstance(also, (type, str)) or not isinstance(also, Iterable) else tuple(also)
    for cls in named:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"swap: also must be a class of modules or several, got {cls!r:.80}")
    # a shared module has several names
    names_of: dict[nn.Module, tuple[str, ...]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names_of[module] = (*names_of.get(module, ()), name)
    norms = {module: names for module, names in names_of.items() if looks_like_norm(module, named)}
    ours = [names for module, names in names_of.items() if isinstance(module, (LayerNorm, RMSNorm))]
    names_of_all = [*norms.values(), *ours]
    included, excluded = _globs("include", include, names_of_all), _globs("exclude", exclude, names_of_all)
    layers: list[Layer] = []
    failed: list[Layer] = []
    changes: list[tuple[nn.Module, Target]] = []
    for module, names in norms.items():
        kind = path_of(type(module))
        if not _matches(names, included) or _matches(names, excluded):
            layers.append(Layer(names, kind, "", "excluded" if _matches(names, included) else "not included"))
            continue
        options = targets(module, named)
        target = options if isinstance(options, str) else choose(module, options)
        if isinstance(target, str):
            layers.append(Layer(names, kind, "", target))
            failed += layers[-1:] if is_known(module, named) else []
        else:
            layers.append(Layer(names, kind, target.label, ""))
            changes.append((module, target))
    if strict and failed:
        raise ValueError(f"swap: strict, and these norms would be left alone\n{SwapReport(failed, (), True)}")
    return SwapReport(layers, [] if dry_run else [Exchange(*change) for change in changes], dry_run, len(ours))


def _refuse_wrappers(model: nn.Module) -> None:
    """Raise ValueError for a model that is already distributed."""
    # a module that was never imported has no instances, and importing FSDP takes long
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = ("FullyShardedDataParallel", "FSDPModule")
    wrappers = (DistributedDataParallel, *(getattr(fsdp, name) for name in names if hasattr(fsdp, name)))
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            raise ValueError(f"swap: {name or 'model'} is wrapped in {type(module).__name__}; swap first, then wrap")


def _globs(argument: str, patterns: str | Iterable[str], norms: list[tuple[str, ...]]) -> list[str]:
    globs = list(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, str) else [patterns]
    for glob in globs:
        if not isinstance(glob, str):
            raise TypeError(f"swap: {argument} must be a glob or several, got {type(glob).__name__}")
        # a model without norms has none to exclude, so any glob is right
        must_match = norms or (argument == "include" and glob != "*")
        if must_match and not any(_matches(names, [glob]) for names in norms):
            names_shown = ", ".join(repr(names[0]) for names in norms) or "none"
            names_shown = names_shown if len(names_shown) < 300 else f"{names_shown[:300]}..."
            raise ValueError(f"swap: {argument} {glob!r} matches no norm of the model; it has {names_shown}")
    return globs


def _matches(names: tuple[str, ...], globs: list[str]) -> bool:
    return any(fnmatchcase(name, glob) for name in names for glob in globs)

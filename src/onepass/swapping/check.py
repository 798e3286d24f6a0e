"""Compare a norm with its replacement: output and gradients in fp32, bits in bf16, dtypes of results."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from onepass.nn import LayerNorm, RMSNorm

from .exchange import Exchange, Target

SEED = 20
# nonzero numbers of a sparse row
FEW = 8
# rows of `_input` whose gradients are compared; in those of the other rows terms cancel
_DENSE = (slice(0, 1), slice(0, 2))


def choose(module: nn.Module, candidates: list[Target]) -> Target | str:
    """Return the first target that computes what the module computes, or why the closest does not."""
    first = next(module.parameters(recurse=False), None)
    device = torch.device("cpu") if first is None or first.is_meta else first.device
    with _isolated(device):
        problems = [_compare(module, target, device) for target in candidates]
        fits = [target for target, problem in zip(candidates, problems, strict=True) if problem is None]
        chosen = _same_rounding(module, fits) if fits else min(filter(None, problems))[1]
        return chosen if isinstance(chosen, str) else _check_two_dtypes(module, chosen)


def _check_two_dtypes(module: nn.Module, target: Target) -> Target | str:
    """Return the target whose results have the module's dtypes where x and weight have two, or why there is none."""
    wide, narrow = torch.float32, torch.bfloat16
    with torch.no_grad(), warnings.catch_warnings():
        # torch warns of two dtypes, which the user did not ask for
        warnings.simplefilter("ignore")
        outputs = _output(module, target, wide, narrow), _output(module, target, narrow, wide)
    output_dtypes = [None if y is None else y.dtype for y in outputs]
    rules = {(wide, narrow): target}
    if issubclass(target.cls, RMSNorm) and "weight" in module._parameters:
        rules |= {(wide, wide): target.mixed(narrow=False), (narrow, wide): target.mixed(narrow=True)}
    for dtypes, rule in rules.items():
        if all(a in (None, b) for a, b in zip(output_dtypes, dtypes, strict=True)):
            return rule
    return f"its output is {' and '.join(_short(d) for d in output_dtypes if d)} where x and weight have two dtypes"


def _same_rounding(module: nn.Module, fits: list[Target]) -> Target | str:
    """Return the first target whose output has the module's bits in bf16 on the CPU; the first of all if none has.

    Return why there is none if the module's output is not in bf16, because the model may be cast after the exchange.
    """
    for target in fits:
        theirs, ours = (_output(module, target, torch.bfloat16, torch.bfloat16, swapped) for swapped in (False, True))
        if theirs is None or ours is None:
            # a module that does not run in bf16 has no rounding there
            return fits[0]
        if theirs.dtype != torch.bfloat16:
            return f"its output is {_short(theirs.dtype)}, {_whose(target)} bfloat16"
        if torch.equal(theirs, ours):
            return target
    return fits[0]


def _output(
    module: nn.Module, target: Target, x_dtype: torch.dtype, weight_dtype: torch.dtype, swapped: bool = False
) -> Tensor | None:
    """Return the output of a twin of the module for `_input` on the CPU, or None if it does not take these dtypes."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    twin = _twin(module, generator, torch.device("cpu"), weight_dtype)
    try:
        if swapped:
            Exchange(twin, target)
        return type(twin).forward(twin, _input(generator, target).to(x_dtype))  # type: ignore[no-any-return]
    except Exception:  # a module of another library may raise anything for dtypes that it does not take
        return None


def _compare(module: nn.Module, target: Target, device: torch.device) -> tuple[float, str] | None:
    """Return None if the target computes the same, else how far off it is and a sentence that says so.

    Twins of the module are compared: its class and attributes with random parameters in fp32, on its device, or on the
    CPU for the meta device. The module's own parameters may be zero or not loaded yet.
    """
    generator = torch.Generator("cpu").manual_seed(SEED)
    twin = _twin(module, generator, device, torch.float32)
    x = _input(generator, target)
    dy = x + torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
    # cast first: not every device has float64
    x, dy = (t.to(torch.float32).to(device) for t in (x, dy))
    try:
        theirs = _run(twin, x, dy)
    except Exception as e:
        return math.inf, f"its forward raises on random input in float32: {_first_line(e)}"
    try:
        Exchange(twin, target)
        ours = _run(twin, x, dy)
    except Exception as e:
        return math.inf, f"{target.label} raises in its place: {_first_line(e)}"
    return _difference(theirs, ours, twin, target, x, dy)


def _twin(module: nn.Module, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a module of the same class and attributes, in training mode, with random parameters around 1 and 0."""
    twin = object.__new__(type(module))
    # copy containers, so that a forward that fills one does not change the module
    attributes = {name: copy.copy(v) if isinstance(v, (dict, list, set)) else v for name, v in vars(module).items()}
    vars(twin).update(attributes, training=True)

    def random(name: str, p: Tensor) -> nn.Parameter:
        t = torch.rand(p.shape, generator=generator, dtype=torch.float64, device="cpu")
        return nn.Parameter((t + 0.5 if name == "weight" else t - 0.5).to(dtype).to(device))

    vars(twin)["_parameters"] = {name: None if p is None else random(name, p) for name, p in module._parameters.items()}
    return twin


def _input(generator: torch.Generator, target: Target) -> Tensor:
    """Return six rows that tell norms apart, as (2, 3, *shape).

    Rows 0 to 2 are dense and have a mean. Rows 3 and 4 are ±v in a few places, row 4 as small as the square root of
    eps: few numbers are summed, so float32 shows a wrong eps or a divisor N − 1. Row 5 is zeros.
    """
    width, eps = math.prod(target.fields["normalized_shape"]), _eps(target)
    x = torch.randn(6, width, generator=generator, dtype=torch.float64, device="cpu") + 1
    x[1] *= 4
    few = min(FEW, width)
    signs = torch.ones(few, dtype=torch.float64, device="cpu")
    signs[1::2] = -1
    for row, rms in ((3, 1.0), (4, math.sqrt(max(eps, 1e-12)))):
        x[row] = 0
        x[row, :few] = signs * rms * math.sqrt(width / few)
    x[5] = 0 if eps else 1
    return x.view(2, 3, *target.fields["normalized_shape"])


def _whose(target: Target) -> str:
    return "an RMS norm's" if issubclass(target.cls, RMSNorm) else "a layer norm's"


def _run(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Return the output, and for its dense rows the gradients of x and the parameters."""
    # the class's forward, which calls no hooks
    forward = type(module).forward
    rows = x[_DENSE].clone().requires_grad_()
    inputs = [rows, *module.parameters(recurse=False)]
    return [forward(module, x), *torch.autograd.grad(forward(module, rows), inputs, dy[_DENSE])]


def _difference(
    theirs: list[Tensor], ours: list[Tensor], twin: nn.Module, target: Target, x: Tensor, dy: Tensor
) -> tuple[float, str] | None:
    """Return how far theirs and ours differ, and a sentence, if that is beyond rounding; else None.

    A sum of N numbers in two orders differs by at most 2(N + 1)u relatively, u = 2^−24; the bound allows twice that
    and a few more roundings.
    """
    width = math.prod(target.fields["normalized_shape"])
    u = torch.finfo(torch.float32).eps / 2
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            pair = [_short(t.dtype) if a.dtype != b.dtype else tuple(t.shape) for t in (a, b)]
            return math.inf, f"its output is {pair[0]}, {_whose(target)} {pair[1]}"
        rows = -1, a.numel() if i > 1 else width
        a, b = (_wide(t).reshape(rows) for t in (a, b))
        error = (a - b).abs().amax(-1)
        relative = torch.where(error == 0, 0.0, error / _scale(i, b, twin, target, x, dy)).nan_to_num(math.inf)
        bound = torch.full_like(relative, 4 * (width + FEW) * u)
        if i == 0:
            # rows 3 and 4 have few nonzero numbers
            bound[3:5] = 4 * (min(width, FEW) + FEW) * u
        if bool((relative > bound).any()):
            worst = f"{float(relative.max()):.1e}"
            return float(worst), f"its {'gradient' if i else 'output'} differs by {worst} from {_whose(target)}"
    return None


def _scale(i: int, ours: Tensor, twin: nn.Module, target: Target, x: Tensor, dy: Tensor) -> Tensor:
    """Return per row what the error of the i-th result is relative to: the largest number before terms cancel."""
    largest = ours.abs().amax(-1)
    weight, bias = (twin._parameters.get(name) for name in ("weight", "bias"))
    if i == 0:
        return largest if bias is None else largest + _wide(bias).abs().max()
    if i > 1:
        return largest
    # dx = r(g − mean(g) − n·mean(g·n)) with g = w·dy, n = r·x
    rows, upstream = (_wide(t[_DENSE]).reshape(len(ours), -1) for t in (x, dy))
    rows = rows - rows.mean(-1, keepdim=True) if target.cls is LayerNorm else rows
    r = (rows.square().mean(-1) + _eps(target)).rsqrt()
    w = 1.0 if weight is None else _wide(weight).abs().max() + target.fields.get("offset", 0.0)
    return r * w * upstream.abs().amax(-1) * (1 + r * rows.abs().amax(-1))


def _eps(target: Target) -> float:
    eps = target.fields["eps"]
    return torch.finfo(torch.float32).eps if eps is None else float(eps)


def _first_line(e: Exception) -> str:
    line = f"{type(e).__name__}: {e}".splitlines()[0]
    return line if len(line) <= 100 else f"{line[:97]}..."


def _wide(t: Tensor) -> Tensor:
    return t.detach().cpu().double()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Run with gradients on and autocast off; the caller's modes and random state stay as they are."""
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield

"""Compare a norm with its replacement on random input: outputs and gradients in fp32, outputs in its own dtype."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onepass.nn import LayerNorm

from .exchange import Exchange, Target

SEED = 20
NAMES = {"LayerNorm": "a layer norm's", "RMSNorm": "an RMS norm's"}
# nonzero numbers of a sparse row
FEW = 8
# outputs of `_run` before its gradients, of which the first is that of x
OUTPUTS = 3
# rows of `_input` for gradients; those of the other rows are sums that cancel
_DENSE = (slice(0, 1), slice(0, 2))


def choose(module: nn.Module, found: list[Target]) -> Target | str:
    """Return the first target that computes what the module computes, or why the closest does not."""
    parameters = [p for p in module._parameters.values() if p is not None]
    fits: list[Target] = []
    device = parameters[0].device if parameters else torch.device("cpu")
    device = torch.device("cpu") if device.type == "meta" else device
    dtype = parameters[0].dtype if parameters else torch.float32
    problems = []
    with _alone(device):
        for target in found:
            problem = _compare(module, target, device, torch.float32)
            if problem is None:
                fits.append(target)
            else:
                problems.append(problem)
        if not fits:
            return min(problems)[1]
        target, problem = _same_rounding(module, fits)
        if problem is None and dtype != torch.float32:
            problem = _compare(module, target, device, dtype)
    return target if problem is None else problem[1]


def _same_rounding(module: nn.Module, fits: list[Target]) -> tuple[Target, tuple[float, str] | None]:
    """Return the first target whose output has the module's bits in bf16 on the CPU; the first of all if none has.

    And what is wrong if the module's output is not in bf16: the model may be cast after the exchange.
    """
    for target in fits:
        generator = torch.Generator("cpu").manual_seed(SEED)
        twin = _twin(module, generator, torch.device("cpu"), torch.bfloat16)
        x = _input(generator, target).to(torch.bfloat16)
        try:
            theirs = _run(twin, x, x, False)
            Exchange(twin, target)
            ours = _run(twin, x, x, False)
        except Exception:
            # a module that does not run in bf16 has no rounding there
            return fits[0], None
        if theirs[0].dtype != torch.bfloat16:
            label = NAMES[target.cls.__name__]
            return target, (math.inf, f"its output is {_short(theirs[0].dtype)}, {label} bfloat16")
        if all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)):
            return target, None
    return fits[0], None


def _compare(module: nn.Module, target: Target, device: torch.device, dtype: torch.dtype) -> tuple[float, str] | None:
    """Return None if the target computes the same, else how far off it is and a sentence that says so.

    Twins of the module are compared: its class and attributes on random parameters, on its device, or on the CPU for
    the meta device. The weights at hand do not matter: they may be zero or not loaded yet.
    """
    generator = torch.Generator("cpu").manual_seed(SEED)
    gradients = dtype == torch.float32
    twin = _twin(module, generator, device, dtype if gradients else None)
    x = _input(generator, target)
    dy = x + torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
    # cast first: not every device has float64
    x, dy = (t.to(dtype).to(device) for t in (x, dy))
    before = _attributes(twin)
    try:
        theirs = _run(twin, x, dy, gradients)
    except Exception as e:
        return math.inf, f"its forward raises on random input in {_short(dtype)}: {_first_line(e)}"
    written = _attributes(twin).keys() ^ before.keys()
    if written:
        return math.inf, f"its forward changes the attribute {min(written)[0]}"
    try:
        Exchange(twin, target)
        ours = _run(twin, x, dy, gradients)
    except Exception as e:
        return math.inf, f"{target.label} raises in its place: {_first_line(e)}"
    return _difference(theirs, ours, twin, target, x, dy)


def _twin(module: nn.Module, generator: torch.Generator, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Return a module of the same class and attributes with random parameters; dtype None keeps each its own."""
    twin = object.__new__(type(module))
    # containers are copied: a forward that fills one leaves the module as it was
    own = {name: copy.copy(v) if isinstance(v, (dict, list, set)) else v for name, v in vars(module).items()}
    vars(twin).update(own)

    def random(name: str, p: Tensor) -> nn.Parameter:
        t = torch.rand(p.shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5
        t = t if name == "weight" else t - 1
        return nn.Parameter(t.to(dtype or p.dtype).to(device))

    vars(twin)["_parameters"] = {name: None if p is None else random(name, p) for name, p in module._parameters.items()}
    return twin


def _attributes(module: nn.Module) -> dict[tuple[str, int, int], Any]:
    """Return the attributes by name, identity and number of elements; equal keys are the same objects."""
    sizes = {name: len(v) if isinstance(v, (dict, list, set)) else 0 for name, v in vars(module).items()}
    return {(name, id(v), sizes[name]): v for name, v in vars(module).items() if name != "training"}


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


def _run(module: nn.Module, x: Tensor, dy: Tensor, gradients: bool) -> list[Tensor]:
    """Return the outputs for (6, …), (3, 1, 2, …) and (2, 3, …), and with `gradients` those of x and of the parameters.

    The first call is without gradients, the first two are in evaluation mode, the rest in training mode. The class's
    forward is called, so hooks are not.
    """
    forward = type(module).forward
    vars(module)["training"] = False
    with torch.no_grad():
        outs = [forward(module, x.flatten(0, 1))]
    outs.append(forward(module, x.view(3, 1, 2, *x.shape[2:])))
    vars(module)["training"] = True
    outs.append(forward(module, x))
    if not gradients:
        return outs
    rows = x[_DENSE].clone().requires_grad_()
    inputs = [rows, *(p for p in module._parameters.values() if p is not None)]
    return [*outs, *torch.autograd.grad(forward(module, rows), inputs, dy[_DENSE])]


def _difference(
    theirs: list[Tensor], ours: list[Tensor], twin: nn.Module, target: Target, x: Tensor, dy: Tensor
) -> tuple[float, str] | None:
    """Return by how much theirs and ours differ beyond rounding, and a sentence; None if they don't.

    A sum of N numbers in two orders differs by at most 2(N + 1)u relatively, u = 2^−24; the bound allows twice that
    and a few more roundings. In 16 bits the module may round three times and the replacement rounds once: four u of
    that dtype more.
    """
    label = NAMES[target.cls.__name__]
    width = math.prod(target.fields["normalized_shape"])
    u, fp32 = (torch.finfo(dtype).eps / 2 for dtype in (x.dtype, torch.float32))
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            found = [_short(t.dtype) if a.dtype != b.dtype else tuple(t.shape) for t in (a, b)]
            return math.inf, f"its output is {found[0]}, {label} {found[1]}"
        what = "output" if i < OUTPUTS else "gradient"
        rows = -1, a.numel() if i > OUTPUTS else width
        a, b = (_wide(t).reshape(rows) for t in (a, b))
        error = (a - b).abs().amax(-1)
        relative = torch.where(error == 0, 0.0, error / _scale(i, b, twin, target, x, dy)).nan_to_num(math.inf)
        bound = torch.full_like(relative, 4 * (width + FEW) * fp32)
        if i < OUTPUTS:
            # rows of few numbers
            bound[3:5] = 4 * (min(width, FEW) + FEW) * fp32
            bound += 4 * u * (u > fp32)
        if bool((relative > bound).any()):
            worst = float(relative.max())
            return worst, f"its {what} differs by {worst:.1e} from {label} in {_short(x.dtype)}"
    return None


def _scale(i: int, ours: Tensor, twin: nn.Module, target: Target, x: Tensor, dy: Tensor) -> Tensor:
    """Return per row what the error of the i-th result is relative to: the largest number before terms cancel."""
    largest = ours.abs().amax(-1)
    weight, bias = (twin._parameters.get(name) for name in ("weight", "bias"))
    if i < OUTPUTS:
        return largest if bias is None else largest + _wide(bias).abs().max()
    if i > OUTPUTS:
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
def _alone(device: torch.device) -> Iterator[None]:
    """Run with gradients on and autocast off; the caller's modes and random state stay as they are."""
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


__all__ = ["choose"]

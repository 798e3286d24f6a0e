"""Compare a norm with its replacement: outputs and gradients in fp32, outputs in its own dtype, dtypes of results."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onepass.nn import LayerNorm, RMSNorm

from .exchange import Exchange, Target

SEED = 20
# a 4-D input has the norm's width in its second dimension, which a norm of channels would take, up to this width
SQUARE = 256
# nonzero numbers of a sparse row
FEW = 8
# outputs of `_run` before its gradients, of which the first is that of x
OUTPUTS = 3
# rows of `_input` for gradients; those of the other rows are sums that cancel
_DENSE = (slice(0, 1), slice(0, 2))


def choose(module: nn.Module, found: list[Target]) -> Target | str:
    """Return the first target that computes what the module computes, or why the closest does not."""
    parameters = _parameters(module)
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
        more = [(torch.float32, "hard"), (torch.float32, "own")]
        more += [(dtype, "random")] if dtype != torch.float32 else []
        problem = problem or next(filter(None, (_compare(module, target, device, *how) for how in more)), None)
        return _of_two_dtypes(module, target) if problem is None else problem[1]


def _of_two_dtypes(module: nn.Module, target: Target) -> Target | str:
    """Return the target that returns the module's dtypes where those of x and weight differ, or why there is none."""
    found: list[torch.dtype | None] = []
    wide, narrow = torch.float32, torch.bfloat16
    for of_x, of_weight in ((wide, narrow), (narrow, wide)):
        generator = torch.Generator("cpu").manual_seed(SEED)
        twin = _twin(module, generator, torch.device("cpu"), of_weight)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # torch's, of two dtypes: our question, not the user's
                warnings.simplefilter("ignore")
                found.append(type(twin).forward(twin, _input(generator, target).to(of_x)).dtype)
        except Exception:
            # a module that takes no two dtypes returns none
            found.append(None)
    rules = {(wide, narrow): target}
    if issubclass(target.cls, RMSNorm) and "weight" in module._parameters:
        rules |= {(wide, wide): target.mixed(narrow=False), (narrow, wide): target.mixed(narrow=True)}
    for dtypes, rule in rules.items():
        if all(a in (None, b) for a, b in zip(found, dtypes, strict=True)):
            return rule
    return f"its output is {' and '.join(_short(d) for d in found if d)} where x and weight have two dtypes"


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
            return target, (math.inf, f"its output is {_short(theirs[0].dtype)}, {_whose(target)} bfloat16")
        if all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)):
            return target, None
    return fits[0], None


def _compare(
    module: nn.Module, target: Target, device: torch.device, dtype: torch.dtype, kind: str = "random"
) -> tuple[float, str] | None:
    """Return None if the target computes the same, else how far off it is and a sentence that says so.

    Twins of the module are compared: its class and attributes with parameters of a kind, on its device, or on the CPU
    for the meta device. Random ones come first: those at hand may be zero or not loaded yet.
    """
    if kind == "own" and any(p.is_meta or not p.detach().isfinite().all() for p in _parameters(module)):
        return None
    generator = torch.Generator("cpu").manual_seed(SEED)
    gradients = dtype == torch.float32 and kind == "random"
    twin = _twin(module, generator, device, dtype if dtype == torch.float32 else None, kind)
    x = _input(generator, target)
    hard = _hard_input(generator, target).to(dtype).to(device) if kind == "hard" else None
    dy = x + torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
    # cast first: not every device has float64
    x, dy = (t.to(dtype).to(device) for t in (x, dy))
    before = _attributes(twin)
    try:
        theirs, far = _run(twin, x, dy, gradients), _run_hard(twin, hard)
    except Exception as e:
        return math.inf, f"its forward raises on random input in {_short(dtype)}: {_first_line(e)}"
    written = _attributes(twin).keys() ^ before.keys()
    if written:
        return math.inf, f"its forward changes the attribute {min(written)[0]}"
    try:
        Exchange(twin, target)
        ours, our_far = _run(twin, x, dy, gradients), _run_hard(twin, hard)
    except Exception as e:
        return math.inf, f"{target.label} raises in its place: {_first_line(e)}"
    return _difference(theirs, ours, twin, target, x, dy) or _hard_difference(far, our_far, twin, target)


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _twin(
    module: nn.Module, generator: torch.Generator, device: torch.device, dtype: torch.dtype | None, kind: str = "random"
) -> nn.Module:
    """Return a module of the same class and attributes with other parameters; dtype None keeps each its own.

    They are "random" around 1, "hard" of either sign and up to 100, or the module's "own".
    """
    twin = object.__new__(type(module))
    # containers are copied: a forward that fills one leaves the module as it was
    own = {name: copy.copy(v) if isinstance(v, (dict, list, set)) else v for name, v in vars(module).items()}
    vars(twin).update(own)

    def random(name: str, p: Tensor) -> nn.Parameter:
        t = torch.rand(p.shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5
        t = t if name == "weight" else t - 1
        if kind != "random":
            t = p.detach().clone() if kind == "own" else 200 * (t - t.mean())
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


def _hard_input(generator: torch.Generator, target: Target) -> Tensor:
    """Return rows that a norm of every input treats like others, as (1, m, n, *shape).

    Large numbers, one large number among small ones, and in every sixth row a NaN or an infinity.
    """
    shape = target.fields["normalized_shape"]
    width = math.prod(shape)
    rows = width if len(shape) == 1 and 1 < width <= SQUARE else 3
    x = torch.randn(rows, 6, width, generator=generator, dtype=torch.float64, device="cpu")
    x[:, 1] *= 1e12
    x[:, 2, 0] = 1e4
    x[:, 3, 0], x[:, 4, 0], x[:, 5, 0] = math.nan, math.inf, -math.inf
    return x.view(1, rows, 6, *shape)


def _run_hard(module: nn.Module, hard: Tensor | None) -> list[Tensor]:
    with torch.no_grad():
        return [] if hard is None else [type(module).forward(module, hard)]


def _hard_difference(
    theirs: list[Tensor], ours: list[Tensor], twin: nn.Module, target: Target
) -> tuple[float, str] | None:
    """Return 0 and a sentence if results of `_hard_input` differ; 0, because all others agree.

    Of a row with a NaN or infinity, both must be NaN in parts. Other rows differ by the rounding of sums, relative to
    the row's largest number before the bias is added.
    """
    bias = twin._parameters.get("bias")
    width = math.prod(target.fields["normalized_shape"])
    for a, b in zip(theirs, ours, strict=True):
        if a.shape != b.shape:
            return 0.0, f"its output is {tuple(a.shape)}, {_whose(target)} {tuple(b.shape)}"
        a, b = (_wide(t).view(-1, 6, width) for t in (a, b))
        if bool((a.isnan().any(-1) != b.isnan().any(-1)).any()):
            return 0.0, f"its output differs from {_whose(target)} where x is NaN or infinite"
        finite = slice(0, 3)
        scale = b[:, finite].abs().amax(-1) + (0.0 if bias is None else _wide(bias).abs().max())
        fp32 = torch.finfo(torch.float32)
        worst = float(((a - b)[:, finite].abs().amax(-1) / scale.clamp_min(fp32.tiny)).max())
        if worst > 2 * (width + FEW) * fp32.eps:
            return 0.0, f"its output differs by {worst:.1e} from {_whose(target)} far from 1"
    return None


def _whose(target: Target) -> str:
    return "an RMS norm's" if issubclass(target.cls, RMSNorm) else "a layer norm's"


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
    inputs = [rows, *_parameters(module)]
    return [*outs, *torch.autograd.grad(forward(module, rows), inputs, dy[_DENSE])]


def _difference(
    theirs: list[Tensor], ours: list[Tensor], twin: nn.Module, target: Target, x: Tensor, dy: Tensor
) -> tuple[float, str] | None:
    """Return by how much theirs and ours differ beyond rounding, and a sentence; None if they don't.

    A sum of N numbers in two orders differs by at most 2(N + 1)u relatively, u = 2^−24; the bound allows twice that
    and a few more roundings. In 16 bits the module may round three times and the replacement rounds once: four u of
    that dtype more.
    """
    label = _whose(target)
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

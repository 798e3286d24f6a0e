"""Self-test: every operator against its float64 definition, on the devices and in the dtypes of this machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from onepass.core.about import one_line
from onepass.core.spec import GRADIENT, TOLERANCES, Sample, Spec

SEED = 20
# time budget; the first fp32 sample of every operator runs even after it
SECONDS = 12.0


@dataclass
class Verdict:
    """The result of the self-test of one operator on one device and dtype."""

    operator: str
    device: torch.device
    dtype: torch.dtype
    ran: int = 0
    samples: int = 0
    worst: float = 0.0  # largest error over the tolerance: ≤ 1 is right
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Check:
    """One sample; `run()` returns its largest error over the tolerance, or raises."""

    verdict: Verdict
    sample: str
    run: Callable[[], float]


def maker(device: torch.device | str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return `make(*shape)` for `Spec.samples`: standard normal, fixed seed, equal on all devices up to rounding."""
    generator = torch.Generator().manual_seed(SEED)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def floats(sample: Sample) -> dict[int | str, Tensor]:
    """Return the floating-point tensors among the arguments, by position or keyword."""
    items: list[tuple[int | str, Any]] = [*enumerate(sample.args), *sample.kwargs.items()]
    return {k: v for k, v in items if isinstance(v, Tensor) and v.is_floating_point()}


def replace(sample: Sample, new: dict[int | str, Tensor]) -> Sample:
    """Return the sample with some tensors exchanged."""
    args = tuple(new.get(i, a) for i, a in enumerate(sample.args))
    return Sample(sample.name, args, {k: new.get(k, v) for k, v in sample.kwargs.items()})


def float64(sample: Sample) -> Sample:
    """Return the same numbers in float64 on the CPU, on which the definition is evaluated."""

    def up(t: Tensor) -> Tensor:
        return t.detach().cpu().double() if t.is_floating_point() else t.cpu()

    return tree_map_only(Tensor, up, sample)  # type: ignore[no-any-return]


def both_passes(
    fn: Callable[..., Any], sample: Sample, dtype: torch.dtype
) -> tuple[list[Tensor], dict[int | str, Tensor | None]]:
    """Return the floating-point results, and the gradient of Σ result·(random) for every floating-point argument."""
    leaves = {k: t.detach().requires_grad_() for k, t in floats(sample).items()}
    called = replace(sample, leaves)
    out = fn(*called.args, **called.kwargs)
    outs = [t for t in ([out] if isinstance(out, Tensor) else out) if t.is_floating_point()]
    generator = torch.Generator().manual_seed(SEED + 1)
    upstream = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(dtype) for o in outs]
    pairs = [(o, g.to(o.device, o.dtype)) for o, g in zip(outs, upstream, strict=True) if o.requires_grad]
    if not pairs:
        return outs, dict.fromkeys(leaves)
    results, weights = zip(*pairs, strict=True)
    grads = torch.autograd.grad(results, list(leaves.values()), weights, allow_unused=True)
    return outs, dict(zip(leaves, grads, strict=True))


def _ratio(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> float:
    """Return the largest |actual − expected| over its tolerance; infinite if just one of them is NaN."""
    if actual.shape != expected.shape:
        raise ValueError(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not actual.numel():
        return 0.0
    a, b = actual.detach().cpu().double(), expected.detach()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs() / (atol + rtol * b.abs()))
    return float(gap.nan_to_num(nan=torch.inf).max())


def check_sample(spec: Spec, sample: Sample, dtype: torch.dtype) -> float:
    """Return the largest error of values and gradients over its tolerance; raise if shapes or gradients don't match."""
    tolerance = TOLERANCES[dtype]
    outs, grads = both_passes(spec.op, sample, dtype)
    expected, expected_grads = both_passes(spec.reference, float64(sample), dtype)
    if len(outs) != len(expected):
        raise ValueError(f"{len(outs)} results, expected {len(expected)}")
    worst = max((_ratio(o, w, tolerance, tolerance) for o, w in zip(outs, expected, strict=True)), default=0.0)
    for key, expected_grad in expected_grads.items():
        grad = grads[key]
        if expected_grad is None or grad is None:
            if any(g is not None and bool(g.any()) for g in (expected_grad, grad)):
                raise ValueError(f"gradient of argument {key} is {'missing' if grad is None else 'not zero'}")
            continue
        # a gradient that sums over rows has errors relative to its largest entry
        scale = max(1.0, float(expected_grad.abs().max())) if expected_grad.numel() else 1.0
        worst = max(worst, _ratio(grad, expected_grad, GRADIENT * tolerance, GRADIENT * tolerance * scale))
    return worst


def spec_checks(spec: Spec, device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    """Yield one check per sample of an operator."""
    verdict = Verdict(spec.name, device, dtype)
    try:
        samples = list(spec.samples(maker(device, dtype)))
    except Exception as error:
        yield Check(verdict, "samples", functools.partial(_raise, error))
        return
    verdict.samples = len(samples)
    for sample in samples:
        yield Check(verdict, sample.name, functools.partial(check_sample, spec, sample, dtype))


def _raise(error: Exception) -> float:
    raise error


def lion_checks(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    """Yield one check: three steps of the Lion optimizer against its formula in float64."""
    yield Check(Verdict("Lion", device, dtype, samples=1), "three steps", functools.partial(check_lion, device, dtype))


def check_lion(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest error of parameters and momenta over its tolerance."""
    from onepass.optim import Lion

    lr, (beta1, beta2), decay = 0.0625, (0.9, 0.99), 0.5
    make = maker(device, dtype)
    start = [make(33), make(5, 70), make(4097)]
    # no gradient near zero, so that rounding a momentum can't flip a sign
    steps = [[(g := make(*p.shape)).sign() + g / 4 for p in start] for _ in range(3)]
    ours = [p.clone().requires_grad_() for p in start]
    optimizer = Lion(ours, lr=lr, betas=(beta1, beta2), weight_decay=decay)
    expected = [p.cpu().double() for p in start]
    momenta = [torch.zeros_like(p) for p in expected]
    for grads in steps:
        for i, grad in enumerate(grads):
            ours[i].grad = grad.clone()
            g = grad.cpu().double()
            direction = (beta1 * momenta[i] + (1 - beta1) * g).sign()
            expected[i] = expected[i] - lr * (direction + decay * expected[i])
            momenta[i] = beta2 * momenta[i] + (1 - beta2) * g
        optimizer.step()
    tolerance = TOLERANCES[dtype]
    worst = max(_ratio(p, w, tolerance, tolerance) for p, w in zip(ours, expected, strict=True))
    for p, m in zip(ours, momenta, strict=True):
        state = optimizer.state[p]["exp_avg"]
        worst = max(worst, _ratio(state, m, tolerance, tolerance * float(m.abs().max())))
    return worst


def perform(checks: Sequence[Iterator[Check]], seconds: float, started: Callable[[Verdict], None]) -> list[Verdict]:
    """Run checks in turns, one per operator, until all are done or the time is up; return the verdicts."""
    verdicts: dict[int, Verdict] = {}
    deadline = time.monotonic() + seconds
    for turn, row in enumerate(zip_longest(*checks)):
        for check in filter(None, row):
            verdict = check.verdict
            verdicts[id(verdict)] = verdict
            if time.monotonic() > deadline and (turn or verdict.dtype != torch.float32):
                continue
            started(verdict)
            verdict.ran += 1
            try:
                ratio = check.run()
            except Exception as error:
                verdict.problems.append(f"{check.sample}: {one_line(error)}")
                continue
            verdict.worst = max(verdict.worst, ratio)
            if ratio > 1:
                verdict.problems.append(f"{check.sample}: error is {ratio:.3g} times the tolerance")
    return list(verdicts.values())

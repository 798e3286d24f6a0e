"""How the contract tests turn an operator's spec into calls: dtypes, devices, upcasting, gradients."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from onepass.core.launch import INTERPRET
from onepass.core.spec import GRADIENT, TOLERANCES, Sample, Spec
from onepass.doctor.selftest import SEED, floats, maker, replace
from onepass.doctor.selftest import float64 as float64
from onepass.ops._shared.specs import folders, load

SPECS = [spec for folder in folders() for spec in load(folder).SPECS]
Choice = TypeVar("Choice")

# the interpreter does not emulate bfloat16 faithfully; float64 never reaches a kernel
CPU_DTYPES = (
    [torch.float32, torch.float16] if INTERPRET else [torch.float32, torch.float16, torch.bfloat16, torch.float64]
)
GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]

DEVICES_AND_DTYPES = [pytest.param("cpu", d, id=f"cpu-{str(d)[6:]}") for d in CPU_DTYPES] + [
    pytest.param("cuda", d, id=f"cuda-{str(d)[6:]}", marks=pytest.mark.gpu) for d in GPU_DTYPES
]


@functools.cache
def sample_names(spec_index: int) -> list[str]:
    """Names of a spec's samples, for the test ids."""
    return [s.name for s in SPECS[spec_index].samples(maker("cpu", torch.float32))]


def spec_samples() -> list[Any]:
    """(spec, sample name) for every operator: the parameters of most contract tests."""
    return [
        pytest.param(spec, name, id=f"{spec.name}-{name}") for i, spec in enumerate(SPECS) for name in sample_names(i)
    ]


def largest_small(spec: Spec) -> list[str]:
    """The four samples of most arguments, among those with rows and columns whose first argument is small."""
    given = [s for s in spec.samples(maker("cpu", torch.float64)) if s.args[0].dim() > 1]
    given = [s for s in given if min(s.args[0].shape) > 1 and s.args[0].numel() <= 1300]
    return [s.name for s in sorted(given, key=lambda s: -len(s.args) - len(s.kwargs))[:4]]


def samples_in_turn(turn: int) -> list[Any]:
    """All; under the interpreter the fullest and every third, as values and gradients of all are tested there."""
    if not INTERPRET:
        return spec_samples()
    chosen = {
        (spec.name, n) for i, spec in enumerate(SPECS) for n in (largest_small(spec)[0], *sample_names(i)[turn::3])
    }
    return [p for p in spec_samples() if (p.values[0].name, p.values[1]) in chosen]


def specs() -> list[Any]:
    """One parameter per operator."""
    return [pytest.param(spec, id=spec.name) for spec in SPECS]


def in_turn(choices: Sequence[Choice], spec: Spec, name: str) -> Choice:
    """One of them: an operator's samples take them in turn, three samples each, as contracts share these."""
    return choices[sample_names(SPECS.index(spec)).index(name) // 3 % len(choices)]


def build(spec: Spec, name: str, device: str, dtype: torch.dtype) -> Sample:
    """The named sample with tensors of this dtype on this device."""
    return next(s for s in spec.samples(maker(device, dtype)) if s.name == name)


def leaves(sample: Sample) -> dict[int | str, Tensor]:
    """Fresh leaf tensors (same strides) that want gradients, one per floating-point argument."""
    return {k: t.detach().requires_grad_() for k, t in floats(sample).items()}


def outputs(out: Any) -> list[Tensor]:
    """Floating-point results, always as a list."""
    found = [out] if isinstance(out, Tensor) else list(out)
    return [t for t in found if t.is_floating_point()]


def call(fn: Callable[..., Any], sample: Sample) -> list[Tensor]:
    """fn(*args, **kwargs) as a list of floating-point tensors."""
    return outputs(fn(*sample.args, **sample.kwargs))


def upstream(outs: list[Tensor]) -> list[Tensor]:
    """Random upstream gradients, the same for every path; float64 on CPU, cast where used."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outs]


def gradients(
    fn: Callable[..., Any], sample: Sample, wanted: list[int | str] | None = None, gy: list[Tensor] | None = None
) -> dict[int | str, Tensor | None]:
    """Gradients of Σ out·gy by every (wanted) floating-point argument; None where unused. gy: by default `upstream`."""
    inputs = leaves(sample)
    for key, leaf in inputs.items():
        leaf.requires_grad_(wanted is None or key in wanted)
    outs = call(fn, replace(sample, inputs))
    pairs = [(o, g.to(o.device, o.dtype)) for o, g in zip(outs, gy or upstream(outs), strict=True) if o.requires_grad]
    keys = [k for k, t in inputs.items() if t.requires_grad]
    if not pairs:
        return dict.fromkeys(keys)
    grads = torch.autograd.grad(
        [o for o, _ in pairs], [inputs[k] for k in keys], [g for _, g in pairs], allow_unused=True
    )
    return dict(zip(keys, grads, strict=True))


class Module(nn.Module):
    """A function as a module, as `torch.export` asks for one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Within it a wait for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Calls(TorchDispatchMode):
    """Notes the registered operators that are called, by default ours, and their arguments."""

    def __init__(self, namespace: str = "onepass") -> None:
        super().__init__()
        self.namespace, self.found = namespace, list[tuple[Any, tuple[Any, ...]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.namespace in func.namespace:
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))


def close(actual: Tensor, expected: Tensor, rtol: float, atol: float, what: str) -> None:
    """Compare with a float64 expectation on the CPU."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    torch.testing.assert_close(
        actual.detach().cpu().double(), expected.detach().double(), rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}"
    )


def tolerance(n_terms: int, dtype: torch.dtype) -> float:
    """How far two sums of the same terms in different orders may lie apart, over the root of the sum of their squares.

    CPUs add in different orders: the number of lanes, threads and BLAS' blocks decide. Adding the i-th of n terms of
    about one size a rounds a partial sum of about a√i, by up to u = eps/2 of it. As errors of either sign these add up
    to u·a·√(1 + 2 + … + n) ≈ u·a·n/√2, which is u·√(n/2) of the a√n that the whole sum is like; √2 times as much for
    the difference of two sums, and four standard deviations: 4u√n.
    """
    return 2 * torch.finfo(dtype).eps * math.sqrt(max(n_terms, 1))


def terms(sample: Sample) -> int:
    """How many terms the longest sum of a call or of its backward pass can have: the elements of its largest tensor."""
    return max((t.numel() for t in floats(sample).values()), default=1)


def same_sums(actual: Tensor, expected: Tensor, n_terms: int, floor: tuple[float, float] = (1.3e-6, 1e-5)) -> None:
    """Compare two computations of the same sums; the largest entry stands for the size that sums are like.

    `floor` (torch's own rtol and atol for fp32) is for what else differs: a vectorised exp and the one for the tail.
    """
    scale = float(expected.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if expected.numel() else 1.0
    limit = tolerance(n_terms, expected.dtype)
    torch.testing.assert_close(actual, expected, rtol=max(limit, floor[0]), atol=max(limit * scale, floor[1]))


def compare_gradients(
    actual: dict[int | str, Tensor | None], expected: dict[int | str, Tensor | None], dtype: torch.dtype,
    dtypes: dict[int | str, torch.dtype] | None = None,
) -> None:  # fmt: skip
    """Each gradient against float64, scaled by the largest entry: sums over rows round relative to their terms."""
    limit = GRADIENT * TOLERANCES[dtype]
    for key, grad in actual.items():
        want = expected[key]
        if want is None or want.numel() == 0:
            assert grad is None or not grad.any(), f"gradient of {key}: expected none"
            continue
        assert grad is not None, f"gradient of {key} is missing"
        if dtypes is not None:
            assert grad.dtype == dtypes[key], f"gradient of {key} has dtype {grad.dtype}, expected {dtypes[key]}"
        scale = max(1.0, float(want.abs().max()))
        close(grad, want, limit, limit * scale, f"gradient of {key}")

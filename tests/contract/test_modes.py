"""Promise 4 and 5: determinism, defaults, FakeTensor, checkpointing, autocast, torch.func, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from harness import build, call, gradients, in_turn, leaves, replace, same_sums, samples_in_turn, spec_samples, terms
from onepass.core.launch import INTERPRET
from onepass.core.spec import Sample, Spec


@pytest.mark.parametrize(("spec", "name"), samples_in_turn(0))
def test_every_output_is_written(spec: Spec, name: str, device: str) -> None:
    """`torch.empty` hands out NaN: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    sample = build(spec, name, device, torch.float32)
    expected_nan = [bool(t.isnan().any()) for t in call(spec.reference, sample)]
    assert [bool(t.isnan().any()) for t in call(spec.op, sample)] == expected_nan
    for key, grad in gradients(spec.op, sample).items():
        assert grad is None or not grad.isnan().any(), f"gradient of {key}"


@pytest.mark.skipif(INTERPRET, reason="programs run one after another: nothing can differ")
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_bit_for_bit_repeatable(spec: Spec, name: str, device: str) -> None:
    sample = build(spec, name, device, torch.float32)
    first = [*call(spec.op, sample), *gradients(spec.op, sample).values()]
    for _ in range(2 if device == "cpu" else 5):
        again = [*call(spec.op, sample), *gradients(spec.op, sample).values()]
        for a, b in zip(first, again, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(INTERPRET, reason="no kernel runs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_fake_tensors(spec: Spec, name: str, dtype: torch.dtype) -> None:
    """Shapes, dtypes and strides are known without computing, whatever torch's default dtype is."""
    sample = build(spec, name, "cpu", dtype)
    real = call(spec.op, sample)
    torch.set_default_dtype(torch.float64)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_sample = replace(sample, {k: mode.from_tensor(t.detach()) for k, t in leaves(sample).items()})
        fake = call(spec.op, fake_sample)
    for f, r in zip(fake, real, strict=True):
        assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride())


@pytest.mark.skipif(INTERPRET, reason="autograd's business: the kernels are the same")
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_activation_checkpointing(spec: Spec, name: str, device: str) -> None:
    sample = build(spec, name, device, torch.float32)

    def recomputed(*args, **kwargs):
        return checkpoint(lambda *a: spec.op(*a, **kwargs), *args, use_reentrant=False)

    plain, again = gradients(spec.op, sample), gradients(recomputed, sample)
    for key, grad in plain.items():
        if grad is not None:
            torch.testing.assert_close(again[key], grad, rtol=0, atol=0)


@pytest.mark.skipif(INTERPRET, reason="bfloat16")
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_under_autocast(spec: Spec, name: str, device: str) -> None:
    """Autocast changes neighbours, not us: the dtypes handed in decide."""
    sample = build(spec, name, device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = call(spec.op, sample)
    for a, b in zip(inside, call(spec.op, sample), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_cuda_graph(spec: Spec, name: str) -> None:
    """Captured once, replayed on new numbers: no host synchronisation, no hidden allocation."""
    sample = build(spec, name, "cuda", torch.float32)
    if not isinstance(sample.args[0], torch.Tensor) or not sample.args[0].numel():
        pytest.skip("nothing to launch")
    static = sample.args[0].clone()
    captured = replace(sample, {0: static})
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(spec.op, captured)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = call(spec.op, captured)
    new = sample.args[0] * 0.7 + 0.1
    static.copy_(new)
    graph.replay()
    for a, e in zip(outs, call(spec.op, replace(sample, {0: new})), strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


def _everything(spec: Spec, sample: Sample) -> list[Tensor | None]:
    return [*call(spec.op, sample), *gradients(spec.op, sample).values()]


def _same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        if a is None or e is None:
            assert a is e
            continue
        assert (a.dtype, a.device) == (e.dtype, e.device)
        assert torch.equal(a.nan_to_num(7.0), e.nan_to_num(7.0))


# interpreted bf16 is not a GPU's
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRET else [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spec", "name"), samples_in_turn(1))
def test_defaults(spec: Spec, name: str, device: str, dtype: torch.dtype) -> None:
    sample = build(spec, name, device, dtype)
    expected = _everything(spec, sample)
    defaults = (torch.bfloat16, torch.float64)
    for default in [in_turn(defaults, spec, name)] if INTERPRET else defaults:
        torch.set_default_dtype(default)
        _same(_everything(spec, sample), expected)
        if not INTERPRET:  # which makes its own tensors
            with torch.device("meta"):
                outs = call(spec.op, replace(sample, leaves(sample)))
            _same([o.detach() for o in outs], expected[: len(outs)])


@pytest.mark.skipif(INTERPRET, reason="torch.func reaches the registered op, which is tested eagerly")
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_vmap(spec: Spec, name: str) -> None:
    """Three copies of the first argument, mapped over, against a loop."""
    sample = build(spec, name, "cpu", torch.float32)
    x = sample.args[0]
    batch = torch.stack([x, x * 0.5, x + 1.0])
    mapped = torch.vmap(lambda t: tuple(call(spec.op, replace(sample, {0: t}))))(batch)
    for i, t in enumerate(batch):
        for m, e in zip(mapped, call(spec.op, replace(sample, {0: t})), strict=True):
            same_sums(m[i], e, terms(sample))

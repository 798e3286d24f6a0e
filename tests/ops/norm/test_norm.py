"""Options of the norms, their rows in torch, what backward keeps, and what public implementations have got wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass import layer_norm, rms_norm
from onepass.core.launch import INTERPRET, backend
from onepass.ops.norm import definition
from onepass.ops.norm.definition import layer_norm as reference
from onepass.ops.norm.definition import table

if INTERPRET:
    import triton
    import triton.language as tl

    from onepass.ops.norm.kernels import e4m3_codes

    @triton.jit
    def codes_kernel(x_ptr, out_ptr, N: tl.constexpr):
        at = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(out_ptr + at, e4m3_codes(tl.load(x_ptr + at), tl.uint8))


# the interpreter does not emulate bfloat16 faithfully
HALF = torch.float16 if INTERPRET else torch.bfloat16


def numbers(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def test_which_rows_share_a_weight() -> None:
    x = torch.Size((2, 3, 5, 7))
    shapes = {
        (7,): (1, 1), (1, 7): (1, 1), (5, 7): (1, 5), (3, 1, 7): (5, 3), (3, 5, 7): (1, 15), (2, 1, 1, 7): (15, 2),
        (2, 3, 5, 7): (1, 30), (2, 3, 1, 7): (5, 6), (2, 1, 5, 7): None, (4, 7): None, (5, 1): None, (): None,
        (1, 2, 3, 5, 7): None,
    }  # fmt: skip
    for shape, expected in shapes.items():
        assert table(x, torch.empty(shape)) == expected, shape


@pytest.mark.parametrize("cols", [33, 300, 8208, 20000])
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1, 2)], ids=str)
def test_a_wider_stream(cols: int, wanted: tuple[int, ...], device: str) -> None:
    """y in the dtype that is asked for at every width; x and the stream have gradients in their own, from fp32."""
    x, stream, w = (numbers(*s, device=device, seed=i) for i, s in enumerate(((3, cols), (3, cols), (cols,))))
    tensors = [x.to(HALF), stream, w]
    out_dtype = torch.float32 if cols == 20000 else HALF
    dy, ds = numbers(3, cols, dtype=out_dtype, device=device, seed=4), numbers(3, cols, device=device, seed=5)
    found, expected = [], []
    for op, up, out in ((onepass.rms_norm, lambda t: t, found), (definition.rms_norm, torch.Tensor.double, expected)):
        leaves = [up(t).clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        y, s = op(leaves[0], leaves[2], residual=leaves[1], out_dtype=up(dy).dtype)
        out += [y, *torch.autograd.grad((y, s), [leaves[i] for i in wanted], (up(dy), up(ds)))]
    for dtype, a, e in zip((out_dtype, *(tensors[i].dtype for i in wanted)), found, expected, strict=True):
        assert a.dtype == dtype
        most = 1e-2 if a.dtype == HALF else 2e-4
        torch.testing.assert_close(a.double(), e, rtol=most, atol=most)


OPTIONS: dict[str, dict[str, Any]] = {
    "weights per head": {}, "gate": {"gate": 3}, "rounded twice": {"rounding": "twice"},
    "gate first, by sigmoid": {"gate": 3, "gate_first": True, "gate_act": "sigmoid"},
    "rows in 8 bits": {"quantize": "row"}, "blocks in 8 bits": {"quantize": "block"},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_is_lost_in_wide_rows(name: str, device: str) -> None:
    """Beyond the widths of their kernels: the same numbers and gradients as the definition."""
    cols = 16512
    x = numbers(2, cols, device=device)
    w = numbers(*((2, cols) if name == "weights per head" else (cols,)), device=device, seed=1)
    options = {k: numbers(2, cols, device=device, seed=v) if k == "gate" else v for k, v in OPTIONS[name].items()}
    tensors = [t.requires_grad_() for t in (x, w, *(v for v in options.values() if isinstance(v, Tensor)))]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    theirs = {k: wide[2] if k == "gate" else v for k, v in options.items()}
    y, want = onepass.rms_norm(x, w, **options), definition.rms_norm(wide[0], wide[1], **theirs)
    if name.endswith("bits"):
        torch.testing.assert_close(y.scales.double(), want[1].double(), rtol=1e-5, atol=0)
        # a number beside the middle of two codes may have either
        torch.testing.assert_close(y.values.double(), want[0].double(), rtol=0.13, atol=2**-9)
        assert (y.values.view(torch.uint8) != want[0].view(torch.uint8)).sum() <= 20
        return
    torch.testing.assert_close(y.double(), want.double(), rtol=2e-5, atol=2e-5)
    found = torch.autograd.grad(y.square().sum(), tensors)
    expected = torch.autograd.grad(want.double().square().sum(), wide)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("by", ["row", "block"])
@pytest.mark.parametrize("cols", [128, 384, 1024])
def test_8_bits_are_those_of_quantizing_afterwards(by: Any, cols: int, device: str) -> None:
    columns = cols if by == "row" else 128
    for dtype in (torch.float32, HALF):
        x, w = numbers(5, cols, dtype=dtype, device=device), numbers(cols, dtype=dtype, device=device, seed=1)
        # a row of zeros, one of zeros but for a block, one whose largest number is negative
        x[1] = 0
        x[2, : cols - 64] = 0
        x[3] = -x[3].abs()
        for residual in (None, x.float()):
            found, y = (onepass.rms_norm(x, w, residual=residual, quantize=q) for q in (by, None))
            if residual is not None:
                (found, s), (y, _) = found, y
                assert torch.equal(s, x.float() * 2)
            values, scales = definition.to_e4m3(y, columns)
            assert found.values.dtype == torch.float8_e4m3fn
            assert not found.values.requires_grad
            if device == "cpu":
                assert torch.equal(found.values.view(torch.uint8), values.view(torch.uint8))
                assert torch.equal(found.scales, scales)
            # the compiler contracts squares into their sum in one way here, in another there: the statistics may differ
            # in their last bit, and y by that and its own rounding
            torch.testing.assert_close(found.scales, scales, rtol=4 * torch.finfo(dtype).eps, atol=0)
            rebuilt = found.values.float().unflatten(-1, (-1, columns)) * found.scales[..., None]
            step = y.float().abs() / 16 + scales.amax() * 2**-10 + 4 * torch.finfo(dtype).eps * y.float().abs().max()
            assert bool(((rebuilt.flatten(-2) - y.float()).abs() <= step).all())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_scales_are_fp32_whatever_the_default_dtype(device: str, default: torch.dtype) -> None:
    """Kernels write four bytes for each scale; compiled programs read what the shapes on meta say."""
    x = numbers(3, 256, device=device)
    want = onepass.rms_norm(x, quantize="block")
    torch.set_default_dtype(default)
    found, none, meta = (onepass.rms_norm(t, quantize="block") for t in (x, x[:0], x.to("meta")))
    assert {t.scales.dtype for t in (found, none, meta)} == {torch.float32}
    assert torch.equal(found.scales, want.scales)


@pytest.mark.skipif(not INTERPRET, reason="the kernel's own rounding, for GPUs without e4m3")
def test_codes_of_all_halves() -> None:
    """Every finite number of fp16, scaled into and beyond e4m3's range: the bits of torch's conversion."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for scale in (1.0, 2.0**-7, 0.7):
        x = (bits.view(torch.float16).float() * scale).nan_to_num(0.0, 448.0, -448.0)
        out = torch.empty(1 << 16, dtype=torch.uint8)
        codes_kernel[(16,)](x, out, 4096)
        assert torch.equal(out, x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8))


def test_the_sum_beside_8_bits_has_a_gradient(device: str) -> None:
    x, r = (numbers(4, 128, device=device, seed=i).requires_grad_() for i in range(2))
    for call in (onepass.rms_norm, torch.compile(onepass.rms_norm, backend="aot_eager")):
        (values, scales), s = call(x, residual=r, quantize="row")
        assert not values.requires_grad
        assert not scales.requires_grad
        for g in torch.autograd.grad(s.sum(), (x, r)):
            assert torch.equal(g, torch.ones_like(x))


@pytest.mark.parametrize("at", ["cpu", "meta"])
def test_shapes_of_8_bits(at: str) -> None:
    """Modes of torch: tests/ops/test_torchs_calls.py."""
    by: Any
    for by, shape, scales in (
        ("row", (3, 4, 128), (3, 4, 1)), ("row", (0, 128), (0, 1)), ("row", (1, 128), (1, 1)), ("row", (2, 1), (2, 1)),
        ("row", (2, 0), (2, 1)), ("block", (2, 384), (2, 3)),
    ):  # fmt: skip
        out = onepass.rms_norm(torch.zeros(shape, device=at), quantize=by)
        assert (out.values.shape, out.scales.shape) == (shape, scales)


@pytest.mark.parametrize("options", [{}, {"groups": 4}, {"weight": (5, 40)}], ids=str)
def test_both_terms_of_the_sum_get_one_gradient(options: dict[str, Any]) -> None:
    x, r = (torch.randn(5, 40, requires_grad=True) for _ in range(2))
    seen = []
    for t in (x, r):
        t.register_hook(lambda g: seen.append(g.data_ptr()))
    sum(map(torch.sum, rms_norm(x, residual=r, **options))).backward()
    assert options or len(set(seen)) == 1
    assert torch.equal(x.grad, r.grad)
    x.grad.zero_()
    assert r.grad.any(), "the .grad of two leaves must not share memory"


def _kept_bytes(run, *parameters: Tensor) -> int:
    """Bytes that are kept for backward; the parameters are there anyway."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = run()
    del out
    unique = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in saved}
    return sum(size for address, size in unique.items() if address not in {p.data_ptr() for p in parameters})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_backward_keeps(device: str, dtype: torch.dtype) -> None:
    rows, cols = 40, 64
    x, r = (torch.randn(rows, cols, device=device).to(dtype).requires_grad_() for _ in range(2))
    w, b = (torch.ones(cols, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    row = x.numel() * x.element_size()
    assert _kept_bytes(lambda: layer_norm(x, w, b), w, b) == row + 8 * rows
    assert _kept_bytes(lambda: layer_norm(x, w, b, stable=True), w, b) == row + 12 * rows
    assert _kept_bytes(lambda: layer_norm(x, w, b, residual=r), w, b) == row + 8 * rows
    assert _kept_bytes(lambda: rms_norm(x, w), w) == row + 4 * rows
    assert _kept_bytes(lambda: rms_norm(x)) == row + 4 * rows


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(8192, 1024), (4096, 8192), (512, 65536)])
def test_peak_memory_of_backward(rows: int, cols: int) -> None:
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w, b = (torch.ones(cols, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    dy = torch.randn_like(x)
    for _ in range(2):
        y = layer_norm(x, w, b)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(y, (x, w, b), dy)
        peak = torch.cuda.max_memory_allocated() - before
        del grads
    # several programs per multiprocessor for narrow rows: faster, at one more partial row each
    per_sm = 4 if cols <= 1024 else 2 if cols <= 3072 else 1
    programs = torch.cuda.get_device_properties(0).multi_processor_count * per_sm
    assert peak <= x.numel() * 2 + programs * cols * 8 + 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_default_eps_is_torchs(dtype: torch.dtype) -> None:
    """Which small x shows; other calls as torch's are in tests/ops/test_torchs_calls.py and tests/peers."""
    x, w = (1e-3 * torch.randn(5, 16)).to(dtype), torch.randn(16).to(dtype)
    equal = partial(torch.testing.assert_close, rtol=1e-6 if dtype != torch.bfloat16 else 1e-2, atol=1e-6)
    equal(rms_norm(x, [16]), F.rms_norm(x, [16]))
    equal(rms_norm(x, w), F.rms_norm(x, (16,), w))


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_rows_of_any_magnitude(device: str, scale: float) -> None:
    """Squares of such rows leave fp32; the result does not depend on the scale at all."""
    x = torch.randn(4, 100)
    x = torch.cat([x, -x.abs()])
    expected = layer_norm(x, stable=True, eps=1e-3)
    torch.testing.assert_close(
        layer_norm((x * scale).to(device), stable=True, eps=1e-3).cpu(), expected, rtol=1e-4, atol=1e-4
    )
    big = (x * scale).to(device).requires_grad_()
    (dx,) = torch.autograd.grad(layer_norm(big, stable=True, eps=1e-3), big, torch.ones_like(big).cumsum(-1))
    small = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer_norm(small, stable=True, eps=1e-3), small, torch.ones_like(x).cumsum(-1))
    torch.testing.assert_close(dx.cpu() * scale, expected, rtol=1e-3, atol=1e-3)


def test_a_maximum_of_almost_nothing(device: str) -> None:
    """Divided by its tiny positive maximum such a row would overflow."""
    x = -torch.rand(3, 50) * 100 - 1
    x[:, 7] = 1e-30
    y = layer_norm(x.to(device), stable=True)
    torch.testing.assert_close(y.cpu().double(), reference(x.double(), stable=True), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_without_kernels_on_a_gpu(norm, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ONEPASS_BACKEND=torch`."""
    x = torch.randn(600, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    expected = torch.autograd.grad(norm(x, w), (x, w), dy)
    monkeypatch.setattr(backend, "BACKEND", "torch")
    torch.testing.assert_close(torch.autograd.grad(norm(x, w), (x, w), dy), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_float64_in_a_cuda_graph(norm) -> None:
    """The torch path must not wait for the GPU: neither for the rows far from zero."""
    x = torch.randn(6, 64, device="cuda", dtype=torch.float64, requires_grad=True)
    w = torch.randn(64, device="cuda", dtype=torch.float64)
    expected = torch.autograd.grad(norm(x, w).square().sum(), x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(norm(x, w).square().sum(), x)
    graph.replay()
    torch.testing.assert_close(captured, expected)


@pytest.mark.skipif(INTERPRET, reason="nothing is compiled")
def test_no_compilation_per_number_of_rows(device: str) -> None:
    """A batch of another size is no other program; test_launch has Triton's."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x, w: rms_norm(x, w) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    w = torch.ones(10, device=device)
    for rows in (4, 7, 16, 32):
        compiled(torch.randn(rows, 10, device=device), w)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.skipif(INTERPRET, reason="bfloat16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cols", [1, 3, 51, 100, 768, 3000])
def test_rows_of_one_value_are_the_bias(device: str, dtype: torch.dtype, cols: int) -> None:
    """8 bits times 3000 are exact in fp32, so the mean is the value; a mean off by an ulp leaves 0.5 of it."""
    values = torch.cat([torch.arange(128.0, 256.0) * 2.0**e * sign for e in (-8, 0, 8) for sign in (1, -1)])
    x = values.clamp(-65504, 65504).to(device, dtype)[:, None].expand(-1, cols)
    b = torch.randn(cols).to(device, dtype)
    assert torch.equal(layer_norm(x, None, b), b.expand(x.shape))
    assert not layer_norm(x).any()

"""Options of the norms: other dtypes, weights per row, gates, 8 bits, and rows that are too wide for their kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.launch import INTERPRET
from onepass.ops.norm import definition
from onepass.ops.norm.definition import table

if INTERPRET:
    import triton
    import triton.language as tl

    from onepass.ops.norm.kernels import e4m3_codes

    @triton.jit
    def codes_kernel(x_ptr, out_ptr, N: tl.constexpr):
        at = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(out_ptr + at, e4m3_codes(tl.load(x_ptr + at), tl.uint8))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [onepass.layer_norm, onepass.rms_norm], ids=["layer_norm", "rms_norm"])
def test_dtypes_of_y_and_the_residual_stream(op: Any, device: str) -> None:
    """x in 16 bits, a residual stream in fp32: the sum stays in fp32, y has the dtype that is asked for."""
    x, w = numbers(4, 40, dtype=HALF, device=device), numbers(40, device=device, seed=1)
    stream = numbers(4, 40, device=device, seed=2).requires_grad_()
    for out_dtype, expected in ((None, HALF), (torch.float32, torch.float32), (HALF, HALF)):
        y, s = op(x, w, residual=stream, out_dtype=out_dtype)
        assert (y.dtype, s.dtype) == (expected, torch.float32)
        torch.testing.assert_close(s, x.float() + stream, rtol=0, atol=0)
        want = getattr(definition, op.__name__)(x.double(), w.double(), residual=stream.double())[0]
        torch.testing.assert_close(
            y.double(), want, rtol=1e-2 if y.dtype == HALF else 1e-5, atol=1e-2 if y.dtype == HALF else 1e-5
        )
    y, s = op(x, w, residual=stream, out_dtype=torch.float32)
    (y.sum() + s.sum()).backward()
    assert stream.grad is not None
    assert stream.grad.dtype == torch.float32
    # fp32 y of a wide row of 16 bits: the kernels of every width write it
    wide = numbers(2, 20000, dtype=HALF, device=device)
    want = getattr(definition, op.__name__)(wide.float())
    torch.testing.assert_close(op(wide, out_dtype=torch.float32), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cols", [33, 300, 8208])
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1, 2)], ids=str)
def test_gradients_of_a_wider_stream(cols: int, wanted: tuple[int, ...], device: str) -> None:
    """Each of x and the stream has the gradient in its own dtype, from fp32."""
    x, stream, w = (numbers(*s, device=device, seed=i) for i, s in enumerate(((3, cols), (3, cols), (cols,))))
    tensors = [x.to(HALF), stream, w]
    dy, ds = numbers(3, cols, dtype=HALF, device=device, seed=4), numbers(3, cols, device=device, seed=5)
    found, expected = [], []
    for op, up, out in ((onepass.rms_norm, lambda t: t, found), (definition.rms_norm, torch.Tensor.double, expected)):
        leaves = [up(t).clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        y, s = op(leaves[0], leaves[2], residual=leaves[1])
        assert y.dtype == leaves[0].dtype
        out += torch.autograd.grad((y, s), [leaves[i] for i in wanted], (up(dy), up(ds)))
    for i, a, e in zip(wanted, found, expected, strict=True):
        assert a.dtype == tensors[i].dtype
        most = 1e-2 if a.dtype == HALF else 2e-4
        torch.testing.assert_close(a.double(), e, rtol=most, atol=most)


OPTIONS: dict[str, dict[str, Any]] = {
    "weights per head": {},
    "gate": {"gate": 3},
    "gate first, by sigmoid": {"gate": 3, "gate_first": True, "gate_act": "sigmoid"},
    "rounded twice": {"rounding": "twice"},
    "rows in 8 bits": {"quantize": "row", "out_dtype": torch.float32},
    "blocks in 8 bits": {"quantize": "block", "out_dtype": torch.float32},
}


@pytest.mark.parametrize("device", DEVICES)
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
        y, want = y.y, want[2]
    torch.testing.assert_close(y.double(), want.double(), rtol=2e-5, atol=2e-5)
    found = torch.autograd.grad(y.square().sum(), tensors)
    expected = torch.autograd.grad(want.double().square().sum(), wide)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
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
        for op in (onepass.layer_norm, onepass.rms_norm):
            alone, beside = op(x, w, quantize=by), op(x, w, quantize=by, out_dtype=dtype)
            assert alone.y is None
            y, plain = beside.y, op(x, w)
            # the compiler contracts squares into their sum in one way here, in another there: the statistics may differ
            # in their last bit, and y by that and its own rounding
            limit = 4 * torch.finfo(dtype).eps * float(plain.abs().max())
            torch.testing.assert_close(y, plain, rtol=0, atol=0 if device == "cpu" and not INTERPRET else limit)
            values, scales = definition.to_e4m3(y, columns)
            for found in (alone, beside):
                assert found.values.dtype == torch.float8_e4m3fn
                assert torch.equal(found.values.view(torch.uint8), values.view(torch.uint8))
                assert torch.equal(found.scales, scales)
            rebuilt = values.float().unflatten(-1, (-1, columns)) * scales[..., None]
            assert bool(
                ((rebuilt.flatten(-2) - y.float()).abs() <= y.float().abs() / 16 + scales.amax() * 2**-10).all()
            )
        wide, s = onepass.rms_norm(x, w, residual=x.float(), quantize=by)
        assert torch.equal(s, x.float() * 2)
        same, _ = onepass.rms_norm(x, w, residual=x.float(), quantize=by, out_dtype=dtype)
        want = definition.to_e4m3(same.y, columns)[0]
        assert torch.equal(wide.values.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_scales_are_fp32_whatever_the_default_dtype(device: str, default: torch.dtype) -> None:
    """Kernels write four bytes for each scale; compiled programs read what the shapes on meta say."""
    x = numbers(3, 256, device=device)
    want = onepass.rms_norm(x, quantize="block")
    torch.set_default_dtype(default)
    try:
        found, none, meta = (onepass.rms_norm(t, quantize="block") for t in (x, x[:0], x.to("meta")))
    finally:
        torch.set_default_dtype(torch.float32)
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


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_pass_8_bits_straight(device: str) -> None:
    """Those of y beside its 8-bit form are those of y; the 8-bit form has none."""
    x, w, dy = (numbers(*shape, device=device, seed=i) for i, shape in enumerate(((4, 128), (128,), (4, 128))))
    plain = [t.clone().requires_grad_() for t in (x, w)]
    with_codes = [t.clone().requires_grad_() for t in (x, w)]
    out = onepass.rms_norm(*with_codes, quantize="row", out_dtype=torch.float32)
    assert out.y is not None
    assert not out.values.requires_grad
    assert not out.scales.requires_grad
    # RMS norm rounded once by the same kernel: out_dtype alone does not change y
    onepass.rms_norm(*plain, out_dtype=torch.float32).backward(dy)
    out.y.backward(dy)
    for a, b in zip(plain, with_codes, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6)
    alone = onepass.rms_norm(*with_codes, quantize="row")
    assert not alone.values.requires_grad


def _vmap_views_dtypes() -> bool:
    """Return whether this torch has a rule for the view that codes need: 2.13 has, 2.11 has not."""
    try:
        torch.vmap(lambda t: t.view(torch.uint8))(torch.zeros(2, 2, dtype=torch.int8))
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(INTERPRET, reason="the dispatcher is the same")
def test_8_bits_through_vmap_compile_and_meta() -> None:
    """The specs compare numbers in float64, so codes are tried here."""
    x = numbers(3, 4, 128)

    def call(t: Tensor) -> Any:
        return onepass.rms_norm(t, quantize="block", out_dtype=torch.float32)

    want = call(x)
    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    for found in (torch.vmap(call)(x) if _vmap_views_dtypes() else want, compiled(x)):
        for a, b in zip(found, want, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0)
    meta = onepass.rms_norm(x.to("meta"), quantize="row")
    assert (meta.values.shape, meta.scales.shape, meta.y) == ((3, 4, 128), (3, 4, 1), None)
    for rows, cols in ((0, 128), (1, 128), (2, 1), (2, 0)):
        out = onepass.rms_norm(numbers(rows, cols), quantize="row")
        assert (out.values.shape, out.scales.shape) == ((rows, cols), (rows, 1))

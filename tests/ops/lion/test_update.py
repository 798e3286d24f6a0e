"""The update itself: against float64, in every dtype mix; ties, nan, inf; the remainder's arithmetic; codes of int8."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lion_params import update_lists_
from onepass.core.launch import INTERPRET
from onepass.ops.lion.definition import INT8_BLOCK, Row, dequantize, join, quantize_, reference, scales_for, split
from onepass.ops.lion.torch_path import SMALL, TILE, update_

# with β1 = 0.9 some 16-bit numbers are exact ties, g = −9·m, whose sign is a matter of rounding
B1, B2 = 0.9137, 0.8071
HYPER = torch.tensor(
    [[1e-3, 0.1, B1, 1 - B1, 0.99, 0.01, 1.0, 0.0], [2e-2, 0.0, B2, 1 - B2, 0.9, 0.1, -1.0, 0.0]], dtype=torch.float64
)
ROW = Row(*HYPER[0].tolist())
SHAPES = [(5,), (3, 700), (0,), (), (33, 64), (1024,), (2049,)]
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def expected(p: Tensor, g: Tensor, m: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    return reference(p.double(), g.double(), m.double(), Row(*row.tolist()))


def assert_near(got: Tensor, want: Tensor, ulp: float) -> None:
    error = (got.double() - want).abs()
    assert bool((error <= want.abs() * ulp * 1.01 + 1e-6).all()), f"error {error.max()}"


def check_step(
    dtypes: tuple[torch.dtype, ...], rest: bool, shapes: list[tuple[int, ...]], device: str = "cpu", offset: int = 0
) -> None:
    def make(dtype: torch.dtype, scale: float) -> list[Tensor]:
        flat = [(torch.randn(math.prod(s) + offset) * scale).to(device, dtype)[offset:] for s in shapes]
        return [t.view(s) for t, s in zip(flat, shapes, strict=True)]

    params, grads, momenta = make(dtypes[0], 1.0), make(dtypes[1], 1.0), make(dtypes[2], 0.1)
    extras = [torch.zeros(s, dtype=torch.int16, device=device) for s in shapes] if rest else []
    groups = [i % 2 for i in range(len(shapes))]
    want = [expected(p, g, m, HYPER[k]) for p, g, m, k in zip(params, grads, momenta, groups, strict=True)]
    update_lists_(params, grads, momenta, extras, groups, [Row(*row) for row in HYPER.tolist()])
    # interpreted conversions to 16 bits truncate
    factor = 2.0 if INTERPRET else 1.0
    for i, (new_p, new_m) in enumerate(want):
        assert_near(momenta[i], new_m, factor * HALF_ULP[dtypes[2]])
        stored = join(params[i], extras[i]) if rest else params[i]
        assert_near(stored, new_p, 2.0**-23 + (0.0 if rest else factor * HALF_ULP[dtypes[0]]))


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# under the interpreter bf16 can't be relied on
MIXES = [m for m in itertools.product((F32, F16, BF16), repeat=3) if not (INTERPRET and BF16 in m)]


@pytest.mark.parametrize(
    ("device", "offset"), [("cpu", 0), *(pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (0, 1, 3))]
)
@pytest.mark.parametrize("dtypes", MIXES, ids=lambda d: "-".join(str(t)[6:] for t in d))
def test_every_dtype_mix_and_alignment(dtypes: tuple[torch.dtype, ...], device: str, offset: int) -> None:
    check_step(dtypes, False, SHAPES if device == "cpu" else [*SHAPES, (70_000,)], device, offset)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_remainder_beside_a_float64_gradient(shape: tuple[int, ...]) -> None:
    """The update is computed in float64; the pair stores it as the fp32 number that it is."""
    p, g = torch.randn(shape).to(torch.bfloat16), torch.randn(shape, dtype=torch.float64)
    m, extra = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.int16)
    want, new = expected(p, g, m, HYPER[0])
    update_([p], [g], [m], [extra], ROW)
    torch.testing.assert_close(join(p, extra), want.float())
    torch.testing.assert_close(m, new)


@pytest.mark.parametrize("momentum", [F32, F16] if INTERPRET else [F32, BF16])
def test_remainder(momentum: torch.dtype) -> None:
    # the kernel handles a bf16 parameter as integers, so that this holds under the interpreter too
    check_step((BF16, F16 if INTERPRET else BF16, momentum), True, SHAPES)


@pytest.mark.interpret
def test_interpreted_kernel_finds_every_tensor_of_a_crowded_map() -> None:
    # 40 tensors within the first span of 32 tiles, then one that crosses spans
    check_step((F32, F32, F32), False, [(7 + i,) for i in range(40)] + [(40 * 1024 + 3,), (1,)])


def test_inf_times_a_beta_or_a_decay_of_zero_is_nan(device: str, cautious_decay: bool) -> None:
    values = torch.tensor([0.0, 1.0, -2.0, math.inf, -math.inf], device=device)
    p, g, m = torch.cartesian_prod(values, values, values).T.contiguous()
    for beta1, beta2, decay in itertools.product((0.0, 0.5), repeat=3):
        row = Row(0.5, decay, beta1, 1 - beta1, beta2, 1 - beta2, cautious_decay=float(cautious_decay))
        new_p, new_m = p.clone(), m.clone()
        update_lists_([new_p], [g], [new_m], [], [0], [row])
        torch.testing.assert_close((new_p, new_m), reference(p, g, m, row), equal_nan=True)


# what a C++ compiler makes of it has nothing to do with Triton's interpreter
@pytest.mark.parametrize("compiled", [False] if INTERPRET else [False, pytest.param(True, marks=pytest.mark.slow)])
def test_together_is_one_at_a_time_bit_for_bit(compiled: bool) -> None:
    # large, short, and with tails, together and one at a time: the same bits
    sizes = [TILE + SMALL + 13, SMALL, SMALL - 1, 1, 0, 63, 64, 65, 1000]
    params, grads, momenta = ([torch.randn(n) for n in sizes] for _ in range(3))
    together = [p.clone() for p in params], [m.clone() for m in momenta]
    update_(together[0], grads, together[1], [], ROW, compiled=compiled)
    for i in range(len(sizes)):
        update_([params[i]], [grads[i]], [momenta[i]], [], ROW, compiled=compiled)
        assert torch.equal(params[i], together[0][i])
        assert torch.equal(momenta[i], together[1][i])


def test_split_and_join_are_inverse_on_every_kind_of_number() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 18,), dtype=torch.int32)
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x3F807FFF, 0x3F808000]
    edge = torch.tensor(edges, dtype=torch.int32)
    x = torch.cat([bits, edge, edge | -(2**31)]).view(torch.float32)
    high, low = split(x)
    assert torch.equal(high.isnan(), x.isnan())
    kept = ~x.isnan()
    assert torch.equal(join(high, low).view(torch.int32)[kept], x.view(torch.int32)[kept])
    # half up differs from half to even at exact halves alone
    differs = kept & (x.abs() < 1e38) & (high != x.to(torch.bfloat16))
    assert bool((low[differs] == -(2**15)).all())


def codes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.zeros_like(x, dtype=torch.int8, memory_format=torch.preserve_format)
    scales = torch.zeros(scales_for(x.numel()))
    quantize_(x, codes, scales)
    return codes, scales


@pytest.mark.parametrize("exponent", [-90, 0, 100])
def test_codes_keep_signs_zeros_and_three_percent(exponent: int) -> None:
    x = torch.randn(5000) * torch.randn(5000).mul(2).exp() * 2.0**exponent
    x[::7] = 0.0
    codes, scales = codes_of(x)
    y = dequantize(codes, scales)
    largest = torch.nn.functional.pad(x.abs(), (0, scales_for(5000) * INT8_BLOCK - 5000)).view(-1, INT8_BLOCK).amax(1)
    assert torch.equal(scales, largest)
    assert torch.equal(y == 0, codes == 0)
    assert bool((y[::7] == 0).all())
    fine = x.abs() > 1e-5 * largest.repeat_interleave(INT8_BLOCK)[:5000]
    # code c covers ((c ± ½)/127)^4
    c = codes.abs().float().clamp_min(1)
    assert bool(((y - x).abs()[fine] <= (x.abs() * ((1 + 0.5 / c) ** 4 - (1 - 0.5 / c) ** 4))[fine]).all())
    assert bool((y.sign() == x.sign())[fine].all())
    top = x.abs() > 0.5 * largest.repeat_interleave(INT8_BLOCK)[:5000]
    assert ((y - x).abs()[top] / x.abs()[top]).max() < 0.02
    again, scales_again = codes_of(y)
    assert torch.equal(again, codes), "what was written must read back as itself"
    assert torch.allclose(scales_again, scales, rtol=1e-6)


def test_codes_of_special_numbers() -> None:
    codes, scales = codes_of(torch.tensor([1.0, -math.inf, math.nan, 0.0]))
    y = dequantize(codes, scales)
    assert y[1] < -1e36
    assert torch.equal(y[2:].nan_to_num(7.0), torch.tensor([7.0, 0.0]))
    codes, scales = codes_of(torch.tensor([1.0, math.nan, -2.0]))
    assert scales == 2.0
    assert dequantize(codes, scales)[2] == -2.0
    assert torch.equal(codes_of(torch.zeros(300))[1], torch.zeros(2))
    y = dequantize(*codes_of(torch.tensor([1e-42, -1e-42])))
    assert torch.equal(y, torch.zeros(2)) or bool((y.sign() == torch.tensor([1.0, -1.0])).all())


def test_codes_follow_strides() -> None:
    x = torch.randn(60, 50).t()
    codes, scales = codes_of(x)
    flat_codes, flat_scales = codes_of(x.t().contiguous())
    assert codes.stride() == x.stride()
    assert torch.equal(codes.t(), flat_codes)
    assert torch.equal(scales, flat_scales)
    assert torch.equal(dequantize(codes, scales).t(), dequantize(flat_codes, flat_scales))

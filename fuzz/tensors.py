"""Tensors as JSON: shape, dtype, what fills them, how they lie in memory; the same numbers on every device."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

FILLS = (
    "normal", "uniform", "ties", "plateau", "constant", "shifted", "cauchy", "outlier", "huge", "tiny", "wide", "ones",
    "large", "big",
)  # fmt: skip
# what loses no gradient to overflow: for properties that compare two ways of computing the same thing
TAME = ("normal", "uniform", "ties", "plateau", "outlier")
# of upstream gradients
UPSTREAM = ("normal", "ties", "cauchy", "ones", "plateau", "outlier")
LAYOUTS = ("contiguous", "transposed", "sliced", "stepped", "offset", "expanded")
SEEDS = st.integers(0, 2**32 - 1)

Spec = dict[str, Any]


def dtypes(device: str) -> tuple[str, ...]:
    """Dtypes that a device computes in; the interpreter's bf16 can't be trusted, and fp64 never reaches a kernel."""
    return ("float32", "float16") if device == "interpret" else tuple(DTYPES)


def torch_device(device: str) -> str:
    """Where tensors live: the interpreter's are on the CPU."""
    return "cuda" if device == "cuda" else "cpu"


def sizes(*common: int, largest: int = 300) -> st.SearchStrategy[int]:
    """0, 1, the neighbours of powers of two and whatever else."""
    return st.one_of(st.sampled_from((1, 2, 3, *common)), st.integers(0, largest))


def spec(shape: tuple[int, ...] | list[int], dtype: str, **options: Any) -> st.SearchStrategy[Spec]:
    """A tensor of this shape and dtype."""
    fills = options.get("fills", FILLS)
    layouts = options.get("layouts", LAYOUTS)
    return st.fixed_dictionaries(
        {
            "shape": st.just(list(shape)), "dtype": st.just(dtype), "fill": st.sampled_from(fills),
            "layout": st.sampled_from(layouts), "seed": SEEDS,
        }
    )  # fmt: skip


def _values(fill: str, shape: list[int], generator: torch.Generator) -> Tensor:
    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform() -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    x = normal()
    if fill == "uniform":
        return uniform()
    if fill == "ties":
        return (x * 1.5).round()
    if fill == "plateau":
        return x.clamp_min(0)
    if fill == "constant":
        # one number per row, 8 significant bits, from 2^-10 to 2^20
        row = x[..., :1]
        number = (row.sign() + (row == 0)) * torch.ldexp(
            (row.abs() * 100).floor() % 128 + 128, (31 * _share(row)).floor() - 17
        )
        return number.expand(shape).clone()
    if fill == "shifted":
        return x + 1e3 * (1 + x[..., :1].abs() * 10)
    if fill == "cauchy":
        return torch.tan(math.pi * (uniform() - 0.5)).clamp(-1e6, 1e6)
    if fill == "outlier":
        return torch.where(uniform() < 0.02, x * 1e4, x)
    if fill == "huge":
        return x * 10.0 ** (8 + 22 * _share(x[..., :1]))
    if fill == "big":
        return x * 10.0 ** (10 + 7 * _share(x[..., :1]))
    if fill == "tiny":
        return x * 10.0 ** (-6 - 36 * _share(x[..., :1]))
    if fill == "wide":
        return x.sign() * 10.0 ** (-30 + 60 * uniform())
    if fill == "ones":
        return torch.ones(shape, dtype=torch.float64)
    if fill == "large":
        return x * 100
    return x


def _share(x: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend on x in no simple way; whole steps for exponents."""
    return (x.abs() * 1e4).floor() % 97 / 97


def build(what: Spec, device: str) -> Tensor:
    """Make the tensor: finite, rounded to its dtype, laid out as asked."""
    generator = torch.Generator().manual_seed(what["seed"])
    dtype, shape = DTYPES[what["dtype"]], list(what["shape"])
    values = _values(what["fill"], shape or [1], generator).view(shape)
    # the whole exponents of "constant" keep its 8 bits exact
    limit = torch.finfo(dtype).max
    values = values.clamp(-limit, limit).to(dtype)
    for special, share in what.get("special", ()):
        where = torch.rand(shape, generator=generator) < share
        values = values.masked_fill(where, float(special))
    return lay_out(values, what["layout"], torch_device(device))


def like(x: Tensor, case: dict[str, Any], device: str) -> Tensor:
    """An upstream gradient for x: filled as the case's `up` says."""
    options = {"fill": case["up"], "layout": "contiguous", "seed": case["seed"]}
    return build({"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch."), **options}, device)


def lay_out(values: Tensor, layout: str, device: str) -> Tensor:
    """The same values at other strides, with NaN between them."""
    values = values.to(device)
    shape = values.shape
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced" and values.dim() >= 1:
        room = values.new_full((*shape[:-1], shape[-1] + 5), math.nan)
        room[..., 2 : 2 + shape[-1]] = values
        return room[..., 2 : 2 + shape[-1]]
    if layout == "stepped" and values.dim() >= 1:
        room = values.new_full((*shape[:-1], 2 * shape[-1] + 1), math.nan)
        room[..., 1::2] = values
        return room[..., 1::2]
    if layout == "offset":
        room = values.new_full((values.numel() + 1,), math.nan)
        room[1:] = values.reshape(-1)
        return room[1:].view(shape)
    if layout == "expanded" and values.dim() >= 2 and shape[0] > 0:
        return values[:1].contiguous().expand(shape)
    return values


def mask(shape: list[int], seed: int, share: float, device: str) -> Tensor:
    """True with this share; the last row all False."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(shape, generator=generator) < share
    if len(shape) > 1 and shape[0] > 2:
        chosen[-1] = False
    return chosen.to(torch_device(device))


def wide(x: Tensor) -> Tensor:
    """The same numbers in float64 on the CPU, in memory of their own."""
    return x.detach().to("cpu", torch.float64, copy=True)

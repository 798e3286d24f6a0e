"""Random shapes, strides, dtypes and options against the float64 definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import INTERPRET
from onepass import layer_norm, rms_norm
from onepass.ops.norm import reference

DTYPES = [torch.float32, torch.float16] if INTERPRET else [torch.float32, torch.float16, torch.bfloat16, torch.float64]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}
LAYOUTS = ("plain", "transposed", "stepped rows", "stepped columns", "expanded", "offset")


def _lay_out(shape: tuple[int, int], dtype: torch.dtype, layout: str) -> Tensor:
    rows, cols = shape
    if layout == "transposed":
        return torch.randn(cols, rows).to(dtype).t()
    if layout == "stepped rows":
        return torch.randn(2 * rows, cols).to(dtype)[::2]
    if layout == "stepped columns":
        return torch.randn(rows, 2 * cols).to(dtype)[:, ::2]
    if layout == "expanded":
        return torch.randn(1, cols).to(dtype).expand(rows, cols)
    if layout == "offset":
        return torch.randn(rows, cols + 3).to(dtype)[:, 1 : cols + 1]
    return torch.randn(rows, cols).to(dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@settings(max_examples=15 if INTERPRET else 120)
@given(data=st.data())
def test_values_and_gradients(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.integers(1, 9)), draw(st.one_of(st.integers(1, 70), st.integers(200, 600)))
    dtype, w_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 1000)))
    x = _lay_out(shape, dtype, draw(st.sampled_from(LAYOUTS)))
    mean = draw(st.booleans())
    kwargs: dict = {"eps": draw(st.sampled_from([1e-5, 1e-2]))}
    if draw(st.booleans()):
        kwargs["weight"] = torch.randn(shape[1]).to(w_dtype)
    if mean:
        if draw(st.booleans()):
            kwargs["bias"] = torch.randn(shape[1]).to(w_dtype)
    else:
        kwargs["offset"] = draw(st.sampled_from([0.0, 1.0]))
    residual = draw(st.booleans())
    if residual:
        kwargs["residual"] = _lay_out(shape, dtype, draw(st.sampled_from(LAYOUTS)))
    elif mean:  # a rounded s may have other ties than an exact one
        kwargs["stable"] = draw(st.booleans())
    dy = _lay_out(shape, dtype, draw(st.sampled_from(LAYOUTS)))
    ds = _lay_out(shape, dtype, draw(st.sampled_from(LAYOUTS)))
    if shape[1] == 1:
        kwargs["eps"] = 1e-2

    def run(norm, up) -> tuple[list[Tensor], list[Tensor]]:
        args = {k: up(v).detach().requires_grad_() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        leaf = up(x).detach().requires_grad_()
        out = norm(leaf, **args)
        outs = list(out) if residual else [out]
        leaves = [leaf, *(v for v in args.values() if isinstance(v, Tensor))]
        return outs, list(
            torch.autograd.grad(outs, leaves, [up(g).to(o) for g, o in zip((dy, ds), outs, strict=False)])
        )

    outs, grads = run(layer_norm if mean else rms_norm, lambda t: t)
    exact_outs, exact_grads = run(reference.layer_norm if mean else reference.rms_norm, lambda t: t.double())
    tolerance = max(TOLERANCE[dtype], TOLERANCE[w_dtype] if "weight" in kwargs or "bias" in kwargs else 0)
    for a, e in zip(outs + grads, exact_outs + exact_grads, strict=True):
        scale = max(1.0, float(e.detach().abs().max()))
        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=tolerance * scale)

"""`qk_norm_rope` against the composition, and against what transformers' Qwen 3 does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.launch import INTERPRET


def angles(positions: int, half: int) -> tuple[Tensor, Tensor]:
    inverse = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    theta = torch.arange(positions)[:, None] * inverse
    return theta.cos().float(), theta.sin().float()


def packed(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Views of one projection of 2 · 5 tokens: 6 heads of queries, 2 of keys, 2 of values, of 16 columns."""
    qkv = torch.randn(2, 5, 10 * 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    return tuple(t.unflatten(-1, (-1, 16)) for t in qkv.split((6 * 16, 2 * 16, 2 * 16), -1))


def test_views_of_a_packed_projection_are_not_copied() -> None:
    kernels = pytest.importorskip("onepass.ops.qk_norm_rope.kernels")
    for t in packed(torch.bfloat16):
        # heads before tokens, as attention wants them, too
        for view in (t, t.transpose(1, 2)):
            assert kernels._heads(view)[0].data_ptr() == t.data_ptr()


@pytest.mark.peer
@pytest.mark.skipif(INTERPRET, reason="the torch path and transformers")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_as_qwen_3_does(dtype: torch.dtype) -> None:
    """Transformers rounds four times on the way; this is at least as near to float64."""
    models = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    q, k, _ = packed(dtype)
    norms = [models.Qwen3RMSNorm(16).to(dtype) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(torch.rand(16, generator=generator) + 0.5)
    cos, sin = angles(5, 8)
    doubled = [torch.cat((t, t), -1).to(dtype)[None] for t in (cos, sin)]
    theirs = models.apply_rotary_pos_emb(*(n(t).transpose(1, 2) for n, t in zip(norms, (q, k), strict=True)), *doubled)
    weights = [n.weight for n in norms]
    ours = onepass.qk_norm_rope(q, k, *weights, cos=cos, sin=sin)
    tensors: Any = [t.double() for t in (q, k, *weights)]
    exact = onepass.qk_norm_rope(*tensors, cos=cos.double(), sin=sin.double())
    for a, b, e in zip(ours, theirs, exact, strict=True):
        errors = [(t.double() - e).abs().max() for t in (a, b.transpose(1, 2))]
        assert errors[0] <= (4 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps * e.abs().max()
        assert errors[0] <= errors[1] * 1.01 + 1e-6


@pytest.mark.skipif(not INTERPRET, reason="on a CPU the call raises")
def test_a_position_outside_of_the_table_gives_nan_where_values_are_not_read() -> None:
    from onepass.ops.qk_norm_rope import kernels

    q, k, _ = packed(torch.float32)
    cos, sin = angles(5, 8)
    for wrong in (-1, 5, 1 << 40):
        at = torch.tensor([0, 1, wrong, 3, 4])
        out, _ = kernels.forward(q, k, None, None, cos, sin, at, 1e-6, 0.0, False)
        assert out[:, 2].isnan().all()
        assert not out[:, [0, 1, 3, 4]].isnan().any()

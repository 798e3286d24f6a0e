"""docs/norms.md: the calls that equal the norms of transformers' models, bit for bit on a CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.launch import INTERPRET

pytest.importorskip("transformers")
pytestmark = [pytest.mark.peer, pytest.mark.skipif(INTERPRET, reason="the kernels add in another order")]

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
# class by module of transformers.models, arguments after the width, is there a gate, the same by onepass
ONCE: Call = lambda x, w, z: onepass.rms_norm(x, w, eps=1e-6)  # noqa: E731
TWICE: Call = lambda x, w, z: onepass.rms_norm(x, w, rounding="twice", eps=1e-6)  # noqa: E731
PLUS_ONE: Call = lambda x, w, z: onepass.rms_norm(x, w, offset=1.0, eps=1e-6)  # noqa: E731
NORMS: dict[str, tuple[str, tuple[Any, ...], bool, Call]] = {
    "LlamaRMSNorm": ("llama.modeling_llama", (), False, TWICE),
    "MistralRMSNorm": ("mistral.modeling_mistral", (), False, TWICE),
    "Qwen3RMSNorm": ("qwen3.modeling_qwen3", (), False, TWICE), "T5LayerNorm": ("t5.modeling_t5", (), False, TWICE),
    "GemmaRMSNorm": ("gemma.modeling_gemma", (), False, PLUS_ONE),
    "Gemma3RMSNorm": ("gemma3.modeling_gemma3", (), False, PLUS_ONE),
    "DeepseekV3RMSNorm": ("deepseek_v3.modeling_deepseek_v3", (), False, TWICE),
    "Qwen3NextRMSNorm": ("qwen3_next.modeling_qwen3_next", (), False, PLUS_ONE),
    "Olmo2RMSNorm": ("olmo2.modeling_olmo2", (), False, ONCE),
    "MambaRMSNormGated": ("mamba2.modeling_mamba2", (32,), True, lambda x, w, z: onepass.rms_norm(
        x, w, gate=z, gate_first=True, groups=3, rounding="twice", eps=1e-6)),
    "Qwen3NextRMSNormGated": ("qwen3_next.modeling_qwen3_next", (), True, lambda x, w, z: onepass.rms_norm(
        x, w, gate=z, rounding="twice", eps=1e-6)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", NORMS)
def test_bits(name: str, dtype: torch.dtype) -> None:
    module, arguments, gated, ours = NORMS[name]
    models = pytest.importorskip(f"transformers.models.{module}")
    cls = getattr(models, name)
    if arguments and "group_size" not in inspect.signature(cls).parameters:
        pytest.skip("this version of transformers has no groups in this class")
    norm = cls(96, *arguments, eps=1e-6).to(dtype)
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(64, 5, 96, generator=generator).mul(3).to(dtype) for _ in range(2))
    with torch.no_grad():
        norm.weight.copy_(torch.rand(96, generator=generator) + 0.5)
    want = norm(x, z) if gated else norm(x)
    y = ours(x, norm.weight, z)
    if gated:
        # the last bit of torch's silu depends on where a number lies in its tensor
        torch.testing.assert_close(y, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        assert dtype == torch.float32 or (y != want).float().mean() <= 1e-3
    else:
        assert torch.equal(y, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_cohere_norms_each_head_with_its_own_weight(dtype: torch.dtype) -> None:
    models = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    norm = models.CohereLayerNorm((3, 32), eps=1e-5).to(dtype)
    x = torch.randn(40, 3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(3, 32) + 0.5)
    assert torch.equal(onepass.layer_norm(x, norm.weight), norm(x))

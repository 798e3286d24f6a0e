"""`onepass.transformers`: models of transformers with our experts have the logits and gradients of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("onepass.transformers")
pytestmark = pytest.mark.peer
SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
# fused gate and up as (experts, 2·hidden, dim), and Aria's as (experts, dim, 2·hidden)
MODELS: dict[str, Any] = {
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"num_experts": 8}),
    "LFM2": ("Lfm2MoeForCausalLM", "Lfm2MoeConfig", {"num_dense_layers": 0, "layer_types": ["full_attention"] * 2}),
    "Aria": ("AriaTextForCausalLM", "AriaTextConfig", {"moe_num_experts": 4, "moe_topk": 2}),
}


def build(cls: str, config: str, options: dict[str, Any]) -> Any:
    return getattr(transformers, cls)(getattr(transformers, config)(**SIZE, **options))


def results(model: Any, implementation: str) -> list[torch.Tensor]:
    model.set_experts_implementation(implementation)
    assert model.config._experts_implementation == implementation
    ids = torch.arange(2, 20, device=model.device).view(2, 9)
    out = model(input_ids=ids, labels=ids)
    gradients = torch.autograd.grad(out.loss, [*model.parameters()], allow_unused=True)
    return [out.logits.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_its_own_experts(name: str, device: str) -> None:
    model = build(*MODELS[name]).to(device)
    model.set_experts_implementation("onepass")
    if model.config._experts_implementation != "onepass":
        assert name == "Aria", "transformers 5.17 has no choice for Aria alone"
        pytest.skip("this transformers has no choice of experts for Aria")
    for ours, theirs in zip(results(model, "onepass"), results(model, "eager"), strict=True):
        # sums of up to 96 numbers, some thirty of them one after another
        atol = 96 * 30 * torch.finfo(torch.float32).eps * float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=atol)


def test_other_experts_are_refused_by_name() -> None:
    model = build("GptOssForCausalLM", "GptOssConfig", {"num_local_experts": 4})
    with pytest.raises(ValueError, match="GptOssExperts has biases, interleaved weights, a gate of its own"):
        results(model, "onepass")

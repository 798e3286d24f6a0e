"""`onepass.torchtitan` by torchtitan's own overrides; runs where torchtitan and, for some, fla are installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch

pytest.importorskip("torchtitan")

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common import moe, token_dispatcher
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm

import onepass.torchtitan as ours

FLA = importlib.util.find_spec("fla") is not None
NORMS = [(RMSNorm.Config(normalized_shape=64, eps=1e-5), ours.rms_norm, 1)]
if FLA:
    from torchtitan.models.qwen3_5 import model_registry
    from torchtitan.models.qwen3_5.model import OffsetRMSNorm, RMSNormGated

    NORMS += [
        (OffsetRMSNorm.Config(dim=64), ours.qwen3_5_offset_rms_norm, 1),
        (RMSNormGated.Config(dim=64), ours.qwen3_5_gated_rms_norm, 2),
    ]
pytestmark = pytest.mark.peer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("config", "factory", "inputs"), NORMS)
def test_values_gradients_and_keys_are_torchtitans(config, factory, inputs, dtype) -> None:  # type: ignore[no-untyped-def]
    theirs, mine = config.build().to(dtype), factory(config).build().to(dtype)
    torch.nn.init.normal_(theirs.weight)
    mine.load_state_dict(theirs.state_dict())
    assert isinstance(mine, type(theirs))
    x = [torch.randn(3, 5, 64, dtype=dtype, requires_grad=True) for _ in range(inputs)]
    gy = torch.randn(3, 5, 64, dtype=dtype)
    y, wanted = mine(*x), theirs(*x)
    # theirs rounds twice in bf16
    close = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y, wanted, **close)
    for own, their in zip(
        torch.autograd.grad(y, (*x, mine.weight), gy), torch.autograd.grad(wanted, (*x, theirs.weight), gy), strict=True
    ):
        torch.testing.assert_close(own, their, rtol=close["rtol"], atol=8 * close["atol"])


@pytest.mark.skipif(not FLA, reason="Qwen3.5's model imports fla")
def test_the_names_of_the_command_line_reach_norms_of_a_model() -> None:
    names = ("rms_norm", "qwen3_5_offset_rms_norm", "qwen3_5_gated_rms_norm")
    spec = model_registry("debugmodel")
    told = apply_overrides(OverrideConfig(imports=[f"onepass.torchtitan.{name}" for name in names]), spec)
    assert all(any(name in line for line in told) for name in names), told


@pytest.mark.parametrize("dispatcher", ["LocalTokenDispatcher", "AllToAllTokenDispatcher"])
def test_a_block_of_experts_is_torchtitans(dispatcher: str) -> None:
    config = moe.MoE.Config(
        num_experts=8,
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(dim=32, hidden_dim=48, num_experts=8),
            token_dispatcher=getattr(token_dispatcher, dispatcher).Config(num_experts=8, top_k=2),
        ),
        router=moe.TokenChoiceTopKRouter.Config(
            num_experts=8, gate=Linear.Config(in_features=32, out_features=8, bias=False), top_k=2, route_norm=True
        ),
    )
    theirs = config.build()
    told = apply_overrides(OverrideConfig(imports=["onepass.torchtitan.routed_experts"]), config)
    mine = config.build()
    assert isinstance(mine.routed_experts, ours.RoutedExperts), told
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    mine.load_state_dict(theirs.state_dict())
    x, gy = torch.randn(3, 5, 32, requires_grad=True), torch.randn(3, 5, 32)
    found = []
    for block in (mine, theirs):
        y = block(x)
        found.append((y.detach(), *torch.autograd.grad(y, (x, *block.parameters()), gy)))
    # products in bf16, with roundings in other places
    for own, their in zip(*found, strict=True):
        assert float((own - their).norm()) <= 2**-6 * float(their.norm())
    assert torch.equal(mine.tokens_per_expert_E, theirs.tokens_per_expert_E)

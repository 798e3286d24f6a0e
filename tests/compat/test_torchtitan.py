"""`onepass.torchtitan` through torchtitan's own override mechanism; runs where torchtitan and fla are installed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchtitan")
pytest.importorskip("fla")

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3_5 import model_registry
from torchtitan.models.qwen3_5.model import OffsetRMSNorm, RMSNormGated

import onepass.torchtitan as ours

NORMS = [
    (RMSNorm.Config(normalized_shape=64, eps=1e-5), ours.rms_norm, 1),
    (OffsetRMSNorm.Config(dim=64), ours.qwen3_5_offset_rms_norm, 1),
    (RMSNormGated.Config(dim=64), ours.qwen3_5_gated_rms_norm, 2),
]


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


def test_the_names_of_the_command_line_reach_norms_of_a_model() -> None:
    names = ("rms_norm", "qwen3_5_offset_rms_norm", "qwen3_5_gated_rms_norm")
    spec = model_registry("debugmodel")
    told = apply_overrides(OverrideConfig(imports=[f"onepass.torchtitan.{name}" for name in names]), spec)
    assert all(any(name in line for line in told) for name in names), told

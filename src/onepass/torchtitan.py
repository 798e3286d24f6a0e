"""onepass's norms and experts in torchtitan's models, by its overrides and without a change of the models' code.

    torchtitan_train … --override.imports onepass.torchtitan.rms_norm onepass.torchtitan.routed_experts

Each override replaces a module by a subclass with the same parameters, initialization, sharding and checkpoint keys;
only `forward` is ours. Written for torchtitan 0.3.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from torch import Tensor, cat
from torch.distributed.tensor import DTensor

from onepass.ops.experts.op import experts as _experts
from onepass.ops.norm.op import rms_norm as _rms_norm

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common import moe, nn_modules
except ImportError as error:
    raise ImportError(f"onepass.torchtitan needs torchtitan 0.3 (pip install torchtitan): {error}") from error


class RMSNorm(nn_modules.RMSNorm):
    """torchtitan's `RMSNorm` by `onepass.rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.RMSNorm.Config):
        """As torchtitan's."""

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.weight, eps=self.eps)


@override(target=nn_modules.RMSNorm.Config, exact=True, description="onepass.rms_norm")
def rms_norm(config: nn_modules.RMSNorm.Config) -> RMSNorm.Config:
    """Override every RMS norm over one dimension: ``y = x·weight/√(mean(x²) + eps)``."""
    return derive(config, RMSNorm.Config)


class RoutedExperts(moe.RoutedExperts):
    """torchtitan's `RoutedExperts` by `onepass.experts`; with expert parallelism torchtitan's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(moe.RoutedExperts.Config):
        """As torchtitan's."""

    def forward(self, x: Tensor, scores: Tensor, expert_ids: Tensor, tokens_per_expert: Tensor) -> Tensor:
        if getattr(self.token_dispatcher, "ep_mesh", None) is not None:
            return super().forward(x, scores, expert_ids, tokens_per_expert)
        inner = self.inner_experts
        local = (w.to_local() if isinstance(w, DTensor) else w for w in (inner.w1_EFD, inner.w3_EFD, inner.w2_EDF))
        # products in bf16, as torchtitan's
        gate, up, down = (w.bfloat16() for w in local)
        chosen = expert_ids.flatten(0, 1), scores.flatten(0, 1)
        y = _experts(x.flatten(0, 1).bfloat16(), *chosen, cat((gate, up), 1).mT, down.mT, activation="swiglu")
        return y.type_as(x).view_as(x)


@override(target=moe.RoutedExperts.Config, exact=True, description="onepass.experts")
def routed_experts(config: moe.RoutedExperts.Config) -> moe.RoutedExperts.Config:
    """Override ``y = Σ_j score_j · (silu(x·w1ᵀ) ⊙ (x·w3ᵀ))·w2ᵀ``; experts of another class stay as they are."""
    plain = type(config.inner_experts) is moe.GroupedExperts.Config
    return derive(config, RoutedExperts.Config) if plain else config


# Qwen3.5's model imports flash-linear-attention
if importlib.util.find_spec("fla"):
    from torchtitan.models.qwen3_5 import model as qwen3_5

    class OffsetRMSNorm(qwen3_5.OffsetRMSNorm):
        """Qwen3.5's `OffsetRMSNorm` by `onepass.rms_norm`."""

        @dataclass(kw_only=True, slots=True)
        class Config(qwen3_5.OffsetRMSNorm.Config):
            """As torchtitan's."""

        def forward(self, x: Tensor) -> Tensor:
            return _rms_norm(x, self.weight, eps=self.eps, offset=1.0)

    class RMSNormGated(qwen3_5.RMSNormGated):
        """Qwen3.5's `RMSNormGated` by `onepass.rms_norm`."""

        @dataclass(kw_only=True, slots=True)
        class Config(qwen3_5.RMSNormGated.Config):
            """As torchtitan's."""

        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return _rms_norm(x, self.weight, eps=self.eps, gate=gate)

    @override(target=qwen3_5.OffsetRMSNorm.Config, exact=True, description="onepass.rms_norm")
    def qwen3_5_offset_rms_norm(config: qwen3_5.OffsetRMSNorm.Config) -> OffsetRMSNorm.Config:
        """Override ``y = x·(1 + weight)/√(mean(x²) + eps)``."""
        return derive(config, OffsetRMSNorm.Config)

    @override(target=qwen3_5.RMSNormGated.Config, exact=True, description="onepass.rms_norm")
    def qwen3_5_gated_rms_norm(config: qwen3_5.RMSNormGated.Config) -> RMSNormGated.Config:
        """Override ``y = silu(gate)·x·weight/√(mean(x²) + eps)``, rounded to x's dtype once and not twice."""
        return derive(config, RMSNormGated.Config)

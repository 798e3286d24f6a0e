"""transformers' mixtures of experts by `onepass.experts`, through its registry and without a change of a model's code.

    import onepass.transformers

    model.set_experts_implementation("onepass")   # or from_pretrained(…, experts_implementation="onepass")

The weights stay where they are. Written for transformers 5.17 to 5.24.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onepass.ops.experts.op import experts

try:
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError(f"onepass.transformers needs transformers ≥ 5.17 (pip install transformers): {error}") from error


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return ``Σ_j weight_j · (silu(x·gate_e) ⊙ (x·up_e))·down_e`` of a model's experts; others are a ValueError."""
    fn = getattr(self, "act_fn", None)
    refused = {
        "no gate": not self.has_gate,
        "biases": self.has_bias,
        "interleaved weights": not self.is_concatenated,
        "a norm behind each expert": getattr(self, "has_post_expert_norm", False),
        "a gate of its own": type(self)._apply_gate.__module__ != ExpertsInterface.__module__,
        "another activation than SiLU": fn is not nn.functional.silu and not isinstance(fn, (nn.SiLU, SiLUActivation)),
        "experts on several devices": getattr(self, "_is_expert_parallel", False),
    }
    if what := ", ".join(name for name, there in refused.items() if there):
        raise ValueError(f'{type(self).__name__} has {what}; use set_experts_implementation("grouped_mm")')
    up, down = (m if self.is_transposed else m.mT for m in (self.gate_up_proj, self.down_proj))
    return experts(hidden_states, top_k_index, top_k_weights, up, down, activation="swiglu")


ExpertsInterface.register("onepass", experts_forward)

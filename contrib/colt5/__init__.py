"""colt5-attention's modules, on top of onepass; in a checkout of the repository alone, not in the package.

Names, arguments and state_dict keys are the original's: ``load_state_dict`` takes its weights as they are.
README.md lists where results differ, because the original is faulty or limited.
"""

from .attention import (
    ConditionalRoutedAttention,
    ConditionalRoutedAutoregressiveAttention,
    ConditionalRoutedCrossAttention,
)
from .models import (
    ConditionalRoutedImageAttention,
    ConditionalRoutedTransformerBlock,
    ConditionalRoutedViT,
)
from .router import ConditionalRoutedFeedForward, CoordinateDescentRouter, RouterReturn

__all__ = [
    "ConditionalRoutedAttention", "ConditionalRoutedAutoregressiveAttention", "ConditionalRoutedCrossAttention",
    "ConditionalRoutedFeedForward", "ConditionalRoutedImageAttention", "ConditionalRoutedTransformerBlock",
    "ConditionalRoutedViT", "CoordinateDescentRouter", "RouterReturn",
]  # fmt: skip

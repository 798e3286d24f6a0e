"""The optimizer Lion, clipping by norm, and updates inside backward."""

from onepass.optim.clip import clip_grad_norm
from onepass.optim.lion import Lion
from onepass.optim.release import release_gradients

__all__ = ["Lion", "clip_grad_norm", "release_gradients"]

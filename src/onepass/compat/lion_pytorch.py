"""lion-pytorch's names on top of `onepass.optim.Lion`: `from onepass.compat.lion_pytorch import Lion`.

docs/moving.md says what to use in place of the variants in ``lion_pytorch.foreach`` and ``lion_pytorch.cautious_lion``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from onepass.compat._absent import absent
from onepass.ops.lion.definition import Row, split_complex
from onepass.ops.lion.torch_path import plain_
from onepass.optim.lion import Lion as _Lion

__all__ = ["Lion", "update_fn"]

_INSTEAD = {
    "foreach": "Lion, which takes all tensors at once",
    "cautious_lion": "onepass.optim.Lion with cautious, cautious_weight_decay and decouple_lr",
    "triton": "update_fn of this module",
}


class Lion(_Lion):
    """Lion with the constructor of lion-pytorch 0.2.5.

    Args:
        params, lr, betas, weight_decay: as there.
        use_triton: accepted and ignored; onepass picks the path itself.
        decoupled_weight_decay: decay by weight_decay·lr / (the constructor's lr), in every group.

    The trajectory is that of lion-pytorch up to rounding. As there, parameters in 16 bits have no
    remainder and no compensation; use `onepass.optim.Lion` to train them as in fp32.

    Example:
        >>> import torch
        >>> w = torch.ones(2, requires_grad=True)
        >>> optimizer = Lion([w], lr=0.5)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> w.detach()
        tensor([0.5000, 0.5000])
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
        use_triton: bool = False, decoupled_weight_decay: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr=lr, betas=betas, weight_decay=weight_decay, decouple_lr=decoupled_weight_decay,
            low_precision="none",
        )  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.defaults["decouple_lr"]:
            # as lion-pytorch does, divide by the constructor's lr, even if a scheduler such as OneCycleLR sets max_lr
            param_group.setdefault("peak_lr", float(self.defaults["lr"]))
            param_group["keep_peak_lr"] = True
        super().add_param_group(param_group)


@torch.no_grad()
def update_fn(p: Tensor, grad: Tensor, exp_avg: Tensor, lr: float, wd: float, beta1: float, beta2: float) -> None:
    """Do one Lion update of `p` and `exp_avg` in place; any device, dtype and strides.

    Example:
        >>> import torch
        >>> p, m = torch.ones(2), torch.zeros(2)
        >>> update_fn(p, torch.tensor([1.0, -1.0]), m, lr=0.5, wd=0.0, beta1=0.9, beta2=0.99)
        >>> p
        tensor([0.5000, 1.5000])
    """
    p, grad, exp_avg = map(split_complex, (p, grad, exp_avg))
    plain_(p, grad, exp_avg, None, Row(lr, wd, beta1, 1 - beta1, beta2, 1 - beta2))


absent(__name__, __all__, _INSTEAD)

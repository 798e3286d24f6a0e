"""What makes a router look where it has not been: a gradient for tokens that nobody chose."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.core.eager import plain

from .router import NORM_EPS, Router


def explore(y: Tensor, x: Tensor, router: nn.Module, k: int, mask: Tensor | None = None) -> Tensor:
    r"""Give y back; in backward, let the gradient of y tell the router which tokens have most left to gain.

    A gate's gradient, ⟨∂L/∂y_i, heavy(x_i)⟩, exists for chosen tokens alone, and means little until the heavy branch
    has learned something from tokens of that kind: a router that starts in the wrong place stays there. Yet ∂L/∂y_i
    is known for every token, and a heavy branch that answered with a unit step downhill would make that gradient
    −‖∂L/∂y_i‖. So every (n/k)-th token's score gets this optimistic gradient, less its mean, at a small weight:

    .. math:: \frac{\partial L}{\partial s_i} \mathrel{+}= -\,\lambda\,\frac nk\,
              \Big(\Big\|\frac{\partial L}{\partial y_i}\Big\| - \mathrm{mean}_j\Big\|\frac{\partial L}{\partial y_j}
              \Big\|\Big), \qquad \lambda = \text{router.explore}

    It reaches the routing vectors alone, not x. Tokens are taken at equal distances: nothing random, and as many are
    read as are chosen. It ends where the heavy branch leaves nothing to gain.

    Args:
        y: the routed layer's output, ``(batch, n, dim)``, or its rows ``(batch·n, dim)``; nobody else holds it.
        x: what the router scored, ``(batch, n, dim)``.
        router: nothing happens unless it is a `Router` in training mode with ``explore`` above 0.
        k: how many tokens are chosen.
        mask: ``(batch, n)`` bool, True at real tokens; others teach nothing.
    """
    n = x.shape[1]
    if not (isinstance(router, Router) and router.explores(k, n) and y.requires_grad):
        return y
    # a view made by a Function may not be written to later: y itself comes back where autograd alone looks on
    same = plain(y, x) and not y._is_view()
    # x is only looked at: an edge to it would bring autograd a None
    rest = x.detach(), router.weight, mask, n // k, router.explore, router.score == "cosine", same
    return (_explore if same else _Explore.apply)(y, *rest)


class _Explore(torch.autograd.Function):
    """Identity on y; its backward adds to the gradient of the routing vectors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        mask: Tensor | None,
        stride: int,
        explore_weight: float,
        cosine: bool,
        same: bool,
    ) -> Tensor:
        return y if same else y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        y, x, weight, mask, ctx.stride, ctx.explore_weight, ctx.cosine, same = inputs
        if same:
            ctx.mark_dirty(y)
        ctx.save_for_backward(x, weight, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mask = ctx.saved_tensors
        weight, grad_rows = weight.detach(), grad.detach().view(x.shape)
        dim = x.shape[-1]
        dtype = torch.promote_types(x.dtype, torch.float32)
        sample = x[:, :: ctx.stride].to(dtype)
        gain = torch.linalg.vector_norm(grad_rows[:, :: ctx.stride], dim=-1, dtype=dtype)
        if mask is None:
            gain = gain - gain.mean(-1, keepdim=True)
        else:
            real = mask[:, :: ctx.stride]
            # whatever lies in a padded token, even NaN, stays out
            gain = gain.masked_fill(~real, 0)
            mean = gain.sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
            gain = (gain - mean) * real
            sample = sample.masked_fill(~real[..., None], 0)
        square = torch.linalg.vector_norm(sample, dim=-1).square()
        explore_grad = gain * torch.rsqrt(square + dim * NORM_EPS) * (-ctx.explore_weight * ctx.stride * math.sqrt(dim))
        # a backward inside autocast would round here; there is none for meta tensors
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
            toward = (explore_grad.reshape(1, -1) @ sample.reshape(-1, dim)).expand(weight.shape)
        if ctx.cosine:
            # only the direction counts: the score divides by the vector's length
            unit = F.normalize(weight.to(dtype), dim=-1)
            length = torch.linalg.vector_norm(weight, dim=-1, keepdim=True, dtype=dtype)
            toward = (toward - (toward * unit).sum(-1, keepdim=True) * unit) / length
        return grad, None, toward.to(weight.dtype), None, None, None, None, None


# what Function.apply does beyond this concerns torch.func, and takes as long as the rest
_explore: Callable[..., Tensor] = super(torch.autograd.Function, _Explore).apply

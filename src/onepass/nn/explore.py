"""`explore`: a gradient for the router from tokens that were not chosen, so that it can find better ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.core.eager import fast_apply, plain
from onepass.fused.branch import explore_gradient

from .router import NORM_EPS


def explore(y: Tensor, x: Tensor, router: Any, k: int | float, mask: Tensor | None = None) -> Tensor:
    r"""Return y; in backward, push up the scores of sampled tokens where the gradient of y is large.

    A gate's gradient, ⟨∂L/∂y_i, heavy(x_i)⟩, exists for chosen tokens alone, and means little until the heavy branch
    has learned from such tokens: a router that starts with the wrong ones keeps them. ∂L/∂y_i is known for every token;
    if the heavy branch returned a unit step downhill, the gate's gradient would be −‖∂L/∂y_i‖. Every (n/k)-th token's
    score gets this gradient, minus its mean, with a small weight:

    .. math:: \frac{\partial L}{\partial s_i} \mathrel{+}= -\,\lambda\,\frac nk\,
              \Big(\Big\|\frac{\partial L}{\partial y_i}\Big\| - \mathrm{mean}_j\Big\|\frac{\partial L}{\partial y_j}
              \Big\|\Big), \qquad \lambda = \text{router.explore}

    It reaches the routing vectors alone, not x, and vanishes with ∂L/∂y. The tokens lie at equal distances: nothing is
    random, and about as many are read as are chosen.

    Args:
        y: the routed layer's output, ``(batch, n, dim)``, or its rows ``(batch·n, dim)``. The caller gives it up: y
            itself may come back, marked as changed in place.
        x: the tokens that the router scored, ``(batch, n, dim)``.
        router: y comes back as it is unless this is a `Router` in training mode with ``explore`` above 0.
        k: how many tokens are chosen, or the share of them.
        mask: ``(batch, n)`` bool, True at real tokens; others give no gradient.
    """
    learns = y.requires_grad or torch._C._are_functorch_transforms_active()
    stride = router.explore_stride(k, x.shape[1]) if learns and hasattr(router, "explore_stride") else 0
    if not stride:
        return y
    # plain eager returns y itself: autograd forbids later in-place writes to a view that a Function returned
    in_place = plain(y, x) and not y._is_view()
    # x gets no gradient here, so it needs no edge in the graph
    arguments = x.detach(), router.weight, mask, stride, router.explore, in_place
    return (_explore if in_place else _Explore.apply)(y, *arguments)


class _Explore(torch.autograd.Function):
    """Identity on y; its backward adds to the gradient of the routing vectors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        y: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None, stride: int, explore_weight: float, in_place: bool
    ) -> Tensor:
        return y if in_place else y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        y, x, weight, mask, ctx.stride, ctx.explore_weight, in_place = inputs
        if in_place:
            ctx.mark_dirty(y)
        ctx.save_for_backward(x, weight, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mask = ctx.saved_tensors
        dim = x.shape[-1]
        sample = x[:, :: ctx.stride].to(torch.promote_types(x.dtype, torch.float32))
        if mask is not None:
            sample = sample.masked_fill(~mask[:, :: ctx.stride, None], 0)
        square = torch.linalg.vector_norm(sample, dim=-1).square()
        scale = -ctx.explore_weight * ctx.stride * math.sqrt(dim)
        explore_grad = explore_gradient(grad.detach().view(x.shape), mask, ctx.stride, scale)
        explore_grad = explore_grad * torch.rsqrt(square + dim * NORM_EPS)
        # no matrix product: a backward under autocast would round it, and a reshape would tie a graph to one length
        weight_grad = (explore_grad[..., None] * sample).sum((0, 1)).expand(weight.shape)
        return grad, None, weight_grad.to(weight.dtype), None, None, None, None


_explore: Callable[..., Tensor] = fast_apply(_Explore)

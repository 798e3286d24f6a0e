"""What routed layers do to tokens before their products, and to gradients after them: norms, scores and choices.

A plan has the `dtype` of the branches, `eps` of the norms and `score_eps`, `residual`, `explore_stride`, and `choices`:
how each router chooses, and the tokens of the windows that it chooses from (0: the whole sequence).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.launch import replayed
from onepass.ops.routing.op import add_rows

from . import branch
from .choice import choose_within, choose_within_backward
from .norms import way


class Chosen(NamedTuple):
    """What `backward` needs of each choice."""

    d_rows: Tensor | None  # gradient of the normed rows
    d_gates: Tensor | None
    norm: Tensor | None
    learns: bool  # whether the norm's weight has a gradient
    stats: Tensor  # of the norm
    gates: Tensor  # these four as `choose_within` returns them
    indices: Tensor
    state: Tensor | None
    where: Tensor | None


def _lists(fields: Sequence[Any]) -> list[Chosen]:
    size = len(Chosen._fields)
    return [Chosen(*fields[i : i + size]) for i in range(0, len(fields), size)]


def gates_gradient(needs: Sequence[bool], inner: Tensor | None, outer: Tensor | None) -> Tensor | None:
    """Return the gates' gradient where it is needed: `inner`, through the layer's y, plus `outer`, of its gates."""
    if not (needs[0] or needs[1]):
        return None
    return outer if inner is None else inner if outer is None else inner + outer


@replayed
def before_products(
    x: Tensor, vectors: Tensor, light_norm: Tensor | None, mask: Tensor | None, plan: Any, *rest: Tensor | None
) -> tuple[Any, ...]:
    """Norm and score all tokens, choose, norm the chosen tokens, copy the weights.

    `rest` are the norms of chosen tokens, one for each choice, then the weights. Return memory for y (None
    with a residual), the normed tokens as rows, the scores (batch, n) or (routers, batch, n), and statistics. Then for
    each choice what `choose_within` returns, then for each its normed rows and their statistics. Last come copies of
    the weights in the branches' dtype, or none if all have it.
    """
    batch, n, d = x.shape
    n_choices = len(plan.choices)
    vectors = vectors.view(-1) if n_choices == 1 else vectors
    normed, scores, stats = way(x, light_norm, vectors).forward(
        x, None, mask, light_norm, vectors, plan.eps, plan.score_eps, plan.dtype
    )
    # y has the shape of x from the start: autograd forbids in-place writes to a view that a Function returned
    y = None if plan.residual else torch.empty(x.shape, dtype=plan.dtype, device=x.device)
    choices: list[Any] = []
    for (choice, window), router_scores in zip(plan.choices, scores.view(n_choices, batch, n), strict=True):
        # keys of windows are chosen for queries, which the first router chose: choices[1] are their indices
        choices += choose_within(router_scores, mask, choice, window, choices[1] if window else None)
    chosen: list[Any] = []
    for norm, at in zip(rest[:n_choices], choices[1::5], strict=True):
        rows, _, row_stats = way(x, norm, None).forward(x, at, None, norm, None, plan.eps, 0.0, plan.dtype)
        chosen += rows.view(-1, d), row_stats
    weights = rest[n_choices:]
    mixed = any(w is not None and w.dtype != plan.dtype for w in weights)
    return y, normed.view(-1, d), scores, stats, *choices, *chosen, *(branch.cast(weights, plan.dtype) if mixed else ())


@replayed
def _backward(
    x: Tensor, vectors: Tensor, light_norm: Tensor | None, mask: Tensor | None, scores: Tensor, stats: Tensor,
    plan: Any, d_normed: Tensor | None, d_scores: Tensor | None, explore_grad: Tensor | None, residual: Tensor | None,
    need_x: bool, need_sums: bool, *fields: Any,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx through all norms, choices and scores, and the sums of gradients of norms and vectors.

    With `need_sums` these begin with the light norm and, if the scores have a gradient, the vectors; then come the
    norms of chosen tokens that learn.
    """
    (batch, n, d), lists = x.shape, _lists(fields)
    tokens = batch * n
    if any(c.d_gates is not None for c in lists):
        ds = torch.empty_like(scores)
        router_views = (t.view(len(lists), batch, n) for t in (scores, ds))
        for (choice, window), c, *views in zip(plan.choices, lists, *router_views, strict=True):
            choose_within_backward(c.d_gates, mask, choice, window, *c[5:], *views)
        d_scores = ds if d_scores is None else ds + d_scores
    vectors = None if d_scores is None else vectors  # type: ignore[assignment]
    norm = way(x, light_norm, vectors)
    offset = (d + (0 if vectors is None else vectors.numel())) if need_sums else 0
    partials, width = None, offset + d * sum(c.learns for c in lists)
    if width:
        dtype = torch.promote_types(x.dtype, torch.float32)
        partials = torch.empty((norm.programs(x, tokens), width), dtype=dtype, device=x.device)
    updates = []
    for c in lists:
        if c.d_rows is not None:
            into = partials[:, offset:] if c.learns and partials is not None else None
            (update,) = way(x, c.norm, None).backward(
                c.d_rows.view(*c.indices.shape, d), x, c.indices, None, c.norm, None, c.stats, None, None, None, 1,
                need_x, into, None,
            )  # fmt: skip
            updates.append((update, c.indices))
            offset += d if c.learns else 0
    dx = None
    if need_x or need_sums:
        (dx,) = norm.backward(
            torch.zeros_like(x) if d_normed is None else d_normed.view(x.shape), x, None, mask, light_norm, vectors,
            stats, None if vectors is None else scores, None if d_scores is None else d_scores.contiguous(),
            explore_grad, max(1, plan.explore_stride), need_x, partials if need_sums else None, residual,
        )  # fmt: skip
    if dx is not None:
        # in place, because the node alone holds dx; one choice after another, because a token may be in both
        for update, indices in updates:
            if update is not None:
                add_rows(dx.view(tokens, d), update, None, indices)
    return dx, None if partials is None else branch.steps(partials).total(partials)


def backward(
    plan: Any, needs: Sequence[bool], x: Tensor, vectors: Tensor, light_norm: Tensor | None, mask: Tensor | None,
    scores: Tensor, stats: Tensor, d_normed: Tensor | None, g_scores: Tensor | None, explore_grad: Tensor | None,
    residual: Tensor | None, *fields: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, of the vectors, (1, d) each, and of the norms: through norms, choices and scores.

    `needs` are of x, of all vectors and of the light norm; the fields of each choice, `Chosen`, follow.
    """
    (need_x, need_vectors, need_light), (n, d) = needs, vectors.shape
    dx, sums = _backward(
        x, vectors, light_norm, mask, scores, stats, plan, d_normed, g_scores if need_x or need_vectors else None,
        explore_grad, None if residual is None else residual.contiguous(), need_x, need_vectors or need_light, *fields,
    )  # fmt: skip
    lists = _lists(fields)
    if sums is None:
        return dx, *(None,) * (n + 1 + len(lists))
    totals = list(sums.split_with_sizes((d,) * (sums.shape[0] // d)))
    d_norms = [branch.to(totals.pop(), c.norm.dtype) if c.learns and c.norm is not None else None for c in lists[::-1]]
    d_norms.append(branch.to(totals[0], light_norm.dtype) if need_light and light_norm is not None else None)
    if need_vectors and len(totals) > 1:
        return dx, *[branch.to(t.view(1, d), vectors.dtype) for t in totals[1:]], *d_norms[::-1]
    return dx, *(None,) * n, *d_norms[::-1]

"""`topk`: hard selection of the k largest scores, with gates that carry the gradient of soft_topk."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from onepass.core import check
from onepass.core.eager import plain
from onepass.core.launch import as_rows, import_later, uses_triton
from onepass.core.operator import operator
from onepass.core.sharding import REPLICATE, Way, beside, row_dims
from onepass.ops._shared import arguments
from onepass.ops.soft_topk.op import KINDS, backward_chosen
from onepass.ops.soft_topk.op import forward as soft_forward

from . import definition

_kernels = import_later(".kernels_select", __package__)


def forward(
    scores: Tensor, eps: Tensor | None, mask: Tensor | None, start: Tensor | None, lengths: Tensor | None, k: int,
    eps_value: float, kind: int, hard: bool, largest: bool, is_sorted: bool, index_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return (values, gates, indices, solution of soft_topk); k ≥ 1, n ≥ 1.

    Hard gates are 1 and need no solution: backward solves, if it is ever called.
    """
    if k > scores.shape[-1]:
        # select all, then pad
        whole, padding = (scores, eps, mask, start, lengths, scores.shape[-1]), (0, k - scores.shape[-1])
        *results, state = forward(*whole, eps_value, kind, hard, largest, is_sorted, index_dtype)
        fills = zip(results, (-math.inf if largest else math.inf, 0.0, -1), strict=True)
        return *(functional.pad(t, padding, value=value) for t, value in fills), state  # type: ignore[return-value]
    soft = state = None
    if not hard:
        valid = definition.allowed(scores, mask, start, lengths)
        soft, state = soft_forward(scores if largest else -scores, None, eps, valid, float(k), eps_value, kind)
    if uses_triton(scores):
        starts, counts = arguments.per_row(start, scores), arguments.per_row(lengths, scores)
        rows = _kernels().Rows(as_rows(scores), arguments.mask_rows(mask, scores), starts, counts, largest)
        soft = None if soft is None else soft.view(-1, scores.shape[-1])
        return *_kernels().select(rows, k, is_sorted, soft, index_dtype, tuple(scores.shape[:-1])), state
    values, indices = definition.select(scores, mask, start, lengths, k, largest, is_sorted, index_dtype)
    if soft is None:
        return values, definition.hard_gates(values, indices), indices, None
    chosen_gates = soft.gather(-1, indices.clamp(min=0).long())
    return values, torch.where(indices >= 0, chosen_gates, 0.0), indices, state


def backward(
    scores: Tensor, g_values: Tensor | None, g_gates: Tensor | None, indices: Tensor, state: Tensor | None,
    eps: Tensor | None, mask: Tensor | None, start: Tensor | None, lengths: Tensor | None, eps_value: float, kind: int,
    largest: bool, need_scores: bool, need_eps: bool, into: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of scores and eps, None where not needed; a missing upstream gradient is None.

    Without a state soft_topk is solved here. `into`, contiguous and like scores, takes the gradient of the scores.
    (Scores come first: torch 2.11 reads the mesh of DTensors from the first argument.)
    """
    if not largest:
        # the gradients of the largest of -scores
        ds, deps = backward(
            -scores, None if g_values is None else -g_values, g_gates, indices, state, eps, mask, start, lengths,
            eps_value, kind, True, need_scores, need_eps,
        )  # fmt: skip
        if ds is not None:
            ds = ds.neg_() if into is None else torch.neg(ds, out=into)
        return ds, deps
    need_eps = need_eps and eps is not None
    ds = d_eps = None
    if g_gates is not None:
        mask = definition.allowed(scores, mask, start, lengths)
        if state is None:
            _, state = soft_forward(scores, None, eps, mask, float(indices.shape[-1]), eps_value, kind)
        ds, d_eps = backward_chosen(
            g_gates, indices, scores, state, eps, mask, eps_value, kind, need_scores, need_eps, into
        )
    elif need_eps:
        d_eps = torch.zeros_like(eps)  # type: ignore[arg-type]
    if need_scores and g_values is not None:
        if ds is None:
            ds = scores.new_zeros(scores.shape) if into is None else into.zero_()
        if uses_triton(ds):
            rows = (-1, indices.shape[-1])
            _kernels().add(ds.view(-1, ds.shape[-1]), indices.contiguous().view(rows), g_values.reshape(rows))
        else:
            g_present = torch.where(indices >= 0, g_values, 0.0).to(ds.dtype)
            ds.scatter_add_(-1, indices.clamp(min=0).long(), g_present)
    return ds, d_eps


def forward_ways(scores: Any, eps: Any, mask: Any, start: Any, lengths: Any, *options: Any) -> list[Way]:
    """List the ways to shard scores, eps, mask, start and lengths, with values, gates, indices and solution."""
    n, hard = scores.ndim, options[3]  # after k, eps_value and kind
    return [
        (
            (d, d, d, REPLICATE if hard else d),
            (d, *(beside(t, m, d) for t, m in ((eps, n - 1), (mask, n), (start, n - 1), (lengths, n - 1)))),
        )
        for d in row_dims(scores)
    ]


class TopK(NamedTuple):
    """The result of :func:`topk`; every tensor is ``(..., k)``."""

    values: Tensor
    indices: Tensor
    gates: Tensor

    @property
    def counts(self) -> Tensor:
        """How many entries of each row exist, int64 ``(...)``: k, or fewer where the rest is padding.

        Of `topk` with another ``dim`` than the last, write ``(top.indices >= 0).sum(dim)``.
        """
        return (self.indices >= 0).sum(-1)


def gates(soft: Tensor, indices: Tensor) -> Tensor:
    """Return 1 with the gradient of the soft gate at each index, and 0 where the index is -1."""
    chosen = soft.gather(-1, indices.clamp(min=0))
    return torch.where(indices >= 0, 1 + (chosen - chosen.detach()), 0.0)


def _fake(scores: Tensor, eps: Any, mask: Any, start: Any, lengths: Any, k: int, *options: Any) -> tuple[Any, ...]:
    _, _, hard, *_, index_dtype = options
    values = scores.new_empty((*scores.shape[:-1], k))
    state = None if hard else scores.new_empty((*scores.shape[:-1], 2), dtype=arguments.accumulator(scores))
    return values, torch.empty_like(values), values.new_empty(values.shape, dtype=index_dtype), state


_call, forward_op, backward_op = operator(
    "topk", forward, backward, ("values", "gates", "indices", "state"), fake=_fake, ways=forward_ways, n_public=3,
    replay=True,
)  # fmt: skip


def choose(
    scores: Tensor, k: int, eps: Tensor | float, mask: Tensor | None, kind: str, hard: bool,
    start: Tensor | None = None, lengths: Tensor | None = None, largest: bool = True, is_sorted: bool = True,
    index_dtype: torch.dtype = torch.int64,
) -> TopK:  # fmt: skip
    """`topk` for checked arguments, k ≥ 1, n ≥ 1; without `hard` the gates are those of soft_topk."""
    eps_tensor, eps_value = arguments.split(eps)
    options = KINDS.index(kind), hard, largest, is_sorted, index_dtype
    values, gates, indices = _call(scores, eps_tensor, mask, start, lengths, k, eps_value, *options)
    return TopK(values, indices, gates)


def _last_of_equals(
    scores: Tensor, k: int, mask: Tensor | None, start: Tensor | None, lengths: Tensor | None, is_sorted: bool,
    **options: Any,
) -> TopK:  # fmt: skip
    """`topk` with ties to the highest index: that of a copy with the columns in reverse."""
    n = scores.shape[-1]
    if start is not None or lengths is not None:
        begin, lengths = definition.clamped(n, start, lengths)
        start = n - begin - lengths
    if hasattr(scores, "placements"):
        # torch 2.11 has no flip of DTensors, and takes cumsum(-1) of a shard's own columns
        columns = n - torch.ones_like(scores, dtype=torch.int64).cumsum(scores.dim() - 1)
        scores, mask = scores.gather(-1, columns), None if mask is None else mask.expand_as(scores).gather(-1, columns)
    else:
        scores, mask = scores.flip(-1), None if mask is None else mask.flip(-1)
    top = topk(scores, k, mask=mask, start=start, lengths=lengths, sorted=is_sorted, **options)
    indices = torch.where(top.indices < 0, -1, n - 1 - top.indices)
    if is_sorted:
        return top._replace(indices=indices)
    # reverse the entries that exist; padding stays last
    order = (top.counts[..., None] - torch.ones_like(indices, dtype=torch.int64).cumsum(-1)) % indices.shape[-1]
    return TopK(*(t.gather(-1, order) for t in (top.values, indices, top.gates)))


def topk(
    scores: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    lengths: Tensor | None = None,
    start: Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
    ties: str = "first",
    out: None = None,
    pad: bool = False,
    eps: Tensor | float = 0.3,
    mask: Tensor | None = None,
    kind: str = "capped_exp",
) -> TopK:
    r"""Return the k largest scores of each row with straight-through gates: 1 forward, soft_topk's gradient backward.

    Scores decide the selection, because soft gates tie at exactly 1. Multiply the output of the chosen tokens by the
    gates to train the scores:

    .. math:: g_j = 1 \quad\text{forward}, \qquad \mathrm{d}g_j = \mathrm{d}\,\text{soft\_topk}(s, k)_{i_j}
              \quad\text{backward.}

    The selection is exact and has the same bits in every run, however rows are batched: ties go to the lowest index
    (``ties="last"``: to the highest). The host never waits for the device, so calls can be captured in a CUDA graph.

    Args:
        scores: ``(..., n)``, fp32, fp16, bf16 or fp64, any strides. A 0-d tensor is a row of one, with 0-d results.
        k: how many to choose, an int ≥ 0; more than n only with ``lengths``, ``start``, ``mask`` or ``pad``.
        dim: the dimension of rows. Where it is not the last, ``scores.shape[:-1]`` below is the shape without it.
        largest: False chooses the smallest, as for ``-scores``; values are the scores themselves, padding is +inf. NaN
            still comes first, unlike in `torch.topk`.
        sorted: best first; False gives ascending indices, on a GPU faster for k from 100 to 4096, else slower.
        lengths: int32 or int64, broadcasts to ``scores.shape[:-1]``: how many scores of each row count, from `start`
            on. On a CPU a range that reaches past its row is refused; on a GPU, in compiled programs and under vmap it
            is clamped to the row, because the host doesn't see its values.
        start: like ``lengths``: the first score of each row that counts. Indices stay positions in the row.
        index_dtype: of the indices, ``torch.int64`` or ``torch.int32``.
        ties: among equal scores ``"first"`` takes the lower index first, ``"last"`` the higher, from a copy of scores.
        out: not taken: copy the results.
        pad: True allows k > n; what a row lacks is padding, as with ``lengths`` and ``mask``.
        eps: temperature of the gates' gradient, see :func:`onepass.soft_topk`.
        mask: bool, broadcasts to ``scores``; masked entries are never selected.
        kind: gate function of the gradient, see :func:`onepass.soft_topk`.

    Returns:
        ``TopK(values, indices, gates)``, each ``(..., k)``: the selected scores in descending order (NaN before +inf,
        whatever its sign; -0 equals +0), their indices, the gates. -inf is never selected. A row with fewer than k
        valid entries is padded with value -inf, index -1, gate 0; ``counts`` tells how many entries of each row exist.
        Values have the gradient of a gather. Where a row selects a NaN, all its gates but the padding are NaN.

    Raises:
        TypeError: scores is not a floating-point tensor, k is not an int, mask is not bool, lengths or start is not
            an int tensor, index_dtype is not int32 or int64, or out is given.
        ValueError: k < 0, k > n without ``lengths``, ``start``, ``mask`` or ``pad``, k ≠ 1 of a 0-d tensor, shapes
            don't broadcast, devices differ, eps is not > 0, kind or ties is unknown, or lengths or start reaches past
            a row (on a CPU).
        NotImplementedError: for second derivatives and forward-mode derivatives.

    Source: CoLT5 (arXiv 2303.09752).

    Example:
        >>> import torch, onepass
        >>> top = onepass.topk(torch.tensor([3.0, 1.0, 2.0, -1.0]), 2)
        >>> top.values.tolist(), top.indices.tolist(), top.gates.tolist()
        ([3.0, 2.0], [0, 2], [1.0, 1.0])
        >>> onepass.topk(torch.tensor([1.0, 2.0, 3.0, 9.0]), 2, sorted=False, lengths=torch.tensor(3)).indices.tolist()
        [1, 2]
    """
    if out is not None:
        raise TypeError("topk: there is no out=; write values.copy_(top.values), indices.copy_(top.indices)")
    check.floating("topk", "scores", scores)
    n_dims = scores.dim()
    if (dim != -1 and dim != n_dims - 1) or not n_dims:
        rows, mask, back = arguments.along("topk", dim, scores, mask)
        if not n_dims and k != 1:
            raise ValueError(f"topk: k must be 1 of a 0-d tensor, got {k!r}")
        return TopK(*map(back, topk(
            rows, k, -1, largest, sorted, lengths=lengths, start=start, index_dtype=index_dtype, ties=ties, pad=pad,
            eps=eps, mask=mask, kind=kind,
        )))  # fmt: skip
    arguments.positive("topk", "eps", eps, scores)
    if kind not in KINDS:
        raise ValueError(f"topk: kind must be one of {', '.join(KINDS)}; got {kind!r}")
    arguments.whole("topk", "k", k, 0)
    n = scores.shape[-1]
    if k > n and pad is False and mask is None and start is None and lengths is None:
        raise ValueError(
            f"topk: k must be at most the row's length {n}, got {k}; pad=True fills up with index -1, which as an "
            "index is the last element"
        )
    arguments.mask("topk", mask, scores)
    for name, option in (("largest", largest), ("sorted", sorted), ("pad", pad)):
        if not isinstance(option, bool):
            raise TypeError(f"topk: {name} must be a bool, got {type(option).__name__}")
    if index_dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk: index_dtype must be torch.int32 or torch.int64, got {index_dtype}")
    if ties not in ("first", "last"):
        raise ValueError(f"topk: ties must be 'first' or 'last', got {ties!r}")
    definition.check_ranges("topk", scores, start, lengths)
    if ties == "last":
        leading = scores, k, mask, start, lengths, sorted
        return _last_of_equals(*leading, largest=largest, index_dtype=index_dtype, pad=pad, eps=eps, kind=kind)
    if k == 0 or n == 0:
        # no operator: this reads no score
        values, indices = definition.select(scores.detach(), mask, start, lengths, k, largest, sorted, index_dtype)
        # nothing is chosen, so the gradient is 0: backward() runs, as it does for torch.topk
        zero = scores[..., :0].sum(-1, keepdim=True)
        return TopK(values + zero, indices, torch.zeros_like(values) + zero)
    return choose(scores, k, eps, mask, kind, True, start, lengths, largest, sorted, index_dtype)


def kth_value(scores: Tensor, k: int, *, lengths: Tensor | None = None, start: Tensor | None = None) -> Tensor:
    r"""Return the k-th largest score of each row: the threshold that k scores reach.

    .. math:: v = \max\{t : |\{i : s_i \ge t\}| \ge k\}

    On a flattened batch this is the threshold of BatchTopK autoencoders: ``kth_value(latents.flatten(), k * rows)``.

    Args:
        scores: ``(..., n)``, fp32, fp16, bf16 or fp64, any strides.
        k: 1 to n.
        lengths: as for :func:`onepass.topk`: how many scores of each row count.
        start: as for :func:`onepass.topk`: the first score of each row that counts.

    Returns:
        ``(...)`` in the dtype of ``scores``; -inf where a row has fewer than k scores above -inf. NaN counts as the
        largest. The gradient goes to the one score that :func:`onepass.topk` chooses last.

    Raises:
        TypeError: scores is not a floating-point tensor, k is not an int, lengths or start is not an int tensor.
        ValueError: k < 1 or k > n, shapes don't broadcast, devices differ, or a range reaches past a row (on a CPU).

    Source: BatchTopK (arXiv 2412.06410).

    Example:
        >>> import torch, onepass
        >>> onepass.kth_value(torch.tensor([3.0, 1.0, 2.0, -1.0]), 2).item()
        2.0
    """
    arguments.rows("kth_value", "scores", scores)
    arguments.whole("kth_value", "k", k, 1)
    if k > scores.shape[-1]:
        raise ValueError(f"kth_value: k must be at most the row's length {scores.shape[-1]}, got {k}")
    definition.check_ranges("kth_value", scores, start, lengths)
    differentiated = scores.requires_grad and torch.is_grad_enabled()
    if plain(scores, start, lengths) and not differentiated and not uses_triton(scores):
        # the value alone: the order of equal scores does not matter
        rows = definition.masked(scores, None, start, lengths, -math.inf).reshape(-1, scores.shape[-1])
        candidates, _ = definition.candidates(rows, k, True)
        return candidates.topk(k).values[..., -1].view(scores.shape[:-1])
    return topk(scores, k, lengths=lengths, start=start).values[..., -1]

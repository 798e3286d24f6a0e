"""`experts` and `expert_order`: checks, registration, autograd, the public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.bind import bind
from onepass.core.eager import plain
from onepass.core.launch import uses_triton
from onepass.core.register import register, register_backward, register_fake
from onepass.core.sharding import PARTIAL, REPLICATE, Way, gradient

from . import definition

ACTIVATIONS = ("gelu", "swiglu")


def _on_triton(x: Tensor, choices: Tensor) -> bool:
    return uses_triton(x) and choices.numel() > 0 and x.shape[1] > 0


def _hidden(x: Tensor, choices: Tensor, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return empty hidden units and, for a gate, their linear part; the definition keeps none, of all rows (shards)."""
    h = x.new_empty(choices.numel(), up.shape[2] if uses_triton(x) else 0)
    return h, x.new_empty(0) if gate is None else torch.empty_like(h)


def _check_indices(name: str, indices: Tensor, n_experts: int) -> None:
    check.tensor(name, "indices", indices)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: indices must be int32 or int64, got {indices.dtype}; pass indices.long()")
    seen = plain(indices)  # a symbolic size would be bound, and the host would wait for values on a GPU
    if indices.dim() != 2 or (seen and indices.numel() >= 2**31):
        raise ValueError(
            f"{name}: indices must be (tokens, k) of fewer than 2^31 choices, got {tuple(indices.shape)}; "
            "pass indices.flatten(0, -2)"
        )
    if seen and indices.device.type == "cpu" and indices.numel():
        low, high = (int(v) for v in indices.aminmax())
        if low < -1 or high >= n_experts:
            found = low if low < -1 else high
            raise ValueError(f"{name}: indices must be −1 (no expert) or 0 … {n_experts - 1}, got {found}")


def _check(
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"experts: activation must be 'gelu' or 'swiglu', got {activation!r}")
    if (gate is None) != (activation == "gelu"):
        given = "no gate; pass gate=, shaped like up" if gate is None else "a gate; activation='swiglu' takes it"
        raise ValueError(f"experts: activation {activation!r} got {given}")
    matrices = {"up": up, "down": down} | ({} if gate is None else {"gate": gate})
    for label, value in {"x": x, "weights": weights, **matrices}.items():
        check.floating("experts", label, value)
        check.same_device("experts", label, value, "x", x)
    if x.dim() != 2:
        raise ValueError(f"experts: x must be (tokens, dim), got {tuple(x.shape)}; pass x.flatten(0, -2)")
    if up.dim() != 3 or up.shape[1] != x.shape[1] or not up.shape[0]:
        raise ValueError(f"experts: up must be (experts, dim = {x.shape[1]}, hidden), got {tuple(up.shape)}")
    n_experts, dim, hidden = up.shape
    for label, value in matrices.items():
        wanted = (n_experts, hidden, dim) if label == "down" else up.shape
        if value.dtype != x.dtype:
            raise TypeError(f"experts: x is {x.dtype} and {label} is {value.dtype}; pass {label}.to(x.dtype)")
        if value.shape != wanted:
            raise ValueError(f"experts: {label} must be {tuple(wanted)} beside this up, got {tuple(value.shape)}")
    if x.is_cuda and x.element_size() == 2 and (dim % 8 or hidden % 8):
        raise ValueError(
            f"experts: dim and hidden must be multiples of 8 in {x.dtype} on a GPU, got {dim} and {hidden}; "
            "append zeros to x and the weights, or pass float32"
        )
    _check_indices("experts", indices, n_experts)
    check.same_device("experts", "indices", indices, "x", x)
    if indices.shape != weights.shape or indices.shape[0] != x.shape[0]:
        shapes = f"{tuple(indices.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"experts: indices and weights must be (tokens = {x.shape[0]}, k), got {shapes}")


def _forward(
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, what the activation takes (N, hidden), its linear part (empty without a gate), places, rows, ends."""
    if not _on_triton(x, indices):
        y = definition.experts(x, indices, weights, up, down, activation=activation, gate=gate)
        return y, *_hidden(x, indices, up, gate), *definition.expert_order(indices, up.shape[0])
    from .kernels_products import product
    from .kernels_rows import activate, gather_sum, order, spread

    places, rows, ends = order(indices.contiguous(), up.shape[0])
    xs = spread(x, places)
    h = product(xs, up if gate is None else gate, ends)
    linear = None if gate is None else product(xs, up, ends)
    del xs
    a = activate(h, linear, weights.contiguous(), rows, ends)
    y = gather_sum(product(a, down, ends), None, places, ends)
    return y, h, x.new_empty(0) if linear is None else linear, places, rows, ends


def _without_gradients(
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str
) -> Tensor:
    """Return y alone; of few tokens under no_grad, as in decoding, by kernels that read the chosen experts alone."""
    matrices = [up, down] if gate is None else [up, down, gate]
    if not torch.is_grad_enabled() and uses_triton(x) and x.numel() and all(m.stride(2) == 1 for m in matrices):
        from . import kernels_few

        if kernels_few.takes(indices.numel(), up, gate):
            return kernels_few.few(x.contiguous(), indices.contiguous(), weights.contiguous(), up, down, gate)  # type: ignore[no-any-return]
    return _forward(x, indices, weights, up, down, gate, activation)[0]


def _backward(
    dy: Tensor, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None,
    hidden: list[Tensor] | tuple[Tensor, Tensor], places: Tensor, rows: Tensor, ends: Tensor, needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, weights, up, down and gate that `needs` names.

    `hidden` holds what the activation took, and its linear part. Nobody else needs those in a list: gradients take
    their memory. Each large tensor goes after its last use, so that fewer of them exist at once.
    """
    if not _on_triton(x, places):
        # a place beyond all ends is of no expert
        indices = torch.searchsorted(ends, places, right=True)
        found = definition.backward(dy, x, indices, weights, up, down, gate)
        return tuple(g if need else None for g, need in zip(found, needs, strict=True))
    from .kernels_products import product, weight_product
    from .kernels_rows import activate_backward, gather_sum, spread

    need_x, need_w, need_up, need_down, need_gate = needs
    dys = spread(dy.contiguous(), places)
    # the gradient of the hidden units, which becomes that of h in place
    dh = product(dys, down.mT, ends)
    h, linear = hidden[0], None if gate is None else hidden[1]
    spare = isinstance(hidden, list)
    if isinstance(hidden, list):
        hidden.clear()
    a, d_linear, d_weights = activate_backward(dh, h, linear, weights.contiguous(), rows, ends, spare)
    if spare:
        a, d_linear = h, linear
    del h, linear
    d_down = weight_product(a, dys, ends) if need_down else None
    del a, dys
    d_u = dh if d_linear is None else d_linear
    d_up = d_gate = dx = None
    if need_x:
        # two tensors of the rows' size at once for a gate, so before the gradients of up and gate are there
        dx = gather_sum(product(d_u, up.mT, ends), None if gate is None else product(dh, gate.mT, ends), places, ends)
    if need_up or need_gate:
        xs = spread(x, places)
        d_up = weight_product(xs, d_u, ends) if need_up else None
        d_gate = weight_product(xs, dh, ends) if need_gate else None
    return dx, d_weights if need_w else None, d_up, d_down, d_gate


def _backward_of_op(
    dy: Tensor, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, h: Tensor, linear: Tensor,
    places: Tensor, rows: Tensor, ends: Tensor, need_x: bool, need_w: bool, need_up: bool, need_down: bool,
    need_gate: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    needs = need_x, need_w, need_up, need_down, need_gate
    return _backward(dy, x, weights, up, down, gate, (h, linear), places, rows, ends, needs)


def _ways(x: Any, *rest: Any) -> list[Way]:
    """Tokens may be sharded; ends are then parts of a sum, and places and rows are those of the device."""
    return [((0, 0, 0, 0, 0, PARTIAL), (0, 0, 0, REPLICATE, REPLICATE, REPLICATE if rest[4] is not None else None))]


def _ways_back(*args: Any) -> list[Way]:
    has_gate, needs = args[5] is not None, args[-5:]
    own = [gradient(0 if i < 2 else REPLICATE, need) for i, need in enumerate(needs)]
    gate = REPLICATE if has_gate else None
    return [(own, (0, 0, 0, REPLICATE, REPLICATE, gate, 0, 0 if has_gate else REPLICATE, 0, 0, PARTIAL))]


forward_op = register("experts", _forward, _ways)
backward_op = register_backward(
    "experts_backward", _backward_of_op, _ways_back, of=("x", "weights", "up", "down", "gate")
)


@register_fake(forward_op)
def _(
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str
) -> tuple[Tensor, ...]:
    _check(x, indices, weights, up, down, gate, activation)
    return x.new_empty(x.shape), *_hidden(x, indices, up, gate), *order_op(indices, up.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weights, up, down, gate, _ = inputs
    ctx.save_for_backward(x, weights, up, down, gate, *output[1:])


def _gradients(ctx: Any, run: Any, dy: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
    *saved, h, linear, places, rows, ends = ctx.saved_tensors
    hidden: Any = (h, linear)
    if plain(dy) and not torch._C._autograd._get_current_graph_task_keep_graph():
        # `hidden` becomes the only owner
        hidden = [h, linear]
        ctx.maybe_clear_saved_tensors()
    del h, linear
    needs = tuple(need for i, need in enumerate(ctx.needs_input_grad[:6]) if i != 1)
    found = run(dy, *saved, hidden, places, rows, ends, needs)
    dx, dw, d_up, d_down, d_gate = (g if need else None for g, need in zip(found, needs, strict=True))
    return dx, None, dw, d_up, d_down, d_gate, None


_call = bind(
    name="experts", forward=_forward, forward_op=forward_op, backward=_backward, backward_op=backward_op, save=_save,
    gradients=_gradients, check=_check, inference=_without_gradients,
)  # fmt: skip


def experts(
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, activation: str = "gelu",
    gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r"""Send each token through the feed-forwards that were chosen for it, and add up what they return.

    .. math:: y_t = \sum_j w_{tj}\, \mathrm{act}(x_t\, U_{e})\, D_{e}, \quad e = i_{tj}

    with act GELU (by tanh), or for ``"swiglu"`` :math:`\mathrm{silu}(x_t\,G_e) \odot (x_t\,U_e)`. Sums of a token are
    in fp32, in the order of its choices.

    Args:
        x: ``(tokens, dim)``, fp32, fp16, bf16 or fp64; autocast changes nothing here. In 16 bits on a GPU dim and
            hidden are multiples of 8, so that rows begin at whole 16 bytes.
        indices: ``(tokens, k)`` int32 or int64: the experts of a token; −1 is no expert. Others outside
            0 … experts − 1 raise on a CPU; on a GPU the nearest of −1 and the last expert is taken.
        weights: ``(tokens, k)``, floating-point: how much each choice counts.
        up: ``(experts, dim, hidden)``, any strides, dtype of x.
        down: ``(experts, hidden, dim)``, likewise.
        activation: ``"gelu"`` or ``"swiglu"``.
        gate: shaped like ``up``, for ``"swiglu"`` alone.

    Returns:
        ``(tokens, dim)``, dtype of x.

    Gradients flow to x, weights and the matrices, the same bit for bit from run to run. Backward keeps x, the hidden
    units before the activation, the weights and the order of the rows. The host never waits for a GPU.

    Raises:
        TypeError: a tensor is not floating-point, indices are not integers, or the dtypes of x and a matrix differ.
        ValueError: shapes don't fit, devices differ, or an index is out of range (CPU), or a width no multiple of 8.
        NotImplementedError: for second and forward-mode derivatives.

    Source: Shazeer et al., Outrageously large neural networks (arXiv:1701.06538).

    Example:
        >>> import torch, onepass
        >>> x, up, down = torch.ones(2, 4), torch.ones(3, 4, 8), torch.ones(3, 8, 4)
        >>> onepass.experts(x, torch.tensor([[0, 2], [1, -1]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]]), up, down).shape
        torch.Size([2, 4])
    """
    return _call(x, indices, weights, up, down, gate, activation)  # type: ignore[no-any-return]


def _order(indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if not uses_triton(indices) or not indices.numel():
        return definition.expert_order(indices, n_experts)
    from . import kernels_rows

    return kernels_rows.order(indices.contiguous(), n_experts)  # type: ignore[no-any-return]


order_op = register("expert_order", _order)


@register_fake(order_op)
def _(indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.empty(indices.shape, dtype=torch.int32, device=indices.device)
    return places, places.new_empty(indices.numel()), places.new_empty(n_experts)


def expert_order(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort choices by expert, stably, without a wait of the host.

    Args:
        indices: ``(tokens, k)`` int32 or int64, −1 … num_experts − 1; −1 (no expert) sorts behind all experts.
        num_experts: how many experts there are.

    Returns:
        ``(places, rows, ends)``, int32: the row of each choice ``(tokens, k)``, the choice (token·k + j) of each row
        ``(tokens·k,)``, and where each expert's rows end ``(num_experts,)``, as torch's grouped products take it.

    Raises:
        TypeError: indices are not int32 or int64.
        ValueError: indices are not 2-d, or out of range (on a GPU they are clamped instead).

    Example:
        >>> import torch, onepass
        >>> onepass.expert_order(torch.tensor([[1, 0], [0, 2]]), 3)[1:]
        (tensor([1, 2, 0, 3], dtype=torch.int32), tensor([2, 3, 4], dtype=torch.int32))
    """
    _check_indices("expert_order", indices, num_experts)
    return (_order if plain(indices) else order_op)(indices, num_experts)  # type: ignore[no-any-return]

"""`experts` and `expert_order`: checks, registration, autograd, the public functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import plain
from onepass.core.launch import uses_triton
from onepass.core.operator import operator
from onepass.core.register import FORMULAS, register, register_fake
from onepass.core.sharding import PARTIAL, REPLICATE, Way
from onepass.ops._shared import arguments

ACTIVATIONS = ("gelu", "swiglu")


def _way(x: Tensor, choices: Tensor, up: Tensor | None = None, *others: Tensor | None) -> Any:
    """Return the module that computes the steps of a call: own products, torch's between kernels, or all in torch."""
    if not uses_triton(x) or not choices.numel() or not x.shape[1]:
        from . import torch_path

        return torch_path
    from . import kernels_products, kernels_rows

    return kernels_products if up is not None and kernels_products.takes(x, up, *others) else kernels_rows


def _check_indices(name: str, indices: Tensor, n_experts: int) -> None:
    check.tensor(name, "indices", indices)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: indices must be int32 or int64, got {indices.dtype}; pass indices.long()")
    is_eager = plain(indices)  # else a symbolic size would be tied to a value; a GPU's values would cost a wait
    if indices.dim() != 2 or (is_eager and indices.numel() >= 2**31):
        raise ValueError(
            f"{name}: indices must be (tokens, k) of fewer than 2^31 choices, got {tuple(indices.shape)}; "
            "pass indices.flatten(0, -2)"
        )
    ends = indices.aminmax() if is_eager and indices.device.type == "cpu" and indices.numel() else ()
    if wrong := [v for v in map(int, ends) if not -1 <= v < n_experts]:
        raise ValueError(f"{name}: indices must be −1 (no expert) or 0 … {n_experts - 1}, got {wrong[0]}")


def _check(
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"experts: activation must be 'gelu' or 'swiglu', got {activation!r}")
    if (gate is None) != (activation == "gelu"):
        got = "no gate; pass gate=, shaped like up" if gate is None else "a gate; activation='swiglu' takes it"
        raise ValueError(f"experts: activation {activation!r} got {got}")
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
        expected = (n_experts, hidden, dim) if label == "down" else up.shape
        if value.dtype != x.dtype:
            raise TypeError(f"experts: x is {x.dtype} and {label} is {value.dtype}; pass {label}.to(x.dtype)")
        if value.shape != expected:
            raise ValueError(f"experts: {label} must be {tuple(expected)} beside this up, got {tuple(value.shape)}")
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
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Return y, what the activation takes (N, hidden), its linear part (None without a gate), places, rows, ends."""
    way = _way(x, indices, up, down, gate)
    places, rows, ends = way.order(indices.contiguous(), up.shape[0])
    h, linear, a = way.hidden(x, up, gate, weights.contiguous(), places, rows, ends)
    y = way.gather_sum(way.product(a, down, ends), None, places, ends)
    return y, h, linear, places, rows, ends


def _without_gradients(
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str
) -> Tensor:
    """Return y alone; few tokens without gradients, as in decoding, go to kernels that read only the chosen experts."""
    matrices = [up, down] if gate is None else [up, down, gate]
    if not torch.is_grad_enabled() and uses_triton(x) and x.numel():
        from . import kernels_few

        if kernels_few.takes(indices.numel(), *matrices):
            return kernels_few.few(x.contiguous(), indices.contiguous(), weights.contiguous(), up, down, gate)  # type: ignore[no-any-return]
    return _forward(x, indices, weights, up, down, gate, activation)[0]


def _turned(w: Tensor) -> bool:
    """Return whether each expert's matrix lies in memory column by column, as transformers and torchtitan keep it."""
    return w.ndim == 3 and w.stride(1) == 1 != w.stride(2)


def _weight_gradient(way: Any, tokens: Tensor, hidden: Tensor, order: Any, w: Tensor, is_down: bool = False) -> Tensor:
    """Return the gradient of w, laid out as w is: autograd would copy another layout."""
    grad = way.weight_product(tokens, hidden, *order, _turned(w) != is_down)
    return grad.mT if _turned(w) else grad  # type: ignore[no-any-return]


def _backward(
    dy: Tensor, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, h: Tensor,
    linear: Tensor | None, places: Tensor, rows: Tensor, ends: Tensor, need_x: bool, need_weights: bool, need_up: bool,
    need_down: bool, need_gate: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, weights, up, down and gate that are needed.

    h may be the list [h, linear], the only owner of both: their memory then holds gradients. Each large tensor is freed
    after its last use, so that fewer of them exist at once.
    """
    way = _way(x, places, up, down, gate)
    dys = way.spread(dy.contiguous(), places)
    owner: Any = h
    if spare := isinstance(owner, list):
        h, linear = owner
        owner.clear()
    dh, a, d_linear, d_weights = way.hidden_backward(dys, down, h, linear, weights.contiguous(), rows, ends, spare)
    if a is None:
        a, d_linear = h, linear
    del h, linear
    d_down = _weight_gradient(way, dys, a, (rows, ends), down, is_down=True) if need_down else None
    del a, dys
    d_u = dh if d_linear is None else d_linear
    d_up = d_gate = dx = None
    if need_x:
        # with a gate this needs two tensors of the rows' size at once, so it comes before the gradients of up and gate
        more = None if gate is None else way.product(dh, gate.mT, ends)
        dx = way.gather_sum(way.product(d_u, up.mT, ends), more, places, ends)
        del more
    if need_up or need_gate:
        xs = way.spread(x, places)
        d_up = _weight_gradient(way, xs, d_u, (rows, ends), up) if need_up else None
        d_gate = _weight_gradient(way, xs, dh, (rows, ends), gate) if need_gate and gate is not None else None
    return dx, d_weights if need_weights else None, d_up, d_down, d_gate


def _ways(x: Any, *rest: Any) -> list[Way]:
    """Tokens may be sharded; ends are then parts of a sum, and places and rows are those of the device."""
    return [((0, 0, 0, 0, 0, PARTIAL), (0, 0, 0, REPLICATE, REPLICATE, REPLICATE if rest[4] is not None else None))]


def _fake(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Any, activation: str) -> Any:
    h = x.new_empty(indices.numel(), up.shape[2])
    return x.new_empty(x.shape), h, None if gate is None else torch.empty_like(h), *order_op(indices, up.shape[0])


def _fake_backward(dy: Tensor, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Any, *rest: Any) -> Any:
    pairs = zip((x, weights, up, down, gate), rest[-5:], strict=True)
    return tuple(
        (t.new_empty(t.mT.shape).mT if _turned(t) else t.new_empty(t.shape)) if need else None for t, need in pairs
    )


def _gradients(ctx: Any, run: Any, dy: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    x, weights, up, down, gate, h, linear, *order = ctx.saved_tensors
    need_x, _, *needs, _ = ctx.needs_input_grad
    activations: Any = (h, linear)
    if plain(dy) and not torch._C._autograd._get_current_graph_task_keep_graph():
        # the list is then the only owner; a registered operator's `run` passes its items on, and none for ()
        activations = [h, linear], ()
        ctx.maybe_clear_saved_tensors()
    del h, linear
    grads = run(dy, x, weights, up, down, gate, *activations, *order, need_x, *needs)
    dx, *others = (g if need else None for g, need in zip(grads, (need_x, *needs), strict=True))
    return dx, None, *others, None


_call, forward_op, backward_op = operator(
    "experts", _forward, _backward, ("y", "h", "linear", "places", "rows", "ends"), fake=_fake,
    fake_back=_fake_backward, ways=_ways, check=_check, gradients=_gradients, inference=_without_gradients,
)  # fmt: skip


def _count_forward(x: Any, indices: Any, weights: Any, up: Any, down: Any, gate: Any, *_: Any, **__: Any) -> Any:
    return 2 * math.prod((*indices, *up[1:])) * (2 if gate is None else 3)


def _count_backward(dy: Any, x: Any, weights: Any, up: Any, down: Any, gate: Any, h: Any, *rest: Any, **_: Any) -> Any:
    need_x, _, *need_matrices = rest[-5:]
    return 2 * math.prod((*h, x[1])) * (1 + need_x * (1 if gate is None else 2) + sum(need_matrices))


FORMULAS.update({forward_op.overloadpacket: _count_forward, backward_op.overloadpacket: _count_backward})


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
    units before the activation, the weights and the order of the rows. Only float64 makes the host wait for a GPU.

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
    return _way(indices, indices).order(indices.contiguous(), n_experts)  # type: ignore[no-any-return]


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
    arguments.whole("expert_order", "num_experts", num_experts, 1)
    _check_indices("expert_order", indices, num_experts)
    return (_order if plain(indices) else order_op)(indices, num_experts)  # type: ignore[no-any-return]

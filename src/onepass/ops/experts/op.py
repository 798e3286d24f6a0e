"""`experts` and `expert_order`: checks, registration, autograd, the public functions."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import plain
from onepass.core.launch import uses_triton
from onepass.core.operator import operator
from onepass.core.register import FORMULAS, register
from onepass.core.sharding import PARTIAL, REPLICATE, Way
from onepass.ops._shared import arguments

from . import torch_path

ACTIVATIONS = ("gelu", "swiglu")


def _way(x: Tensor, choices: Tensor, *matrices: Tensor) -> Any:
    """Return the module that computes the steps of a call: own products, torch's between kernels, or all in torch."""
    if not uses_triton(x) or not choices.numel() or not x.shape[1]:
        return torch_path
    from . import kernels_products, kernels_rows

    return kernels_products if matrices and kernels_products.takes(x, *matrices) else kernels_rows


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


def _check(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"experts: activation must be 'gelu' or 'swiglu', got {activation!r}")
    for label, value in {"x": x, "weights": weights, "up": up, "down": down}.items():
        check.floating("experts", label, value)
        check.same_device("experts", label, value, "x", x)
    if x.dim() != 2:
        raise ValueError(f"experts: x must be (tokens, dim), got {tuple(x.shape)}; pass x.flatten(0, -2)")
    if up.dim() != 3 or up.shape[1] != x.shape[1] or not up.shape[0]:
        raise ValueError(f"experts: up must be (experts, dim = {x.shape[1]}, hidden), got {tuple(up.shape)}")
    n_experts, dim, hidden = up.shape
    for label, value in (("up", up), ("down", down)):
        if value.dtype != x.dtype:
            raise TypeError(f"experts: x is {x.dtype} and {label} is {value.dtype}; pass {label}.to(x.dtype)")
    if activation == "swiglu":
        if hidden % 2 or (hidden and down.shape == (n_experts, hidden, dim)):
            raise ValueError(
                f"experts: for 'swiglu' up must be (experts, dim, 2·hidden), got {tuple(up.shape)} beside down "
                f"{tuple(down.shape)}; pass torch.cat((gate, up), -1)"
            )
        hidden //= 2
    if down.shape != (n_experts, hidden, dim):
        raise ValueError(f"experts: down must be {(n_experts, hidden, dim)} beside this up, got {tuple(down.shape)}")
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
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, what the activation takes (N, columns of up), places, rows, ends."""
    way = _way(x, indices, up, down)
    places, rows, ends = way.order(indices.contiguous(), up.shape[0])
    h, a = way.hidden(x, up, weights.contiguous(), places, rows, ends, down.shape[1])
    return way.gather_sum(way.product(a, down, ends), places, ends), h, places, rows, ends


def _inference(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Return y alone; few tokens without gradients, as in decoding, go to kernels that read only the chosen experts."""
    if not torch.is_grad_enabled() and uses_triton(x) and x.numel():
        from . import kernels_few

        if kernels_few.takes(indices.numel(), up, down):
            return kernels_few.few(x.contiguous(), indices.contiguous(), weights.contiguous(), up, down)  # type: ignore[no-any-return]
    return _forward(x, indices, weights, up, down, activation)[0]


def _turned(w: Tensor) -> bool:
    """Return whether each expert's matrix lies in memory column by column, as transformers and torchtitan keep it."""
    return w.ndim == 3 and w.stride(1) == 1 != w.stride(2)


def _weight_gradient(way: Any, tokens: Tensor, hidden: Tensor, order: Any, w: Tensor, is_down: bool = False) -> Tensor:
    """Return the gradient of w, laid out as w is: autograd would copy another layout."""
    grad = way.weight_product(tokens, hidden, *order, not is_down if _turned(w) else is_down)
    return grad.mT if _turned(w) else grad  # type: ignore[no-any-return]


def _holders(t: Tensor) -> tuple[int, int, bool]:
    """Return how many hold a tensor, how many its memory, as views do, and whether that is torch's own."""
    return sys.getrefcount(t), torch._C._storage_Use_Count(t.untyped_storage()._cdata), t.untyped_storage().resizable()


def _backward(
    dy: Tensor, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, h: Tensor, places: Tensor, rows: Tensor,
    ends: Tensor, need_x: bool, need_weights: bool, need_up: bool, need_down: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, weights, up and down that are needed.

    h may be a list: unless others hold its item or a view, as a hook of saved tensors may, this memory is written to.
    Each large tensor is freed after its last use, so that fewer of them exist at once.
    """
    way = _way(x, places, up, down)
    dys = way.spread(dy.contiguous(), places)
    owner: Any = h
    if spare := isinstance(owner, list):
        h, alone = owner.pop(), ends.new_empty(0)
        spare = _holders(h) == _holders(alone)
    dh, a, d_weights = way.hidden_backward(dys, down, h, weights.contiguous(), rows, ends, spare)
    dh = h if dh is None else dh
    del h
    d_down = _weight_gradient(way, dys, a, (rows, ends), down, is_down=True) if need_down else None
    del a, dys
    # before the gradient of up: its product is the largest tensor of all
    dx = way.gather_sum(way.product(dh, up.mT, ends), places, ends) if need_x else None
    d_up = _weight_gradient(way, way.spread(x, places), dh, (rows, ends), up) if need_up else None
    return dx, d_weights if need_weights else None, d_up, d_down


def _ways(x: Any, *rest: Any) -> list[Way]:
    """Tokens may be sharded; ends are then parts of a sum, and places and rows are those of the device."""
    return [((0, 0, 0, 0, PARTIAL), (0, 0, 0, REPLICATE, REPLICATE))]


def _fake(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str) -> Any:
    return x.new_empty(x.shape), x.new_empty(indices.numel(), up.shape[2]), *order_op(indices, up.shape[0])


def _fake_backward(dy: Tensor, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, *rest: Any) -> Any:
    return tuple(
        (t.new_empty(t.mT.shape).mT if _turned(t) else t.new_empty(t.shape)) if need else None
        for t, need in zip((x, weights, up, down), rest[-4:], strict=True)
    )


def _gradients(ctx: Any, run: Any, dy: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    x, weights, up, down, *results = ctx.saved_tensors
    h, *order = [t.contiguous() for t in results]  # a hook may return other strides
    need_x, _, *needs, _ = ctx.needs_input_grad
    activations: Any = h
    if plain(dy) and not torch._C._autograd._get_current_graph_task_keep_graph():
        activations = [h]  # the graph then holds it no longer
        ctx.maybe_clear_saved_tensors()
    del h, results
    grads = run(dy, x, weights, up, down, activations, *order, need_x, *needs)
    dx, *others = (g if need else None for g, need in zip(grads, (need_x, *needs), strict=True))
    return dx, None, *others, None


_call, forward_op, backward_op = operator(
    "experts", _forward, _backward, ("y", "h", "places", "rows", "ends"), fake=_fake, fake_back=_fake_backward,
    ways=_ways, check=_check, gradients=_gradients, inference=_inference,
)  # fmt: skip


def _count_forward(x: Any, indices: Any, weights: Any, up: Any, down: Any, *_: Any, **__: Any) -> Any:
    return 2 * math.prod(indices) * x[1] * (up[2] + down[1])


def _count_backward(dy: Any, x: Any, weights: Any, up: Any, down: Any, h: Any, *rest: Any, **_: Any) -> Any:
    need_x, _, need_up, need_down = rest[-4:]
    return 2 * h[0] * x[1] * (up[2] * (need_x + need_up) + down[1] * (1 + need_down))


FORMULAS.update({forward_op.overloadpacket: _count_forward, backward_op.overloadpacket: _count_backward})


def experts(
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, activation: str = "gelu"
) -> Tensor:
    r"""Send each token through the feed-forwards that were chosen for it, and add up what they return.

    .. math:: y_t = \sum_j w_{tj}\, \mathrm{act}(x_t\, U_{e})\, D_{e}, \quad e = i_{tj}

    with act GELU (by tanh), or for ``"swiglu"`` the product :math:`\mathrm{silu}(g) \odot l` of the halves g and l of
    its argument. Sums of a token are in fp32, in the order of its choices.

    Args:
        x: ``(tokens, dim)``, fp32, fp16, bf16 or fp64; autocast changes nothing here. In 16 bits on a GPU dim and
            hidden are multiples of 8, so that rows begin at whole 16 bytes.
        indices: ``(tokens, k)`` int32 or int64: the experts of a token; −1 is no expert. Others outside
            0 … experts − 1 raise on a CPU; on a GPU the nearest of −1 and the last expert is taken.
        weights: ``(tokens, k)``, floating-point: how much each choice counts.
        up: ``(experts, dim, hidden)``, any strides, dtype of x; for ``"swiglu"`` ``(experts, dim, 2·hidden)``: the
            columns of the gate, then those of the linear part: ``torch.cat((gate, up), -1)``.
        down: ``(experts, hidden, dim)``, likewise.
        activation: ``"gelu"`` or ``"swiglu"``.

    Returns:
        ``(tokens, dim)``, dtype of x.

    Gradients flow to x, weights and the matrices, the same bit for bit from run to run. Backward keeps x, the hidden
    units before the activation, the weights and the order of the rows. Only float64 makes the host wait for a GPU.

    Raises:
        TypeError: a tensor is not floating-point, indices are not integers, or the dtypes of x and a matrix differ.
        ValueError: shapes don't fit, devices differ, an index is out of range (CPU), or a width no multiple of 8 (GPU).
        NotImplementedError: for second and forward-mode derivatives.

    Source: Shazeer et al., Outrageously large neural networks (arXiv:1701.06538).

    Example:
        >>> import torch, onepass
        >>> x, up, down = torch.ones(2, 4), torch.ones(3, 4, 8), torch.ones(3, 8, 4)
        >>> onepass.experts(x, torch.tensor([[0, 2], [1, -1]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]]), up, down).shape
        torch.Size([2, 4])
    """
    return _call(x, indices, weights, up, down, activation)  # type: ignore[no-any-return]


def _order(indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return _way(indices, indices).order(indices.contiguous(), n_experts)  # type: ignore[no-any-return]


def _fake_order(indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.empty(indices.shape, dtype=torch.int32, device=indices.device)
    return places, places.new_empty(indices.numel()), places.new_empty(n_experts)


order_op = register("expert_order", _order, _fake_order)


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

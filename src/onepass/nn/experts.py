"""`Experts`: a router sends each token to a few of many feed-forwards; balance and losses of the router."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.core import check, eager
from onepass.ops._shared import arguments
from onepass.ops.experts import choice, definition
from onepass.ops.experts.op import ACTIVATIONS, experts
from onepass.ops.norm.op import rms_norm

from .calls import RoutedCall, as_written, has_no_overrides
from .count import check_dtype, check_flag, check_int, check_number
from .norm import RMSNorm


class ExpertRouting(NamedTuple):
    """Which experts the tokens chose.

    Attributes:
        indices: ``(…, top_k)`` int64, best first; −1 for masked tokens.
        weights: same shape, fp32 or wider, differentiable; 0 for masked tokens.
        logits: ``(…, num_experts)``, fp32 or wider, differentiable; those of masked tokens are meaningless.
        counts: ``(num_experts,)`` int32: how many tokens chose each expert.
    """

    indices: Tensor
    weights: Tensor
    logits: Tensor
    counts: Tensor


class _Logits(nn.Linear):
    """The router: logits in fp32 or wider, its weight drawn from N(0, 1/dim)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)

    @eager.outside_autocast
    def forward(self, u: Tensor) -> Tensor:
        weight = self.weight.to(torch.promote_types(u.dtype, torch.float32))
        return F.linear(u.to(weight.dtype), weight)  # some quantised weights keep their dtype


class _Shared(nn.Module):
    """The feed-forward of all tokens, without a norm: it reads the normed tokens that the experts read."""

    def __init__(self, dim: int, hidden: int, activation: str, **factory: Any) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False, **factory)
        self.gate = nn.Linear(dim, hidden, bias=False, **factory) if activation == "swiglu" else None
        self.down = nn.Linear(hidden, dim, bias=False, **factory)

    def forward(self, u: Tensor) -> Tensor:
        h, gate = self.up(u), self.gate
        return self.down(F.gelu(h, approximate="tanh") if gate is None else F.silu(gate(u)) * h)  # type: ignore[no-any-return]


class Experts(nn.Module):
    r"""A feed-forward of many experts, of which each token takes ``top_k``; attention and residual are outside.

    .. math::
        u = \mathrm{rms\_norm}(x), \quad z = u\,W^\top, \quad s = \sigma(z), \quad
        y_t = \sum_{e \in \mathrm{top}_k(s_t + b)} g_{te}\, \mathrm{act}(u_t U_e)\, D_e + \mathrm{shared}(u_t)

    with g the scores s of the chosen experts, divided by their sum if `norm_topk` (and top_k > 1). The bias b balances
    the load without a loss: it changes the choice alone, and :func:`update_balance` moves it after each step toward
    experts with fewer tokens than the mean. Write ``x + layer(x)``.

    Args:
        dim: width of the tokens.
        num_experts: how many experts there are.
        top_k: how many a token takes.
        hidden_dim: hidden width of one expert; default 4·dim // top_k, the multiplications of a dense feed-forward.
        activation: ``"gelu"`` (by tanh), or ``"swiglu"``: ``silu(u·gate) ⊙ (u·up)``, with both in ``layer.up``.
        shared_dim: hidden width of a feed-forward for all tokens; 0: none.
        score_func: ``"sigmoid"`` or ``"softmax"``.
        norm_topk: divide the weights of a token by their sum.
        balance_rate: how far :func:`update_balance` moves a bias.
        device, dtype: of all parameters.

    Shapes: ``layer(x, mask=None)`` with x ``(…, dim)`` and mask ``(…)`` bool, True at real tokens, gives y like x: 0 at
    masked tokens, which are in no expert's rows and in no count. ``layer(x, mask, return_routing=True)`` gives
    ``(y, ExpertRouting)``. Logits are in fp32 under autocast too, of tokens that the norm wrote in autocast's dtype. In
    training a forward adds its counts to ``tokens_per_expert`` in place, as a CUDA graph repeats; not under torch.func.

    All weights are in memory, a token multiplies by those of top_k experts (docs/experts.md). Results are the same bit
    for bit from run to run; only fp64 makes the host wait. Last bits may depend on how many tokens share the expert.

    Raises:
        TypeError: a size is not an int, an option has another type, or x and the weights have two dtypes (no autocast).
        ValueError: a size is < 1, top_k > num_experts, an option is unknown, or shapes don't fit.

    Source: Shazeer et al. (arXiv:1701.06538); balance without a loss as in Wang et al. (arXiv:2408.15664).

    Example:
        >>> import torch
        >>> from onepass.nn import Experts
        >>> layer = Experts(64, num_experts=8)
        >>> y, routing = layer(torch.randn(2, 100, 64), return_routing=True)
        >>> y.shape, routing.indices.shape
        (torch.Size([2, 100, 64]), torch.Size([2, 100, 2]))
    """

    expert_bias: Tensor
    tokens_per_expert: Tensor
    __call__: RoutedCall[ExpertRouting]

    def __init__(
        self, dim: int, num_experts: int, top_k: int = 2, *, hidden_dim: int | None = None, activation: str = "gelu",
        shared_dim: int = 0, score_func: str = "sigmoid", norm_topk: bool = True, balance_rate: float = 1e-3,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, size in (("dim", dim), ("num_experts", num_experts), ("top_k", top_k)):
            check_int("Experts", name, size)
        hidden_dim = max(1, 4 * dim // top_k) if hidden_dim is None else hidden_dim
        check_int("Experts", "hidden_dim", hidden_dim)
        check_int("Experts", "shared_dim", shared_dim, 0)
        check_flag("Experts", "norm_topk", norm_topk)
        check_number("Experts", "balance_rate", balance_rate, "a finite number ≥ 0", lambda r: 0 <= r < math.inf)
        if top_k > num_experts:
            raise ValueError(f"Experts: top_k must be ≤ num_experts = {num_experts}, got {top_k}")
        choices = ("activation", activation, ACTIVATIONS), ("score_func", score_func, ("sigmoid", "softmax"))
        for name, value, accepted in choices:
            if value not in accepted:
                raise ValueError(f"Experts: {name} must be one of {accepted}, got {value!r}")
        self.dim, self.num_experts, self.top_k, self.hidden_dim = dim, num_experts, top_k, hidden_dim
        self.activation, self.score_func, self.norm_topk = activation, score_func, norm_topk
        self.balance_rate = float(balance_rate)
        factory: Any = {"device": device, "dtype": dtype}
        # one matrix for gate and up: fewer bytes than two
        columns = hidden_dim * (2 if activation == "swiglu" else 1)
        self.up = nn.Parameter(torch.empty(num_experts, dim, columns, **factory))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_dim, dim, **factory))
        for name, stays in (("expert_bias", True), ("tokens_per_expert", False)):
            self.register_buffer(name, torch.zeros(num_experts, dtype=torch.float32, device=device), persistent=stays)
        self.reset_parameters()
        self.norm = RMSNorm(dim, **factory)
        self.router = _Logits(dim, num_experts, bias=False, **factory)
        self.shared = _Shared(dim, shared_dim, activation, **factory) if shared_dim else None

    def reset_parameters(self) -> None:
        """Draw the experts as `torch.nn.Linear` does, and set bias and counts to 0."""
        for weight in (self.up, self.down):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
        nn.init.zeros_(self.expert_bias)
        nn.init.zeros_(self.tokens_per_expert)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # layer.bfloat16() leaves bias and counts in fp32: bf16 would lose steps of a thousandth and of one
        exact = {name: self._buffers[name] for name in ("expert_bias", "tokens_per_expert")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, t in exact.items():
            if t is not None and (new := self._buffers[name]) is not None and new.dtype != t.dtype:
                self._buffers[name] = t.to(new.device)
        return self

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if {f"{prefix}gate", f"{prefix}up"} <= state.keys():  # written when gate was a parameter of its own
            gate, up = state.pop(f"{prefix}gate"), state[f"{prefix}up"]
            if hasattr(up, "device_mesh") and not hasattr(gate, "device_mesh"):  # torch shards the names that it knows
                gate = torch.distributed.tensor.distribute_tensor(gate, up.device_mesh, up.placements)
            state[f"{prefix}up"] = torch.cat((gate, up), -1)
        super()._load_from_state_dict(state, prefix, *args)
        # no counts are in it: to_empty leaves any bits there, assign=True no tensor
        counts, bias = self.tokens_per_expert, self.expert_bias.float()  # assign=True takes any dtype
        self.expert_bias, self.tokens_per_expert = bias, torch.zeros_like(bias) if counts.is_meta else counts.zero_()

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_routing: bool = False
    ) -> Tensor | tuple[Tensor, ExpertRouting]:
        check.floating("Experts", "x", x)
        if not x.dim() or x.shape[-1] != self.dim:
            raise ValueError(f"Experts: x must be (…, dim = {self.dim}), got {tuple(x.shape)}")
        check_dtype("Experts", x, self.up)
        arguments.mask_of("Experts", mask, "x.shape[:-1]", x.shape[:-1], "x", x)
        if mask is not None:
            # 0·NaN is NaN in a weight's gradient
            x, mask = x.masked_fill(~mask[..., None], 0), mask.reshape(-1)
        matrices: list[Tensor] = [self.up, self.down]
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            matrices = [t.to(dtype) for t in matrices]
            # the norm writes what the products read
            fused = as_written([self.norm], [RMSNorm])
            u = rms_norm(x, self.norm.weight, eps=self.norm.eps, out_dtype=dtype) if fused else self.norm(x).to(dtype)
        else:
            u = self.norm(x)
        u, router = u.reshape(-1, self.dim), self.router
        options = self.expert_bias, mask, self.top_k, self.score_func, self.norm_topk
        as_it_is = type(router) is _Logits and has_no_overrides(router)
        if as_it_is and (hasattr(router.weight, "to_local") or not hasattr(type(router.weight), "__tensor_flatten__")):
            weights, logits, indices, counts = choice.choose_experts(u, router.weight, *options)
        else:  # a hook, an adapter in its place, or a quantised weight, which knows linear but not our operator
            logits = router(u).to(torch.promote_types(u.dtype, torch.float32))
            weights, indices, counts = definition.choose(logits, *options)
        if self.training and not torch._C._are_functorch_transforms_active():
            _local(self.tokens_per_expert).add_(_local(counts))
        y = experts(u, indices, weights, *matrices, activation=self.activation)
        if self.shared is not None:
            y = y + (self.shared(u) if mask is None else self.shared(u) * mask[:, None])
        y = y.to(x.dtype).view(x.shape)
        if not return_routing:
            return y
        shape, logits = (*x.shape[:-1], self.top_k), logits.view(*x.shape[:-1], self.num_experts)
        return y, ExpertRouting(indices.view(shape), weights.view(shape), logits, counts)

    def extra_repr(self) -> str:
        options = "num_experts", "top_k", "hidden_dim", "activation", "score_func"
        return ", ".join((str(self.dim), *(f"{name}={getattr(self, name)!r}" for name in options)))


def _local(t: Tensor) -> Tensor:
    """Return this device's part of a DTensor; any other tensor as it is."""
    return t.to_local() if hasattr(t, "to_local") else t  # type: ignore[no-any-return]


@torch.no_grad()
def update_balance(model: nn.Module, group: Any = None) -> None:
    """Move the bias of each `Experts` toward experts with fewer tokens than the mean; call it once per optimizer step.

    Sums ``tokens_per_expert`` over the processes of `group` (default: all, where torch.distributed is initialised),
    adds ``balance_rate · sign(mean − count)`` to each bias and clears the counts, on the device: a CUDA graph can hold
    it. Recomputed forwards count twice: the sign is the same. Under DDP accumulate in `no_sync()`: it sends buffers.

    Args:
        model: any module; its `Experts` are found at any depth.
        group: a process group of torch.distributed.

    Raises:
        TypeError: a bias or counts are no longer in fp32.

    Source: Wang et al., Auxiliary-loss-free load balancing (arXiv:2408.15664).

    Example:
        >>> import torch
        >>> from onepass.nn import Experts, update_balance
        >>> layer = Experts(16, num_experts=4)
        >>> y = layer(torch.randn(8, 16))
        >>> update_balance(layer)
        >>> layer.expert_bias.abs().max() <= 1e-3, layer.tokens_per_expert.sum()
        (tensor(True), tensor(0.))
    """
    layers = [m for m in model.modules() if isinstance(m, Experts)]
    counts = [_local(m.tokens_per_expert) for m in layers]
    if layers and torch.distributed.is_available() and torch.distributed.is_initialized():
        joined = torch.cat(counts)
        torch.distributed.all_reduce(joined, group=group)
        counts = [*torch.split(joined, [m.num_experts for m in layers])]
    for layer, count in zip(layers, counts, strict=True):
        move_bias(layer, count)


def move_bias(layer: Experts, count: Tensor) -> None:
    """Move a bias by the counts of all processes, and clear those of this one."""
    for n in ("expert_bias", "tokens_per_expert"):
        if (dtype := getattr(layer, n).dtype) != torch.float32:
            raise TypeError(f"update_balance: {n} must be float32, got {dtype}; write layer.{n} = layer.{n}.float()")
    _local(layer.expert_bias).add_((count.mean() - count).sign(), alpha=layer.balance_rate)
    _local(layer.tokens_per_expert).zero_()


def _mean_over_real(op: str, routing: ExpertRouting, function: Any) -> Tensor:
    """Return the mean of function(logits) over the real tokens."""
    if not isinstance(routing, ExpertRouting):
        raise TypeError(f"{op}: routing must be layer(x, return_routing=True)[1], got {type(routing).__name__}")
    real, logits = routing.indices[..., :1] >= 0, routing.logits.unsqueeze(-2)  # one token may have no dimension
    return torch.where(real[..., None], function(logits), 0.0).flatten(0, -2).sum(0) / real.sum().clamp(min=1)


def load_balancing_loss(routing: ExpertRouting) -> Tensor:
    r"""Return :math:`E \sum_e f_e\, p_e`: 1 where all experts get the same share, more where few get most.

    f is an expert's share of all choices, p the mean of softmax(logits) over the real tokens, with gradients.

    Source: Fedus et al., Switch Transformers (arXiv:2101.03961).

    Example:
        >>> import torch
        >>> from onepass.nn import Experts, load_balancing_loss
        >>> _, routing = Experts(16, num_experts=4)(torch.randn(8, 16), return_routing=True)
        >>> bool(load_balancing_loss(routing) > 0)
        True
    """
    p = _mean_over_real("load_balancing_loss", routing, lambda z: z.softmax(-1))
    return len(p) * (routing.counts * p).sum() / routing.counts.sum().clamp(min=1)


def router_z_loss(routing: ExpertRouting) -> Tensor:
    r"""Return the mean of :math:`\mathrm{logsumexp}(z)^2` over the real tokens, which keeps logits small.

    Source: Zoph et al., ST-MoE (arXiv:2202.08906).

    Example:
        >>> import torch
        >>> from onepass.nn import Experts, router_z_loss
        >>> _, routing = Experts(16, num_experts=4)(torch.randn(8, 16), return_routing=True)
        >>> router_z_loss(routing).shape
        torch.Size([])
    """
    return _mean_over_real("router_z_loss", routing, lambda z: z.logsumexp(-1, keepdim=True).square())[0]

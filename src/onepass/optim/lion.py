"""The optimizer Lion: updates by the sign of the momentum, in one pass over parameters, gradients and momentum."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar, TypeVar, overload
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, _use_grad_for_differentiable

from onepass.optim.options import check_options, check_parameters
from onepass.optim.sharded import placed_gradients
from onepass.optim.state import gatherable, load_state, refuse_others, rename_options
from onepass.optim.step import Work

Loss = TypeVar("Loss")


class Lion(Optimizer):
    r"""Lion (EvoLved Sign Momentum), one kernel launch for all tensors of a dtype combination.

    .. math::
        u = β_1 m + (1 - β_1) g, \qquad
        p \leftarrow p - lr\,(\operatorname{sign}(u) + λ p), \qquad
        m \leftarrow β_2 m + (1 - β_2) g

    The arithmetic is in fp32 (fp64 for fp64 tensors) for every storage dtype. sign(0) = 0. An infinite gradient counts
    by its sign; a nan gradient makes the weight nan, as with AdamW.
    On a CPU, unless `foreach` is given, the two terms of u must not both exceed 4.7e21 with opposite signs: u then has
    the sign of m.

    Args:
        params: parameters, named parameters, or param groups; groups may differ in every option.
        lr: learning rate, a number or a tensor; 3 to 10 times smaller than AdamW's.
        betas: β1 for the update, β2 for the momentum, each in [0, 1).
        weight_decay: λ, a number or a tensor; larger than AdamW's by the factor by which lr is smaller.
        maximize: ascend instead of descend.
        foreach: given as in torch, True or False, torch's operations update tensor by tensor.
        fused: on CUDA, True requires the Triton kernel and False avoids it; by default every tensor that it takes uses
            it. On a CPU, True compiles the update with torch.compile into one pass over memory: large tensors take two
            thirds of the time, but it needs a C++ compiler and seconds at the first step. For GradScaler, see below.
        capturable: allow CUDA graph capture. The learning rate becomes a tensor on the device, which schedulers write
            to and replays read. Take one step before capturing.
        differentiable: record the step in autograd.
        decouple_lr: decay by λ·lr/peak_lr, independent of the learning rate's size. The peak is, per group, `max_lr`
            if a scheduler such as OneCycleLR wrote one, else the group's `peak_lr`, by default its first lr.
        cautious: drop (True) or multiply (by a factor in [0, 1]) updates whose sign disagrees with the gradient, then
            divide all by the mean factor (arXiv 2411.16085).
        cautious_weight_decay: decay only weights that the update moves towards zero (arXiv 2510.12402).
        state_dtype: dtype of the momentum: None for the parameter's, torch.float32, torch.bfloat16, or "int8": a byte
            per element and an fp32 scale per 256 (momenta of fewer than 4096 elements have the parameter's dtype).
        low_precision: what is stored beside a bf16 parameter. "remainder", and "auto": an int16 per weight, which
            trains bit for bit as an fp32 weight with this momentum dtype. "none": nothing, as beside fp16 weights;
            updates and weight decay are lost at small learning rates.

    Raises:
        ValueError, TypeError: an option is out of range; the message names what is accepted.
        RuntimeError: for sparse gradients; for `fused=True` with options or tensors that the kernel does not support;
            for graph capture without `capturable`.

    `onepass.optim.clip_grad_norm` sets `clip_coefficient`. The next step multiplies the gradients by it; `zero_grad`
    removes it.

    The momentum is `state[p]["exp_avg"]`, so that checkpoints of lion-pytorch, optimi and timm load. States keep their
    dtype in `load_state_dict`. DTensor parameters are updated shard by shard, with their states sharded alike;
    gradients are redistributed to the placements of their parameters. docs/scale.md says what int8 and cautious do.

    With `torch.amp.GradScaler`, the default is that of torch's AdamW: the scaler unscales the gradients in place, waits
    for the device once per step to find inf or nan, skips such a step, and raises an error for fp16 gradients. With
    `fused=True` in the constructor, the step unscales and skips on the device: gradients keep their scale, may be fp16,
    and the host does not wait. Lightning's `gradient_clip_val` under AMP needs the default.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675).

    Example:
        >>> import torch
        >>> from onepass.optim import Lion
        >>> w = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> optimizer = Lion([w], lr=0.1, weight_decay=0.0)
        >>> (w * w).sum().backward()
        >>> optimizer.step()
        >>> w.detach()
        tensor([ 0.9000, -1.9000])
    """

    # all Lions by id: `clip_grad_norm` searches them for the one that has its parameters
    instances: ClassVar[WeakValueDictionary[int, Lion]] = WeakValueDictionary()
    _work: Work | None = None
    # a 0-dim tensor; the next step multiplies gradients by it
    clip_coefficient: Tensor | None = None
    # set by `release_gradients`: its hooks step inside backward
    releasing: bool = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float | Tensor = 0.0, *, maximize: bool = False, foreach: bool | None = None,
        fused: bool | None = None, capturable: bool = False, differentiable: bool = False, decouple_lr: bool = False,
        cautious: bool | float = False, cautious_weight_decay: bool = False,
        state_dtype: torch.dtype | str | None = None, low_precision: str = "auto",
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach,
            "fused": fused, "capturable": capturable, "differentiable": differentiable, "decouple_lr": decouple_lr,
            "cautious": cautious, "cautious_weight_decay": cautious_weight_decay, "state_dtype": state_dtype,
            "low_precision": low_precision,
        }  # fmt: skip
        check_options(defaults)
        super().__init__(params, defaults)
        self._set_amp_scaling()
        Lion.instances[id(self)] = self

    def _set_amp_scaling(self) -> None:
        # if True, GradScaler gives scale and found_inf to the step as device tensors. Lightning does not clip the
        # gradients then, as they stay scaled; therefore only an explicit fused=True turns it on, as in torch
        self._step_supports_amp_scaling = bool(self.defaults.get("fused"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_options(group)
            check_parameters(group)
            if group["decouple_lr"]:
                group.setdefault("peak_lr", float(group["lr"]))
                if not group["peak_lr"] > 0:
                    raise ValueError(
                        f"Invalid peak learning rate: {group['peak_lr']}; with decouple_lr=True it must be positive: "
                        "give the param group a 'peak_lr'"
                    )
        except Exception:
            self.param_groups.pop()
            raise
        _lr_to_device(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._work = None
        self._set_amp_scaling()
        Lion.instances[id(self)] = self
        for group in self.param_groups:
            rename_options(group)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            _lr_to_device(group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does; remainders of DTensors are int32, codes in no contiguous order are fp32."""
        saved: dict[str, Any] = super().state_dict()
        saved["state"] = {key: gatherable(state) for key, state in saved["state"].items()}
        for group in saved["param_groups"]:  # torch.distributed.checkpoint gathers strings, but no dtype
            group["state_dtype"] = group["state_dtype"] and str(group["state_dtype"])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; every tensor keeps its saved dtype (torch would cast int16 to the dtype of the weight).

        A group's `state_dtype`, if set, converts its momentum. States of lion-pytorch, timm and optimi load too;
        options that they lack keep the values of this optimizer.

        Raises:
            ValueError: for the state of another optimizer, whose rate and decay are not Lion's; codes without scales.
        """
        incoming: dict[str, Any] = {}
        peaks = [{key: g[key] for key in ("peak_lr", "keep_peak_lr") if key in g} for g in self.param_groups]

        def remember(_: Optimizer, loaded: dict[str, Any]) -> None:
            refuse_others(loaded)
            incoming.update(loaded)

        def restore(_: Optimizer) -> None:
            for group, peak in zip(self.param_groups, peaks, strict=True):
                for key, value in peak.items():
                    group.setdefault(key, value)
            ids = chain.from_iterable(g["params"] for g in incoming["param_groups"])
            owners = ((p, group) for group in self.param_groups for p in group["params"])
            for key, (p, group) in zip(ids, owners, strict=True):
                load_state(incoming["state"].get(key, {}), self.state, p, group)

        # our pre-hook runs last, to read the state after other hooks; our post-hook first, so that others read ours
        pre_hook = self.register_load_state_dict_pre_hook(remember)
        post_hook = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            pre_hook.remove()
            post_hook.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients (or set them to zero) and remove their clip coefficient."""
        self.clip_coefficient = None
        super().zero_grad(set_to_none)

    def current_work(self) -> tuple[Work, list[Tensor]]:
        """Return the current layout of a step, and its gradients."""
        work = self._work
        # a kept layout without DTensors reads p.grad itself
        placed = placed_gradients(self.param_groups) if work is None or work.sharded else None
        live = None if work is None else work.gradients(self, placed)
        if work is None or live is None:
            # not a second time: other ranks may keep their layout, and all ranks must run the same collectives
            placed = placed_gradients(self.param_groups) if placed is None else placed
            grads = [placed.get(id(p)) for group in self.param_groups for p in group["params"]]
            work = self._work = Work(self, grads)
            live = [g for g in grads if g is not None]
        return work, live

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...
    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        """Take one step. `closure` evaluates the model again; return its loss, else None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    # compiled code takes an eager step
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _take_step(self) -> None:
        """Update the parameters by their current gradients."""
        self._check_capturable()
        work, live = self.current_work()
        try:
            work.run(self, live, self.clip_coefficient)
        finally:
            self.clip_coefficient = None

    def _check_capturable(self) -> None:
        # check is_initialized first: the capture query would start CUDA on a machine that trains on the CPU
        started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not started or not torch.cuda.is_current_stream_capturing():
            return
        if not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError(
                "Attempting CUDA graph capture of step() for an instance of Lion but param_groups' capturable is False."
            )


def _lr_to_device(group: dict[str, Any]) -> None:
    """Move lr, and weight decay if a tensor, to the device: a graph reads them there, schedulers write in place."""
    params = group["params"]
    if not group["capturable"] or not params or not params[0].is_cuda:
        return
    device = params[0].device
    # a factor of float64 weights must not be rounded to fp32; the table of a launch takes both dtypes
    dtype = torch.float64 if any(p.dtype in (torch.float64, torch.complex128) for p in params) else torch.float32
    for key in ("lr", "weight_decay"):
        value = group[key]
        if isinstance(value, Tensor) or key == "lr":
            # a tensor per group, so that a scheduler does not write to that of another group
            group[key] = torch.as_tensor(value, dtype=dtype).detach().to(device, copy=True)

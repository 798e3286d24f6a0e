"""Lion: sign momentum, in one pass over parameters, gradients and momentum."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim.optimizer import Optimizer, ParamsT, _use_grad_for_differentiable
from torch.optim.optimizer import _global_optimizer_post_hooks as _post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _pre_hooks

from onepass.optim.options import check_options, check_parameters
from onepass.optim.state import load_state, rename_options
from onepass.optim.step import Work, compiled_step


class Lion(Optimizer):
    r"""Lion (EvoLved Sign Momentum), one kernel launch for all tensors of a dtype combination.

    .. math::
        u = β_1 m + (1 - β_1) g, \qquad
        p \leftarrow p - lr\,(\operatorname{sign}(u) + λ p), \qquad
        m \leftarrow β_2 m + (1 - β_2) g

    The arithmetic is in fp32 (fp64 for fp64 tensors) whatever the storage. sign(0) = 0; an infinite gradient has a
    sign; a nan gradient reaches the weight, as it does with AdamW. On a CPU, unless `foreach` is given, the two terms
    of u must not both exceed 4.7e21 with opposite signs: u then has the sign of m.

    Args:
        params: parameters, named parameters, or param groups; groups may differ in every option.
        lr: learning rate, a number or a tensor; 3 to 10 times smaller than AdamW's.
        betas: β1 for the update, β2 for the momentum, each in [0, 1).
        weight_decay: λ, a number or a tensor; as much larger than AdamW's as lr is smaller.
        maximize: ascend instead of descend.
        foreach: True takes torch's multi-tensor calls (fp32 and fp64 parameters), False goes tensor by tensor.
        fused: True insists on the Triton kernel on CUDA, False refuses it; by default it is used wherever it can be.
            On a CPU, True has the update compiled by torch.compile into a single pass over memory: about twice as
            fast, for a C++ compiler and some seconds at the first step. True also changes what GradScaler does, below.
        capturable: allows CUDA graph capture; the learning rate becomes a tensor on the device, which schedulers write
            to, so that a replay sees it. Take one step before capturing.
        differentiable: lets autograd see the step.
        decouple_lr: decay by λ·lr/peak_lr, independent of the learning rate's size. The peak is, per group: `max_lr`
            where a scheduler such as OneCycleLR wrote one, else the group's `peak_lr`, by default its first lr.
        cautious: drop (True) or scale (a factor in [0, 1]) updates that disagree with the gradient's sign, and rescale
            the rest by the mean (arXiv 2411.16085).
        cautious_weight_decay: decay only weights that the update moves towards zero (arXiv 2510.12402).
        state_dtype: dtype of the momentum: None for the parameter's, torch.float32, torch.bfloat16, or "int8": a byte
            per element with an fp32 scale for each 256 (parameters of fewer than 4096 elements keep their dtype).
        low_precision: for 16-bit parameters. "remainder" (bf16) keeps an int16 beside each weight and trains bit for
            bit as in fp32; "kahan" keeps the rounding error in the parameter's dtype; "stochastic" keeps nothing and
            rounds up or down at random, so that small updates happen on average; "none" keeps nothing, and loses
            updates and weight decay at small learning rates. "auto" is remainder for bf16 and kahan for fp16.
        seed: of stochastic rounding. Equal seeds round alike, on every device and however tensors are grouped.

    Raises:
        ValueError, TypeError: an option is out of range; the message says what is accepted.
        RuntimeError: sparse gradients; `fused=True` with options or tensors that the kernel can't take; graph capture
            without `capturable`.

    `onepass.optim.clip_grad_norm` leaves its coefficient in `clip_coefficient`, by which the next step multiplies the
    gradients; `zero_grad` forgets it.

    The momentum is `state[p]["exp_avg"]`, so that checkpoints of lion-pytorch, optimi and timm load. States keep their
    dtype in `load_state_dict`. DTensor parameters are updated shard by shard; their gradients must have the same
    placements (and `cautious` is refused for them).

    With `torch.amp.GradScaler`, as for torch's AdamW: the scaler unscales the gradients in place, waits for the device
    once per step to read whether one is inf or nan, and skips the step then. It refuses fp16 gradients. With
    `fused=True` given to the constructor the step itself unscales and skips, on the device: the gradients keep their
    scale, may be fp16, and the host waits for nothing. Lightning's `gradient_clip_val` under AMP needs the first way.

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

    # `clip_grad_norm` finds the optimizer of its parameters here
    instances: ClassVar[WeakSet[Lion]] = WeakSet()
    _work: Work | None = None
    # a device scalar that the next step multiplies gradients by
    clip_coefficient: Tensor | None = None
    # set by `release_gradients`: its hooks step inside backward
    releasing: bool = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float | Tensor = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        decouple_lr: bool = False,
        cautious: bool | float = False,
        cautious_weight_decay: bool = False,
        state_dtype: torch.dtype | str | None = None,
        low_precision: str = "auto",
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach,
            "fused": fused, "capturable": capturable, "differentiable": differentiable, "decouple_lr": decouple_lr,
            "cautious": cautious, "cautious_weight_decay": cautious_weight_decay, "state_dtype": state_dtype,
            "low_precision": low_precision, "seed": seed,
        }  # fmt: skip
        check_options(defaults)
        super().__init__(params, defaults)
        self._set_amp_scaling()
        Lion.instances.add(self)

    def _set_amp_scaling(self) -> None:
        # True: GradScaler hands scale and found_inf to the step as device tensors. Lightning refuses to clip then,
        # because the gradients stay scaled; so it takes an explicit fused=True, as in torch
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
        Lion.instances.add(self)
        for group in self.param_groups:
            rename_options(group)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            _lr_to_device(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; every tensor keeps the dtype it was saved with (torch would cast int16 to the weight's dtype).

        A group's `state_dtype`, when it is set, is what its momentum is converted to. States of lion-pytorch, timm and
        optimi are understood; what they don't say is taken from this optimizer.
        """
        seen: dict[str, Any] = {}
        peaks = [{key: g[key] for key in ("peak_lr", "keep_peak_lr") if key in g} for g in self.param_groups]

        def restore(_: Optimizer) -> None:
            for group, peak in zip(self.param_groups, peaks, strict=True):
                for key, value in peak.items():
                    group.setdefault(key, value)
            ids = chain.from_iterable(g["params"] for g in seen["param_groups"])
            owners = ((p, group) for group in self.param_groups for p in group["params"])
            for key, (p, group) in zip(ids, owners, strict=True):
                load_state(seen["state"].get(key, {}), self.state, p, group)

        # last before loading, to see what other hooks made of the state; first after it, so that they see ours
        before = self.register_load_state_dict_pre_hook(lambda _, loaded: seen.update(loaded))
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and the clip coefficient that was meant for them."""
        self.clip_coefficient = None
        super().zero_grad(set_to_none)

    def current_work(self) -> tuple[Work, list[Tensor]]:
        """The layout of a step now, and its gradients."""
        work = self._work
        live = None if work is None else work.gradients(self)
        if work is None or live is None:
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            work = self._work = Work(self, grads)
            live = [g for g in grads if g is not None]
        return work, live

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `step` as torch does, to run hooks and to name the step in profiles, but only where there is use for it.

        torch announces each step by two calls through its dispatcher: 3 to 5 % of a step over a thousand small tensors.
        """
        announced = Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: Lion, *args: Any, **kwargs: Any) -> Any:
            hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _pre_hooks or _post_hooks
            if hooked or profiler._is_profiler_enabled or torch.compiler.is_compiling():
                return announced(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return step

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure` reevaluates the model and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            scaled = (self.clip_coefficient, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
            if all(t is None for t in scaled):
                compiled_step(self)
            else:
                _uncompiled_step(self)
            return loss
        self._take_step()
        return loss

    def _take_step(self) -> None:
        """What `step` does once the gradients are there."""
        self._check_capturable()
        work, live = self.current_work()
        try:
            work.run(self, live, self.clip_coefficient)
        finally:
            self.clip_coefficient = None

    def _check_capturable(self) -> None:
        # asked first: a question to CUDA would start it on a machine that trains on the CPU
        started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not started or not torch.cuda.is_current_stream_capturing():
            return
        if not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError(
                "Attempting CUDA graph capture of step() for an instance of Lion but param_groups' capturable is False."
            )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled_step(optimizer: Lion) -> None:
    """The step of compiled code that has gradients to clip or to unscale: one launch anyway, and skipped as a whole."""
    optimizer._take_step()


def _lr_to_device(group: dict[str, Any]) -> None:
    """A captured graph reads the learning rate from the device; schedulers write to a tensor in place."""
    params = group["params"]
    if not group["capturable"] or not params or not params[0].is_cuda:
        return
    device = params[0].device
    # what float64 weights are multiplied by must not round to fp32; the table of a launch takes either
    wide = any(p.dtype in (torch.float64, torch.complex128) for p in params)
    for key in ("lr", "weight_decay"):
        value = group[key]
        if isinstance(value, Tensor) or key == "lr":
            # a new tensor: one scheduler must not write to another group's
            group[key] = (
                torch.as_tensor(value, dtype=torch.float64 if wide else torch.float32).detach().to(device, copy=True)
            )

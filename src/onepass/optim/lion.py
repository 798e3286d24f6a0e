"""Lion: sign momentum, in one pass over parameters, gradients and momentum."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, _use_grad_for_differentiable

from onepass.ops.lion.op import KAHAN, NONE, REMAINDER
from onepass.ops.lion.reference import join
from onepass.optim.lion_step import EXTRA_KEYS, Work, compiled_step

_LOW_PRECISION = ("auto", "none", "remainder", "kahan")
_STATE_DTYPES = (None, torch.float32, torch.bfloat16)
_COMPLEX_STATE = {torch.float32: torch.complex64}


class Lion(Optimizer):
    r"""Lion (EvoLved Sign Momentum), one kernel launch for all tensors of a dtype combination.

    .. math::
        u = β_1 m + (1 - β_1) g, \qquad
        p \leftarrow p - lr\,(\operatorname{sign}(u) + λ p), \qquad
        m \leftarrow β_2 m + (1 - β_2) g

    The arithmetic is in fp32 (fp64 for fp64 tensors) whatever the storage. sign(0) = 0; an infinite gradient has a
    sign; a nan gradient reaches the weight, as it does with AdamW.

    Args:
        params: parameters, named parameters, or param groups; groups may differ in every option.
        lr: learning rate, a number or a tensor.
        betas: β1 for the update, β2 for the momentum, each in [0, 1).
        weight_decay: λ, a number or a tensor.
        maximize: ascend instead of descend.
        foreach: True takes torch's multi-tensor calls (fp32 and fp64 parameters), False goes tensor by tensor.
        fused: True insists on the Triton kernel on CUDA, False refuses it; by default it is used wherever it can be.
        capturable: allows CUDA graph capture; the learning rate becomes a tensor on the device, which schedulers write
            to, so that a replay sees it. Take one step before capturing.
        differentiable: lets autograd see the step.
        decouple_lr: decay by λ·lr/peak_lr, independent of the learning rate's size. The peak is, per group: `max_lr`
            where a scheduler such as OneCycleLR wrote one, else the group's `peak_lr`, by default its first lr.
        cautious: drop (True) or scale (a factor in [0, 1]) updates that disagree with the gradient's sign, and rescale
            the rest by the mean (arXiv 2411.16085).
        cautious_weight_decay: decay only weights that the update moves towards zero (arXiv 2510.12402).
        state_dtype: dtype of the momentum: None for the parameter's, torch.float32 or torch.bfloat16.
        low_precision: for 16-bit parameters. "remainder" (bf16) keeps an int16 beside each weight and trains bit for
            bit as in fp32; "kahan" keeps the rounding error in the parameter's dtype; "none" keeps nothing, and loses
            updates and weight decay at small learning rates. "auto" is remainder for bf16 and kahan for fp16.

    Raises:
        ValueError, TypeError: an option is out of range; the message says what is accepted.
        RuntimeError: sparse gradients; `fused=True` with options or tensors that the kernel can't take; graph capture
            without `capturable`.

    The momentum is `state[p]["exp_avg"]`, so that checkpoints of lion-pytorch, optimi and timm load. States keep their
    dtype in `load_state_dict`. DTensor parameters are updated shard by shard; their gradients must have the same
    placements (and `cautious` is refused for them). Works with `torch.amp.GradScaler` without waiting for the device.

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

    # GradScaler then hands us its scale and its verdict as device tensors instead of waiting for them
    _step_supports_amp_scaling = True
    _work: Work | None = None

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
        state_dtype: torch.dtype | None = None,
        low_precision: str = "auto",
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach,
            "fused": fused, "capturable": capturable, "differentiable": differentiable, "decouple_lr": decouple_lr,
            "cautious": cautious, "cautious_weight_decay": cautious_weight_decay, "state_dtype": state_dtype,
            "low_precision": low_precision,
        }  # fmt: skip
        _check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            _check_parameters(group)
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
        for group in self.param_groups:
            if "betas" not in group and "beta1" in group and "beta2" in group:
                group["betas"] = (group.pop("beta1"), group.pop("beta2"))
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            _lr_to_device(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; every tensor keeps the dtype it was saved with (torch would cast int16 to the weight's dtype).

        A group's `state_dtype`, when it is set, is what its momentum is converted to. States of lion-pytorch, timm and
        optimi are understood; what they don't say is taken from this optimizer.
        """
        seen: dict[str, Any] = {}
        peaks = [group.get("peak_lr") for group in self.param_groups]

        def restore(_: Optimizer) -> None:
            for group, peak in zip(self.param_groups, peaks, strict=True):
                if peak is not None:
                    group.setdefault("peak_lr", peak)
            self._restore_dtypes(seen)

        # last before loading, to see what other hooks made of the state; first after it, so that they see ours
        before = self.register_load_state_dict_pre_hook(lambda _, loaded: seen.update(loaded))
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _restore_dtypes(self, saved: dict[str, Any]) -> None:
        ids = chain.from_iterable(g["params"] for g in saved["param_groups"])
        owners = ((p, group) for group in self.param_groups for p in group["params"])
        for key, (p, group) in zip(ids, owners, strict=True):
            for name, value in saved["state"].get(key, {}).items():
                if name not in ("exp_avg", "remainder", "kahan_comp") or not isinstance(value, Tensor):
                    continue
                dtype = _momentum_dtype(p, group) if name == "exp_avg" and group["state_dtype"] is not None else None
                if value.shape != p.shape and name != "exp_avg":
                    del self.state[p][name]  # a placeholder of another optimizer
                    continue
                # a copy even where nothing is converted: the checkpoint stays what it was
                self.state[p][name] = value.detach().to(p.device, dtype or value.dtype, copy=True)

    def prepare_state(self, p: Tensor, group: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The state of a parameter, made where it is missing, and how its 16-bit value is kept."""
        mode = _mode(p, group)
        state = self.state[p]
        key = EXTRA_KEYS[mode]
        if "exp_avg" in state and (not key or key in state):
            return state, mode
        if p.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Lion: take a step before capturing: a graph that makes its state would reset it each replay"
            )
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p, dtype=_momentum_dtype(p, group), memory_format=torch.preserve_format)
        if mode == REMAINDER and key not in state:
            state[key] = torch.zeros_like(p, dtype=torch.int16, memory_format=torch.preserve_format)
            if "kahan_comp" in state:
                state[key].copy_(_remainder_of_sum(p, state.pop("kahan_comp")))
        elif mode == KAHAN and key not in state:
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
            if "remainder" in state:
                state[key].copy_(join(p.detach(), state.pop("remainder")) - p.detach().float())
        return state, mode

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure` reevaluates the model and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            compiled_step(self)
            return loss
        flat = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in flat]
        if flat and flat[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self._check_capturable()
        if self._work is None or not self._work.fits(self, flat, grads):
            self._work = Work(self, flat, grads)
        self._work.run(self, grads)
        return loss

    def _check_capturable(self) -> None:
        if not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError(
                "Attempting CUDA graph capture of step() for an instance of Lion but param_groups' capturable is False."
            )


def _check_options(group: dict[str, Any]) -> None:
    lr, wd, betas = group["lr"], group["weight_decay"], group["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got shape {tuple(lr.shape)}")
    if isinstance(wd, Tensor) and wd.numel() != 1:
        raise ValueError(f"Tensor weight_decay must be 1-element, got shape {tuple(wd.shape)}")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if len(betas) != 2 or any(isinstance(b, Tensor) for b in betas):
        raise ValueError(f"Invalid betas: {betas}; Lion takes two numbers")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not wd >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {wd}")
    if not 0.0 <= float(group["cautious"]) <= 1.0:
        raise ValueError(f"Invalid cautious value: {group['cautious']}; a bool or a factor in [0, 1] is accepted")
    if group["state_dtype"] not in _STATE_DTYPES:
        raise ValueError(
            f"Invalid state_dtype: {group['state_dtype']!r}; None, torch.float32 and torch.bfloat16 are accepted"
        )
    if group["low_precision"] not in _LOW_PRECISION:
        raise ValueError(f"Invalid low_precision: {group['low_precision']!r}; {', '.join(_LOW_PRECISION)} are accepted")
    if group["fused"]:
        if group["differentiable"]:
            raise RuntimeError("`fused` does not support `differentiable`")
        if group["foreach"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        if float(group["cautious"]) not in (0.0, 1.0) or group["cautious"] is True:
            raise RuntimeError("`fused` does not support `cautious`, which needs a mean before the update")
    if group["differentiable"] and group["low_precision"] in ("remainder", "kahan"):
        raise ValueError(f"low_precision={group['low_precision']!r} is not differentiable; auto and none are accepted")


def _check_parameters(group: dict[str, Any]) -> None:
    for p in group["params"]:
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(f"Lion: parameters must be floating-point or complex tensors, got {p.dtype}")
        if group["low_precision"] == "remainder" and p.dtype == torch.float16:
            raise ValueError("low_precision='remainder' takes bfloat16 parameters, got float16; use 'kahan' or 'auto'")
        _momentum_dtype(p, group)


def _mode(p: Tensor, group: dict[str, Any]) -> int:
    if p.dtype not in (torch.bfloat16, torch.float16) or group["low_precision"] == "none" or group["differentiable"]:
        return NONE
    if group["low_precision"] == "auto":
        return REMAINDER if p.dtype == torch.bfloat16 else KAHAN
    if group["low_precision"] == "kahan":
        return KAHAN
    if p.dtype == torch.float16:
        raise ValueError("low_precision='remainder' takes bfloat16 parameters, got float16; use 'kahan' or 'auto'")
    return REMAINDER


def _momentum_dtype(p: Tensor, group: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = group["state_dtype"] or p.dtype
    if p.is_complex() and dtype != p.dtype:
        if dtype not in _COMPLEX_STATE:
            raise ValueError(f"state_dtype={dtype} has no complex form for a {p.dtype} parameter; None is accepted")
        return _COMPLEX_STATE[dtype]
    return dtype


def _lr_to_device(group: dict[str, Any]) -> None:
    """A captured graph reads the learning rate from the device; schedulers write to a tensor in place."""
    params = group["params"]
    if not group["capturable"] or not params or not params[0].is_cuda:
        return
    device = params[0].device
    for key in ("lr", "weight_decay"):
        value = group[key]
        if isinstance(value, Tensor) or key == "lr":
            # a new tensor: one scheduler must not write to another group's
            group[key] = torch.as_tensor(value, dtype=torch.float32).detach().to(device, copy=True)


def _remainder_of_sum(p: Tensor, compensation: Tensor) -> Tensor:
    """Remainder that makes a bf16 weight stand for p + compensation, as near as 16 bits allow."""
    bits = (p.detach().float() + compensation.float()).view(torch.int32)
    return (bits - p.detach().float().view(torch.int32)).clamp(-(2**15), 2**15 - 1)

"""The state of one parameter: names and dtypes; create, convert, check and load it."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from onepass.ops.lion.definition import dequantize, quantize_, scales_for
from onepass.optim.options import SMALL_INT8, has_remainder, momentum_dtype
from onepass.optim.sharded import is_sharded, local, place_like, scale_shape, whole, zero_scales

SCALE_KEY = "exp_avg_scale"
# kahan_comp: optimi's Kahan compensation, which becomes a remainder
_KEYS = ("exp_avg", SCALE_KEY, "remainder", "kahan_comp")


def prepare_state(state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> bool:
    """Create what a parameter's state lacks, convert it after changed options; return whether it has a remainder."""
    remainder, momentum = has_remainder(p, group), momentum_dtype(p, group)
    old: Any = state.get("exp_avg")
    convert = old is not None and old.dtype != momentum
    if convert and group["state_dtype"] is None:
        # without state_dtype a momentum keeps its dtype, loaded or earlier; only from and to int8 it must convert
        convert = torch.int8 in (old.dtype, momentum)
    if old is not None and not convert and (not remainder or "remainder" in state):
        return remainder
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("Lion: take a step before capturing: a graph that makes its state resets it each replay")
    if old is None or convert:
        value = None
        if old is not None:
            value = local(old)
            value = dequantize(value, local(state.pop(SCALE_KEY)).view(-1)) if old.dtype == torch.int8 else value
        # blocks are runs of memory: with contiguous rows they are the same blocks for every number of ranks
        sharded_codes = momentum == torch.int8 and is_sharded(p)
        layout = torch.contiguous_format if sharded_codes else torch.preserve_format
        state["exp_avg"] = torch.zeros_like(p, dtype=momentum, memory_format=layout)
        if momentum == torch.int8:
            n_scales = scales_for(p.numel())
            state[SCALE_KEY] = zero_scales(p) if sharded_codes else p.new_zeros(n_scales, dtype=torch.float32)
            if value is not None:
                quantize_(value, local(state["exp_avg"]), local(state[SCALE_KEY]).view(-1))
        elif value is not None:
            local(state["exp_avg"]).copy_(value)
    if remainder and "remainder" not in state:
        state["remainder"] = torch.zeros_like(p, dtype=torch.int16, memory_format=torch.preserve_format)
        if "kahan_comp" in state:
            local(state["remainder"]).copy_(_remainder_of_sum(local(p), local(state.pop("kahan_comp"))))
    return remainder


def _remainder_of_sum(p: Tensor, compensation: Tensor) -> Tensor:
    """Return the remainder with which a bf16 weight represents p + compensation, as near as 16 bits allow."""
    bits = (p.detach().float() + compensation.float()).view(torch.int32)
    return (bits - p.detach().float().view(torch.int32)).clamp(-(2**15), 2**15 - 1)


def refuse_others(state_dict: dict[str, Any]) -> None:
    """Raise ValueError for the state of another optimizer: its learning rate and decay would drive Lion."""
    states, groups = state_dict["state"].values(), state_dict["param_groups"]
    tensors = {key for state in states for key, value in state.items() if isinstance(value, Tensor)}
    signs = sorted(tensors - {*_KEYS, "rounding", "step"}) or sorted({"eps", "amsgrad"} & set[str]().union(*groups))
    if signs or any(group.keys().isdisjoint(("betas", "beta1")) for group in groups):
        reason = f"it has {signs[0]}" if signs else "no betas"
        raise ValueError(
            f"Lion.load_state_dict: this is another optimizer's state ({reason}), whose rate and decay would replace "
            "Lion's: load the model alone, and start with a new Lion (docs/lion.md: which lr and weight_decay)"
        )
    if any(_are_codes(state.get("exp_avg")) for state in states if state.get(SCALE_KEY) is None):
        raise ValueError(
            "Lion.load_state_dict: an exp_avg has int8 codes but no scales, as torch.distributed.checkpoint reads them "
            "into a momentum of floats: load whole tensors (docs/scale.md: Lion on DTensors)"
        )


def _are_codes(momentum: Any) -> bool:
    """Return whether floats are the codes of an int8 momentum: whole numbers beyond 1, in a tensor that int8 takes."""
    if not isinstance(momentum, Tensor) or not momentum.is_floating_point() or momentum.numel() < SMALL_INT8:
        return False
    m = local(momentum)
    return m.numel() > 0 and 1 < float(m.abs().max()) <= 128 and torch.equal(m, m.round())


def load_state(saved: dict[str, Any], states: MutableMapping[Tensor, Any], p: Tensor, group: dict[str, Any]) -> None:
    """Write a parameter's saved state to `states` in its saved dtypes, in place of torch's casts to the weight's dtype.

    Placeholders of other libraries are dropped; a group's `state_dtype` converts the momentum. Whole tensors are cut
    into shards for a DTensor.
    """
    blocks: tuple[int, ...] = (scale_shape(p) or ()) if is_sharded(p) else (scales_for(p.numel()),)
    saved = without_codes(saved, cut=not blocks)
    if p.dtype == torch.float16 and isinstance(saved.get("kahan_comp"), Tensor):
        raise ValueError(
            "Lion: the state of a float16 parameter has a 'kahan_comp', which Lion keeps for bfloat16 alone, as a "
            "remainder; load the weights in bfloat16, or delete the 'kahan_comp' of each state to go on without"
        )
    if "rounding" in saved:  # the stochastic rounding of an earlier Lion
        del states[p]["rounding"]
    for name, value in saved.items():
        if name not in _KEYS:
            continue
        if name == SCALE_KEY and isinstance(value, Tensor) and value.numel() == math.prod(blocks):
            # the blocks of a sharded momentum are listed by rows
            value = value.reshape(blocks)
        needed = {"exp_avg": None, SCALE_KEY: blocks}.get(name, p.shape)
        if not isinstance(value, Tensor) or needed not in (None, value.shape):
            del states[p][name]
            continue
        dtype = value.dtype
        if name == "exp_avg" and group["state_dtype"] not in (None, "int8") and dtype != torch.int8:
            dtype = momentum_dtype(p, group)
        if name == "remainder" and dtype == torch.int32:
            dtype = torch.int16  # a sharded state: see `gatherable`
        # always copy: steps must not change the checkpoint
        states[p][name] = place_like(p, value.detach().to(p.device, dtype, copy=True))


def without_codes(saved: dict[str, Any], *, cut: bool) -> dict[str, Any]:
    """Return the state; int8 codes become fp32 numbers if shards `cut` their blocks or they are not in row order."""
    codes, scales = saved.get("exp_avg"), saved.get(SCALE_KEY)
    if not isinstance(codes, Tensor) or not isinstance(scales, Tensor) or codes.dtype != torch.int8:
        return saved
    by_rows = is_sharded(codes) or codes.is_contiguous()
    if by_rows and not cut:
        return saved
    numbers = dequantize(whole(codes).contiguous() if by_rows else codes, whole(scales).reshape(-1))
    return {**saved, "exp_avg": numbers, SCALE_KEY: None}


def gatherable(state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state for a state dict: what ranks can gather and files can store.

    Neither gloo nor NCCL gathers int16: the remainder of a DTensor is int32, into which an int16 checkpoint can be
    read. Few formats keep an order such as channels_last, of which the blocks of int8 are runs: these become fp32.
    """
    remainder, numbers = state.get("remainder"), without_codes(state, cut=False)
    if numbers is not state:
        numbers.pop(SCALE_KEY)
    return numbers if remainder is None or not is_sharded(remainder) else {**numbers, "remainder": remainder.int()}


def rename_options(group: dict[str, Any]) -> None:
    """Rename the options of a group saved by optimi, timm or an earlier Lion to those of `Lion`."""
    if group.get("low_precision") in ("kahan", "stochastic"):
        group["low_precision"] = "auto"
    group.pop("seed", None)
    for dtype in (torch.float32, torch.bfloat16):  # a state dict names the dtype
        if group.get("state_dtype") == str(dtype):
            group["state_dtype"] = dtype
    if "betas" not in group and "beta1" in group and "beta2" in group:
        group["betas"] = (group.pop("beta1"), group.pop("beta2"))
    if "caution" in group:
        group.setdefault("cautious", group.pop("caution"))


def check_placements(p: Tensor, m: Tensor) -> None:
    """Raise an error if the DTensor placements differ: the update would combine unrelated elements."""
    placements = [getattr(t, "placements", None) for t in (p, m)]
    if placements[1] != placements[0]:
        raise ValueError(
            f"Lion: a DTensor parameter and its exp_avg must have equal placements, got {placements[0]} and "
            f"{placements[1]}; load_state_dict(state_dict()) places the states like the parameters"
        )


def check_places(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """Raise an error if gradient or state have another shape or device than p, as after `p.data = ...`."""
    m = state["exp_avg"]
    # kernels read only these; other entries of a checkpoint (AdamW's step, on the CPU) may be on any device
    state_tensors = ((f"state {key}", state.get(key)) for key in ("exp_avg", SCALE_KEY, "remainder"))
    for name, t in (("gradient", g), *state_tensors):
        if t is not None and t.device != p.device:
            raise ValueError(
                f"Lion: a parameter is on {p.device} and its {name} on {t.device}; they must be on one device: after "
                "moving a model, load_state_dict(state_dict()) moves the states"
            )
    if p.is_conj() or p.is_neg() or m.is_conj() or m.is_neg():
        raise ValueError("Lion: a parameter or its exp_avg is lazily conjugated; give p.resolve_conj().resolve_neg()")
    if not p.is_complex() == g.is_complex() == m.is_complex():
        kinds = f"{p.dtype}, its gradient {g.dtype} and its exp_avg {m.dtype}"
        raise TypeError(f"Lion: a parameter is {kinds}; give all or none of them a complex dtype")
    if not p.shape == g.shape == m.shape:
        raise ValueError(
            f"Lion: a parameter has the shape {tuple(p.shape)}, its gradient {tuple(g.shape)} and its exp_avg "
            f"{tuple(m.shape)}; they must agree: after giving a parameter another shape, free its gradient and state"
        )

"""What `onepass.swap` leaves alone, and the reason that the report gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

import onepass
from swapping.norms import (
    ByGradMode,
    Centred,
    ChannelsFirst,
    Detached,
    Flat,
    FooRMSNorm,
    Gain,
    Gated,
    Guarded,
    InFloat,
    L2Norm,
    NoEps,
    NoEpsNorm,
    Noisy,
    OfChannels,
    OtherIn16Bits,
    OutsideEps,
    Quantised,
    Saves,
    Unbiased,
    Unlike,
    Widening,
    compiled,
    swap,
    with_buffer,
    with_child,
    with_eps,
    with_forward,
    with_parameter,
)

ALONE: list[Any] = [
    pytest.param(lambda: Centred(16), "its output differs by .* from (an RMS|a layer) norm's in float32", id="centred"),
    pytest.param(lambda: OutsideEps(16), "its output differs by .* from an RMS norm's in float32", id="outside-eps"),
    pytest.param(lambda: Unbiased(16384), "its output differs by .* from an RMS norm's in float32", id="unbiased"),
    pytest.param(lambda: Unlike(16), "its output differs by", id="l1"),
    pytest.param(lambda: Gain(16, torch.abs), "its output differs by", id="gain-abs"),
    pytest.param(lambda: Gain(16, torch.relu), "its output differs by", id="gain-relu"),
    pytest.param(lambda: Gain(16, lambda w: w.clamp(-9, 9)), "its output differs by", id="gain-clamp"),
    pytest.param(
        lambda: Guarded(16, lambda x: x.clamp(-100, 100)), r"differs by .* far from 1|NaN or infinite", id="clamp"
    ),
    pytest.param(lambda: Guarded(16, torch.nan_to_num), "where x is NaN or infinite", id="nan-to-num"),
    pytest.param(lambda: OfChannels(16), "its output", id="channels"),
    pytest.param(lambda: Detached(16), "its gradient differs by", id="detached"),
    pytest.param(lambda: Widening(16).bfloat16(), "its output is float32, an RMS norm's bfloat16", id="wide"),
    pytest.param(lambda: Widening(16), "its output is float32, an RMS norm's bfloat16", id="wide-once-cast"),
    pytest.param(lambda: Flat(16), "its output differs by .* from an RMS norm's in float32", id="two-dimensions"),
    pytest.param(lambda: ByGradMode(16), "its output differs by .* from an RMS norm's in float32", id="grad-mode"),
    pytest.param(lambda: OtherIn16Bits(256).bfloat16(), "its output differs by .* in bfloat16", id="other-in-bf16"),
    pytest.param(lambda: Noisy(16).eval(), "its output differs by", id="dropout"),
    pytest.param(
        lambda: ChannelsFirst(16),
        "its forward raises on random input in float32: RuntimeError: ",
        id="channels-first",
    ),
    pytest.param(lambda: Gated(16), "its forward takes hidden: .*, gate: .*; a norm's takes one tensor", id="gated"),
    pytest.param(lambda: Saves(16), "its class overrides get_extra_state", id="state"),
    pytest.param(lambda: NoEps(16), "^$", id="not-named"),
    pytest.param(lambda: NoEpsNorm(16), "it has no attribute eps or", id="no-eps"),
    pytest.param(L2Norm, "it has no weight", id="no-weight"),
    pytest.param(with_forward, "its forward is overwritten on the instance", id="instance-forward"),
    pytest.param(with_buffer, "it has buffers: count", id="buffer"),
    pytest.param(with_child, "it has modules inside: inner", id="child"),
    pytest.param(lambda: with_eps(-1.0), "its eps is -1.0", id="eps"),
    pytest.param(lambda: with_eps(torch.ones(())), r"its eps is tensor", id="eps-tensor"),
    pytest.param(lambda: with_parameter(nn.Parameter(torch.ones(2, 8))), "its weight has the shape", id="two-dims"),
    pytest.param(lambda: with_parameter(nn.Parameter(torch.ones(0))), "its width is 0", id="no-column"),
    pytest.param(lambda: with_parameter(Quantised(torch.ones(16))), "its weight is of type Quantised", id="subclass"),
    pytest.param(lambda: nn.LayerNorm(16).to(torch.complex64), "its weight is complex64", id="complex"),
    pytest.param(lambda: nn.LayerNorm(1), "its width is 1", id="one-column"),
    pytest.param(compiled, "it is compiled on its own", id="compiled"),
    pytest.param(lambda: weight_norm(nn.LayerNorm((2, 8))), "its parameters are .*weight_g", id="weight-norm"),
    pytest.param(lambda: parametrizations.weight_norm(nn.LayerNorm((2, 8))), "it has param", id="parametrized"),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:Complex modules:UserWarning")
@pytest.mark.parametrize(("make", "reason"), ALONE)
def test_left_alone(make: Callable[[], nn.Module], reason: str) -> None:
    norm = make()
    cls, state = type(norm), dict(vars(norm))
    report = swap(norm)
    assert report.exchanged == ()
    assert type(norm) is cls
    assert vars(norm).keys() == state.keys()
    if reason == "^$":
        assert report.layers == ()
        return
    (layer,) = report.left_alone
    assert layer.kind == cls.__name__
    assert re.search(reason, layer.reason), layer.reason
    with pytest.raises(ValueError, match=r"swap: strict, and these norms would be left alone\nleft alone"):
        swap(norm, strict=True)


def test_unknown_classes_are_left_alone() -> None:
    """Norms by name, and subclasses of torch's: left alone whatever they compute, with the way out; strict says so."""
    model = nn.Sequential(FooRMSNorm(16), InFloat(16), nn.LayerNorm(16))
    report = onepass.swap(model, strict=True)
    assert [layer.reason for layer in report.layers] == [
        *(f"its class is not known; also=({name},) if it computes a norm of every input"
          for name in ("FooRMSNorm", "InFloat")), "",
    ]  # fmt: skip
    report.undo()
    assert len(onepass.swap(model, also=FooRMSNorm).exchanged) == 2
    assert len(onepass.swap(model, also=(InFloat,), strict=True).exchanged) == 1
    # exactly the class, as a subclass may do something else
    assert not onepass.swap(Unlike(16), also=FooRMSNorm).exchanged
    with pytest.raises(ValueError, match="strict"):
        onepass.swap(Unlike(16), also=Unlike, strict=True)
    for also in ("FooRMSNorm", FooRMSNorm(16), [FooRMSNorm, int]):
        with pytest.raises(TypeError, match="also must be a class of modules or several"):
            onepass.swap(model, also=also)  # type: ignore[arg-type]


def test_other_norms_have_no_line() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.LocalResponseNorm(2), onepass.nn.LayerNorm(4),
        onepass.nn.RMSNorm(4), onepass.nn.RoutedFeedForward(8, k=2),
    )  # fmt: skip
    report = swap(model, strict=True)
    assert report.layers == ()
    assert str(report) == "no LayerNorm or RMSNorm found"


def test_a_container_is_not_a_norm() -> None:
    class PreLayerNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

    (layer,) = swap(nn.Sequential(PreLayerNorm())).layers
    assert layer.names == ("0.norm",)
    assert layer.becomes

"""What `onepass.swap` leaves alone, and the reason that the report gives."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

import onepass
from swapping import norms as n
from swapping.norms import FooRMSNorm, InFloat, Unlike, altered, swap

# by id: a module, and the reason
ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "centred": (lambda: n.Centred(16), "its output differs by .* from (an RMS|a layer) norm's"),
    "l1": (lambda: Unlike(16), "its output differs by"),
    "detached": (lambda: n.Detached(16), "its gradient differs by"),
    "wide": (lambda: n.Widening(16).bfloat16(), "its output is float32, an RMS norm's bfloat16"),
    "dropout": (lambda: n.Noisy(16).eval(), "its output differs by"),
    "channels-first": (lambda: n.ChannelsFirst(16), "its forward raises on random input in float32: RuntimeError: "),
    "gated": (lambda: n.Gated(16), "its forward takes hidden: .*, gate: .*; a norm's takes one tensor"),
    "state": (lambda: n.Saves(16), "its class overrides get_extra_state"),
    "not-named": (lambda: n.NoEps(16), "^$"),
    "no-eps": (lambda: n.NoEpsNorm(16), "it has no attribute eps or"),
    "no-weight": (n.L2Norm, "it has no weight"),
    "instance-forward": (
        lambda: altered(nn.LayerNorm(16), lambda m: setattr(m, "forward", lambda x: 2 * x)),
        "its forward is overwritten on the instance"),
    "buffer": (
        lambda: altered(FooRMSNorm(16), lambda m: m.register_buffer("count", torch.zeros(1))), "it has buffers: count"),
    "child": (
        lambda: altered(FooRMSNorm(16), lambda m: setattr(m, "inner", nn.Identity())), "it has modules inside: inner"),
    "eps": (lambda: altered(nn.LayerNorm(16), lambda m: setattr(m, "eps", -1.0)), "its eps is -1.0"),
    "two-dims": (lambda: with_weight(nn.Parameter(torch.ones(2, 8))), "its weight has the shape"),
    "subclass": (lambda: with_weight(n.Quantised(torch.ones(16))), "its weight is of type Quantised"),
    "complex": (lambda: nn.LayerNorm(16).to(torch.complex64), "its weight is complex64"),
    "one-column": (lambda: nn.LayerNorm(1), "its width is 1"),
    "compiled": (lambda: altered(nn.LayerNorm(16), lambda m: m.compile(backend="eager")), "it is compiled on its own"),
    "weight-norm": (lambda: weight_norm(nn.LayerNorm((2, 8))), "its parameters are .*weight_g"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.LayerNorm((2, 8))), "it has param"),
}  # fmt: skip


def with_weight(p: nn.Parameter) -> nn.Module:
    return altered(FooRMSNorm(16), lambda m: setattr(m, "weight", p))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:Complex modules:UserWarning")
@pytest.mark.parametrize("name", ALONE)
def test_left_alone(name: str) -> None:
    make, reason = ALONE[name]
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
    assert layer.kind in (f"{cls.__module__}.{cls.__name__}", f"torch.nn.{cls.__name__}")
    assert re.search(reason, layer.reason), layer.reason
    with pytest.raises(ValueError, match=r"swap: strict, and these norms would be left alone\nleft alone"):
        swap(norm, strict=True)


def test_unknown_classes_are_left_alone() -> None:
    """Norms by name, and subclasses of torch's: left alone whatever they compute, with the way out; strict says so."""
    model = nn.Sequential(FooRMSNorm(16), InFloat(16), nn.LayerNorm(16))
    report = onepass.swap(model, strict=True)
    assert [layer.reason for layer in report.layers] == [
        *(f"its class is not known; also=(swapping.norms.{name},) if it computes a norm of every input"
          for name in ("FooRMSNorm", "InFloat")), "",
    ]  # fmt: skip
    report.undo()
    assert len(onepass.swap(model, also=FooRMSNorm).exchanged) == 2
    assert len(onepass.swap(model, also=(InFloat,), strict=True).exchanged) == 1
    # exactly the class, as a subclass may do something else
    assert not onepass.swap(Unlike(16), also=FooRMSNorm).exchanged
    with pytest.raises(ValueError, match="strict"):
        onepass.swap(Unlike(16), also=Unlike, strict=True)
    for also, got in (("FooNorm", "'FooNorm'"), (FooRMSNorm(16), "FooRMSNorm"), ([FooRMSNorm, int], "<class 'int'>")):
        with pytest.raises(TypeError, match=f"also must be a class of modules or several, got {got}"):
            onepass.swap(model, also=also)  # type: ignore[arg-type]


def test_other_norms_have_no_line() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.LocalResponseNorm(2), onepass.nn.LayerNorm(4),
        onepass.nn.RMSNorm(4), onepass.nn.RoutedFeedForward(8, k=2),
    )  # fmt: skip
    report = swap(model, strict=True)
    assert report.layers == ()
    assert str(report) == "4 already of onepass"
    assert str(swap(nn.Linear(2, 2))) == "no LayerNorm or RMSNorm found"


@pytest.mark.parametrize(
    ("module", "name", "known"),
    [
        ("timm.layers.norm", "LayerNorm", True), ("timm.layers.norm", "LayerNormFp32", True),
        ("timm.layers.norm", "LayerNorm2d", False), ("diffusers.models.normalization", "FP32LayerNorm", True),
        ("torchvision.models.convnext", "LayerNorm2d", False), ("mine", "LayerNorm", False),
    ],
)  # fmt: skip
def test_plain_norms_of_other_libraries_are_known(module: str, name: str, known: bool) -> None:
    cls = type(name, (nn.LayerNorm,), {"__module__": module, "forward": nn.LayerNorm.forward})
    (layer,) = onepass.swap(cls(16)).layers
    assert layer.kind == f"{module}.{name}"
    assert layer.becomes == ("onepass.nn.LayerNorm" if known else "")
    assert known or layer.reason.startswith(f"its class is not known; also=({module}.{name},)")


def test_an_rms_norm_without_a_bias_of_its_own_is_known() -> None:
    """Of diffusers: a bias that is None stands among its attributes."""
    norm = altered(
        type("RMSNorm", (FooRMSNorm,), {"__module__": "diffusers.models"})(16), lambda m: setattr(m, "bias", None)
    )
    assert onepass.swap(norm, strict=True).exchanged

"""The report of `onepass.swap`, its globs, the way back, and the rest of torch: compilers, readers, devices."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import onepass
from onepass import SwapReport
from swapping.norms import FooRMSNorm, Tiny, Unlike, shuffle, swap


def two_layers() -> nn.ModuleDict:
    layers = nn.ModuleList(Tiny() for _ in range(2))
    return nn.ModuleDict({"layers": layers, "odd": Unlike(16), "last": nn.LayerNorm(16)})


def test_report() -> None:
    model = two_layers()
    dry = swap(model, dry_run=True)
    assert dry.dry_run
    assert type(model["last"]) is nn.LayerNorm
    dry.undo()
    report = swap(model)
    lines = str(report).splitlines()
    assert lines[:3] == [
        "exchanged   3  torch.nn.LayerNorm -> onepass.nn.LayerNorm                 layers.*.a, last",
        "exchanged   2  torch.nn.RMSNorm -> onepass.nn.RMSNorm                     layers.*.b",
        "exchanged   2  swapping.norms.FooRMSNorm -> onepass.nn.RMSNorm(offset=1)  layers.*.c",
    ]
    assert len(lines) == 4
    places = [line.index(word) for line, word in zip(lines, ("layers", "layers", "layers", "odd: "), strict=True)]
    assert len(set(places)) == 1
    assert re.fullmatch(
        r"left alone  1  swapping.norms.Unlike +odd: its output differs by \d\.\de-\d\d from an RMS norm's", lines[3]
    ), lines[3]
    assert repr(report) == "SwapReport(exchanged=7, left_alone=1, dry_run=False)"
    assert str(dry).splitlines()[0].startswith("would exchange  3  torch.nn.LayerNorm -> ")
    many = nn.ModuleDict({name: nn.LayerNorm(4) for name in "abcd"})
    assert str(swap(many)).endswith("  a, b, c, ...")


def test_globs() -> None:
    model = two_layers()
    report = swap(model, include=["layers.*.b", "l*.a", "last"], exclude="layers.1.*", strict=True)
    assert [layer.names[0] for layer in report.exchanged] == ["layers.0.a", "layers.0.b", "last"]
    why = {layer.names[0]: layer.reason for layer in report.left_alone}
    assert why == {
        "layers.0.c": "not included", "layers.1.a": "excluded", "layers.1.b": "excluded",
        "layers.1.c": "not included", "odd": "not included",
    }  # fmt: skip
    with pytest.raises(
        ValueError, match=r"swap: exclude 'layer\.0' matches no norm of the model; it has layers\.0\.c, "
    ):
        swap(model, exclude="layer.0")
    with pytest.raises(TypeError, match="swap: include must be a glob or several, got int"):
        swap(model, include=[3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="swap: exclude must be a glob or several, got NoneType"):
        swap(model, exclude=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"swap: model must be a torch\.nn\.Module, got str"):
        swap("model")  # type: ignore[arg-type]
    assert swap(nn.Linear(2, 2), exclude="head.*").layers == ()


def test_undo() -> None:
    model = shuffle(Tiny())
    model.a.eps = 1e-3
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    types = [type(m) for m in model.modules()]
    x = torch.randn(3, 16)
    want = model(x)
    with swap(model) as report:
        assert isinstance(report, SwapReport)
        assert [type(m) for m in model.modules()] != types
        torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)
        model.eval().to(torch.float64)
    assert [type(m) for m in model.modules()] == types
    for name, m in model.named_modules():
        assert vars(m).keys() == before[name].keys()
        assert vars(m) == {**before[name], "training": False}
    assert model.a.eps == 1e-3
    assert model.a.weight.dtype == torch.float64
    report.undo()
    with pytest.raises(KeyError), swap(model):
        raise KeyError
    assert [type(m) for m in model.modules()] == types


def test_swap_twice() -> None:
    model = Tiny()
    first, second = swap(model), swap(model)
    assert second.layers == ()
    assert str(second) == "3 already of onepass"
    assert swap(nn.ModuleList([model, nn.LayerNorm(4)]), include=("0.*", "1")).ours == 3
    with pytest.raises(ValueError, match="include '0' matches no norm of the model; it has a, b, c"):
        swap(model, include="0", strict=True)
    with pytest.raises(ValueError, match="include '0' matches no norm of the model; it has none"):
        swap(nn.Linear(2, 2), include="0")
    second.undo()
    assert type(model.a) is onepass.nn.LayerNorm
    first.undo()
    assert type(model.a) is nn.LayerNorm


def test_undo_refuses_what_changed_since() -> None:
    model = Tiny()
    report = swap(model)
    parametrize.register_parametrization(model.c, "weight", nn.Identity())
    with pytest.raises(RuntimeError, match=r"undo: c was exchanged for .* and is a ParametrizedRMSNorm now"):
        report.undo()
    assert type(model.a) is onepass.nn.LayerNorm
    parametrize.remove_parametrizations(model.c, "weight")
    report.undo()
    assert type(model.c) is FooRMSNorm


def test_a_parameter_put_in_later_stays() -> None:
    model = Tiny()
    report = swap(model)
    model.a.weight = nn.Parameter(torch.full((16,), 2.0))
    report.undo()
    assert model.a.weight[0] == 2


def test_compiled_before_and_after() -> None:
    """torch.compile sees the new class and compiles again."""
    model, x = shuffle(Tiny()), torch.randn(2, 16)
    want = model(x)
    program = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(program(x), want)
    seen: list[type] = []
    with swap(model):
        model.c.register_forward_hook(lambda m, args, y: seen.append(type(m)))
        torch.testing.assert_close(program(x), want)
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), want)
        assert set(seen) == {onepass.nn.RMSNorm}
    torch.testing.assert_close(program(x), want)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(training: bool, norm_first: bool) -> None:
    """In evaluation mode torch reads the norms' weights itself and calls neither."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = shuffle(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).train(training)
    x = torch.randn(2, 5, 16)
    with torch.set_grad_enabled(training):
        want = model(x)
        report = swap(model, strict=True)
        assert len(report.exchanged) == 4
        # random weights of variance 1: activations of about 10³, so a relative bound
        torch.testing.assert_close(model(x), want, rtol=0.0, atol=1e-4 * float(want.detach().abs().max()))

"""`onepass.swap` on modules of torch and on classes made up here: what it exchanges, what it leaves alone, and undo."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

import onepass
from onepass import SwapReport, swap


class FooRMSNorm(nn.Module):
    """As transformers' write it; the options make it something else."""

    def __init__(self, dim: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim) - offset)
        self.variance_epsilon = eps
        self.offset_of_mine = offset

    def forward(self, hidden: Tensor) -> Tensor:
        h = hidden.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return ((self.offset_of_mine + self.weight.float()) * h).to(hidden.dtype)


class Tiny(nn.Module):
    """Two norms of torch, one by name, linear layers between."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.LayerNorm(dim), nn.RMSNorm(dim), FooRMSNorm(dim, offset=1.0)
        self.l1, self.l2 = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.l2(self.b(self.l1(self.a(x)))))


def shuffle(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    return model


# what is exchanged

LAYER, RMS = onepass.nn.LayerNorm, onepass.nn.RMSNorm
NORMS: list[Any] = [
    pytest.param(lambda: nn.LayerNorm(16), (16,), LAYER, 0, id="layer"),
    pytest.param(lambda: nn.LayerNorm(16, eps=1e-12), (16,), LAYER, 0, id="layer-small-eps"),
    pytest.param(lambda: nn.LayerNorm((3, 16)), (3, 16), LAYER, 0, id="layer-two-dims"),
    pytest.param(lambda: nn.LayerNorm((3, 16), bias=False), (3, 16), LAYER, 0, id="layer-no-bias"),
    pytest.param(lambda: nn.LayerNorm(16, elementwise_affine=False), (16,), LAYER, 0, id="layer-not-affine"),
    pytest.param(lambda: nn.LayerNorm(4), (4,), LAYER, 0, id="layer-narrow"),
    pytest.param(lambda: nn.RMSNorm(16), (16,), RMS, 0, id="rms"),
    pytest.param(lambda: nn.RMSNorm((3, 16), eps=1e-3), (3, 16), RMS, 0, id="rms-two-dims"),
    pytest.param(lambda: nn.RMSNorm(16, elementwise_affine=False), (16,), RMS, 0, id="rms-not-affine"),
    pytest.param(lambda: nn.RMSNorm(1), (1,), RMS, 0, id="rms-one-column"),
    pytest.param(lambda: FooRMSNorm(16), (16,), RMS, 0, id="named"),
    pytest.param(lambda: FooRMSNorm(16, offset=1.0), (16,), RMS, 1, id="named-offset"),
    pytest.param(lambda: FooRMSNorm(1, eps=1e-2), (1,), RMS, 0, id="named-one-column"),
    pytest.param(lambda: NamedLayerNorm(16), (16,), LAYER, 0, id="named-layer"),
    pytest.param(lambda: NamedLayerNorm(16, bias=True), (16,), LAYER, 0, id="named-layer-bias"),
    pytest.param(lambda: InFloat(16), (16,), LAYER, 0, id="subclass"),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def spread(*shape: int) -> Tensor:
    """Numbers of either sign that are at least a half, so that no row is close to zero."""
    x = torch.randn(shape)
    return x + x.sign() / 2


@pytest.mark.parametrize(("make", "shape", "cls", "offset"), NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("rows", [(2, 5), (1,), (0,)], ids=["rows", "one-row", "no-row"])
def test_exchanged(
    make: Callable[[], nn.Module], shape: tuple[int, ...], cls: type, offset: float, dtype, rows
) -> None:
    theirs = shuffle(make()).to(dtype)
    ours = copy.deepcopy(theirs)
    report = swap(ours)
    assert [(layer.names, layer.kind) for layer in report.exchanged] == [(("",), type(theirs).__name__)]
    assert type(ours) is cls
    assert getattr(ours, "offset", 0) == offset
    assert vars(ours).keys() >= vars(cls(shape)).keys()
    x = spread(*rows, *shape).to(dtype)
    y, want = ours(x), theirs(x)
    assert y.dtype == want.dtype
    fp32 = torch.finfo(torch.float32).eps
    # theirs rounds up to three times in 16 bits, ours once: two spacings; sums of up to 48 numbers in fp32
    eps = torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0
    torch.testing.assert_close(y, want, rtol=2 * eps + 100 * fp32, atol=100 * fp32)
    if dtype.itemsize == 2:
        return
    dy = torch.randn(x.shape, dtype=dtype)
    leaves = [x.requires_grad_(), *ours.parameters()], [x, *theirs.parameters()]
    grads = [torch.autograd.grad(m(x), leaf, dy) for m, leaf in zip((ours, theirs), leaves, strict=True)]
    # sums of up to 48 terms, each below 10
    torch.testing.assert_close(*grads, rtol=100 * fp32, atol=1000 * fp32)


def test_offset_of_the_module() -> None:
    norm = onepass.nn.RMSNorm(8, 1e-6, offset=1.0)
    assert torch.equal(norm.weight, torch.zeros(8))
    assert repr(norm) == "RMSNorm((8,), eps=1e-06, elementwise_affine=True, offset=1.0)"
    x = torch.randn(3, 8)
    shuffle(norm)
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (8,), 1 + norm.weight, 1e-6))


@pytest.mark.parametrize("name", ["RoutedFeedForward", "RoutedAttention"])
def test_a_fused_layer_obeys_the_offset(name: str) -> None:
    """The fused nodes multiply by the weight alone, so they step aside."""
    feed_forward = name == "RoutedFeedForward"
    options = {"k": 2} if feed_forward else {"k_q": 2, "k_kv": 2, "heads": 1, "dim_head": 8}
    layer = getattr(onepass.nn, name)(8, **options)
    other = copy.deepcopy(layer)
    for m in other.modules():
        if isinstance(m, onepass.nn.RMSNorm):
            m.offset = 1.0
            with torch.no_grad():
                m.weight -= 1
    x = torch.randn(1, 8, 8)
    torch.testing.assert_close(other(x), layer(x))


# what stays


def test_everything_else_stays() -> None:
    model = shuffle(Tiny()).bfloat16().eval()
    model.c.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    keys, modules = list(model.state_dict()), list(model.modules())
    report = swap(model)
    assert len(report.exchanged) == 3
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is p for name, p in before.items())
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert not model.c.weight.requires_grad
    assert not any(m.training for m in model.modules())
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in model.parameters())
    model.load_state_dict(Tiny().state_dict())


def test_an_optimizer_built_before_goes_on() -> None:
    models = [shuffle(Tiny()), Tiny()]
    models[1].load_state_dict(models[0].state_dict())
    losses: list[list[Tensor]] = [[], []]
    x = torch.randn(4, 16)
    for model, lost in zip(models, losses, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        if model is models[1]:
            swap(model)
        for _ in range(3):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lost.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0.0)
    assert losses[1][2] != losses[1][0]


def test_hooks() -> None:
    """Each kind runs before the exchange, after it and after the way back; handles keep working."""
    model = Tiny()
    norm = model.c
    seen: list[str] = []
    norm.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    handle = norm.register_forward_hook(lambda m, args, y: seen.append("forward"))
    norm.register_full_backward_pre_hook(lambda m, dy: seen.append("backward_pre"))
    norm.register_full_backward_hook(lambda m, dx, dy: seen.append("backward"))
    norm.register_state_dict_pre_hook(lambda m, prefix, keep: seen.append("save_pre"))
    norm.register_state_dict_post_hook(lambda m, state, prefix, meta: seen.append("save"))
    # torch binds this one to the module by a weak reference
    norm.register_load_state_dict_pre_hook(lambda m, *args: seen.append(f"load_pre {m is model.c}"))
    norm.register_load_state_dict_post_hook(lambda m, keys: seen.append("load"))
    kinds = ["pre", "forward", "backward_pre", "backward", "save_pre", "save", "load_pre True", "load"]

    def all_of_them() -> list[str]:
        seen.clear()
        model(torch.randn(2, 16)).sum().backward()
        model.load_state_dict(model.state_dict())
        return seen

    assert all_of_them() == kinds
    seen.clear()
    report = swap(model)
    assert seen == []  # the check calls none
    assert all_of_them() == kinds
    added = model.c.register_forward_hook(lambda m, args, y: seen.append("added"))
    handle.remove()
    report.undo()
    assert type(model.c) is FooRMSNorm
    kinds[1] = "added"
    assert all_of_them() == kinds
    added.remove()
    assert "added" not in all_of_them()


def test_the_check_leaves_no_trace() -> None:
    model = shuffle(Tiny())
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        report = swap(model)
        assert len(swap(ByProduct(16)).exchanged) == 1
    assert len(report.exchanged) == 3
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        assert len(swap(Tiny()).exchanged) == 3
        assert not torch.is_grad_enabled()
    state = torch.get_rng_state()
    noisy, counting = Noisy(16).eval(), Counting(16)
    assert swap(noisy).exchanged == ()
    assert torch.equal(torch.get_rng_state(), state)
    assert not noisy.training
    assert len(swap(counting).exchanged) == 1
    assert (counting.seen, counting.calls, counting._buffers) == ([], 0, {})
    torch.set_default_dtype(torch.float64)
    try:
        assert len(swap(Tiny()).exchanged) == 3
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert len(swap(model, dry_run=True).exchanged) == 0


def test_meta_then_weights() -> None:
    """Exchanged before the weights are there; the check uses weights of its own."""
    with torch.device("meta"):
        model = Tiny()
    report = swap(model)
    assert len(report.exchanged) == 3
    assert all(p.is_meta for p in model.parameters())
    full = shuffle(Tiny())
    model.load_state_dict(full.state_dict(), assign=True)
    x = torch.randn(2, 16)
    torch.testing.assert_close(model(x), full(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fill", [0.0, float("nan")])
def test_weights_at_hand_do_not_matter(fill: float) -> None:
    """With zero weights every function would be the same; with NaN none."""
    for norm, count in ((FooRMSNorm(16), 1), (Centred(16), 0)):
        nn.init.constant_(norm.weight, fill)
        assert len(swap(norm).exchanged) == count


def test_shared_norms() -> None:
    model = Tiny()
    model.again = model.a
    other = nn.LayerNorm(16)
    other.weight = model.a.weight
    model.other = other
    report = swap(model)
    assert model.again is model.a
    assert model.other.weight is model.a.weight
    assert [layer.names for layer in report.exchanged] == [("a", "again"), ("b",), ("c",), ("other",)]
    report.undo()
    assert type(model.again) is nn.LayerNorm


def test_copies_and_pickles() -> None:
    model = shuffle(Tiny())
    report = swap(model)
    x = torch.randn(2, 16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(twin(x), model(x))
    report.undo()
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert type(pickle.loads(pickle.dumps(model)).c) is FooRMSNorm


# what is left alone


class NamedLayerNorm(nn.Module):
    def __init__(self, dim: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = 1e-5
        if bias:
            self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, getattr(self, "bias", None), self.eps)


class InFloat(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        w, b = self.weight.float(), self.bias.float()
        return nn.functional.layer_norm(input.float(), self.normalized_shape, w, b, self.eps).to(input.dtype)


class Centred(FooRMSNorm):
    """Divides by the standard deviation with N − 1, as older layer norms do."""

    def forward(self, hidden: Tensor) -> Tensor:
        centred = hidden - hidden.mean(-1, keepdim=True)
        return self.weight * centred / (centred.square().sum(-1, keepdim=True) / (hidden.shape[-1] - 1) + 1e-6).sqrt()


class OutsideEps(FooRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden / (hidden.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Unbiased(FooRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        n = hidden.shape[-1]
        return super().forward(hidden) * ((n - 1) / n) ** 0.5


class Unlike(FooRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * torch.nn.functional.normalize(hidden, p=1, dim=-1)


class Detached(FooRMSNorm):
    """The same output, another gradient."""

    def forward(self, hidden: Tensor) -> Tensor:
        r = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden * r.detach()


class Widening(FooRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.float())


class OtherIn16Bits(FooRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (1 if hidden.dtype == torch.float32 else 1.03)


class Noisy(FooRMSNorm):
    """Another function in training mode, and one that draws random numbers."""

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(hidden), 0.5, self.training)


class Counting(FooRMSNorm):
    """Its forward writes to the module."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.seen: list[int] = []
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.append(hidden.numel())
        self.calls += 1
        self.register_buffer("last", hidden)
        return super().forward(hidden)


class ByProduct(FooRMSNorm):
    """Autocast would compute the sum of squares in bf16."""

    def forward(self, hidden: Tensor) -> Tensor:
        squares = (hidden.unsqueeze(-2) @ hidden.unsqueeze(-1)).squeeze(-1)
        return self.weight * hidden * torch.rsqrt(squares / hidden.shape[-1] + self.variance_epsilon)


class ChannelsFirst(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Gated(FooRMSNorm):
    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden if gate is None else hidden * gate)


class Saves(FooRMSNorm):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}


class NoEps(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class NoEpsNorm(NoEps):
    pass


class L2Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1)


def with_forward() -> nn.Module:
    norm = nn.LayerNorm(16)
    norm.forward = lambda x: 2 * x  # type: ignore[method-assign]
    return norm


def with_buffer() -> nn.Module:
    norm = FooRMSNorm(16)
    norm.register_buffer("count", torch.zeros(1))
    return norm


def with_child() -> nn.Module:
    norm = FooRMSNorm(16)
    norm.inner = nn.Linear(16, 16)
    return norm


def with_eps(eps: Any) -> nn.Module:
    norm = nn.LayerNorm(16)
    norm.eps = eps
    return norm


def with_parameter(p: Any) -> nn.Module:
    norm = FooRMSNorm(16)
    norm.weight = p
    return norm


def compiled() -> nn.Module:
    norm = nn.LayerNorm(16)
    norm.compile(backend="eager")
    return norm


class Quantised(nn.Parameter):
    pass


ALONE: list[Any] = [
    pytest.param(lambda: Centred(16), "its output differs by .* from (an RMS|a layer) norm's in float32", id="centred"),
    pytest.param(lambda: OutsideEps(16), "its output differs by .* from an RMS norm's in float32", id="outside-eps"),
    pytest.param(lambda: Unbiased(16384), "its output differs by .* from an RMS norm's in float32", id="unbiased"),
    pytest.param(lambda: Unlike(16), "its output differs by", id="l1"),
    pytest.param(lambda: Detached(16), "its gradient differs by", id="detached"),
    pytest.param(lambda: Widening(16).bfloat16(), "its output is float32, an RMS norm's bfloat16", id="wide"),
    pytest.param(lambda: OtherIn16Bits(256).bfloat16(), "its output differs by .* in bfloat16", id="other-in-bf16"),
    pytest.param(lambda: Noisy(16).eval(), "its output differs by", id="dropout"),
    pytest.param(lambda: ChannelsFirst(16), "its forward raises RuntimeError on random input", id="channels-first"),
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


# the report, globs, the way back


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
        "exchanged   3  LayerNorm -> onepass.nn.LayerNorm           layers.*.a, last",
        "exchanged   2  RMSNorm -> onepass.nn.RMSNorm               layers.*.b",
        "exchanged   2  FooRMSNorm -> onepass.nn.RMSNorm(offset=1)  layers.*.c",
    ]
    assert len(lines) == 4
    places = [line.index(word) for line, word in zip(lines, ("layers", "layers", "layers", "odd: "), strict=True)]
    assert len(set(places)) == 1
    assert re.fullmatch(
        r"left alone  1  Unlike +odd: its output differs by \d\.\de-\d\d from an RMS norm's in float32", lines[3]
    ), lines[3]
    assert repr(report) == "SwapReport(exchanged=7, left_alone=1, dry_run=False)"
    assert str(dry).splitlines()[0].startswith("would exchange  3  LayerNorm -> ")
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


@pytest.mark.parametrize("make", [lambda: NamedLayerNorm(16), lambda: InFloat(16), lambda: nn.RMSNorm(16)])
def test_undo_leaves_nothing(make: Callable[[], nn.Module]) -> None:
    norm = make()
    before, parameters = dict(vars(norm)), dict(norm._parameters)
    swap(norm).undo()
    assert vars(norm) == before
    assert list(norm._parameters.items()) == list(parameters.items())


def test_swap_twice() -> None:
    model = Tiny()
    first, second = swap(model), swap(model)
    assert second.layers == ()
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


def test_strict_exchanges_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(16), Unlike(16))
    with pytest.raises(ValueError, match="strict"):
        swap(model, strict=True)
    assert type(model[0]) is nn.LayerNorm
    assert len(swap(model, strict=True, exclude="1").exchanged) == 1


# with the rest of torch


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


def test_wrapped_models_are_refused(tmp_path) -> None:
    code = f"""
import torch, onepass
from torch import nn
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=0, world_size=1)
wrapped = [nn.parallel.DistributedDataParallel(nn.Sequential(nn.LayerNorm(8)))]
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1,))
wrapped.append(fully_shard(nn.Sequential(nn.LayerNorm(8)), mesh=mesh))
wrapped.append(nn.Sequential(fully_shard(nn.Sequential(nn.LayerNorm(8)), mesh=mesh)))
for model in wrapped:
    try:
        onepass.swap(model)
    except ValueError as e:
        print(e)
model = nn.Sequential(nn.LayerNorm(8))
from torch.distributed.tensor import distribute_tensor, Replicate
model[0].weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Replicate()]))
print(onepass.swap(model).left_alone[0].reason)
swapped = nn.Sequential(nn.LayerNorm(8))
onepass.swap(swapped)
ddp = nn.parallel.DistributedDataParallel(swapped)
ddp(torch.randn(2, 8)).sum().backward()
print(ddp.module[0].weight.grad is not None)
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "swap: the model is wrapped in DistributedDataParallel; swap first, then wrap",
        "swap: the model is wrapped in FSDPSequential; swap first, then wrap",
        "swap: 0 is wrapped in FSDPSequential; swap first, then wrap",
        "its weight is of type DTensor",
        "True",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 768, 4096, 5120, 16384, 65536])
def test_on_a_gpu(width: int, dtype: torch.dtype) -> None:
    model = shuffle(nn.ModuleList([nn.LayerNorm(width), nn.RMSNorm(width), FooRMSNorm(width, offset=1.0)]))
    model.to("cuda", dtype)
    x = torch.randn(8, width, device="cuda", dtype=dtype)
    want = [m(x) for m in model]
    state = torch.cuda.get_rng_state()
    assert len(swap(model, strict=True).exchanged) == 3
    assert torch.equal(torch.cuda.get_rng_state(), state)
    fp32 = torch.finfo(torch.float32).eps
    eps = torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0
    for m, y in zip(model, want, strict=True):
        # the sums' orders differ, and their error grows as the root of the width; 16 bits: two spacings
        scale = y.float().abs().amax()
        bound = 2 * eps * y.float().abs() + 8 * width**0.5 * fp32 * scale
        assert bool(((m(x).float() - y.float()).abs() <= bound).all())


@pytest.mark.gpu
def test_dtypes_under_autocast_on_a_gpu() -> None:
    """torch's LayerNorm returns fp32 there, ours the dtype of x."""
    norm = nn.LayerNorm(16, device="cuda")
    x = torch.randn(2, 16, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        want = norm(x)
        swap(norm, strict=True)
        got = norm(x)
    assert (want.dtype, got.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(got.float(), want, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-5)

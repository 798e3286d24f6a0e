"""onepass.swap: what it exchanges, that all else stays, the report, and the way back."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import onepass
from onepass import SwapReport
from onepass.swapping.recognise import path_of
from swapping.norms import (
    ByProduct,
    Centred,
    Counting,
    FooRMSNorm,
    InFloat,
    NamedLayerNorm,
    Noisy,
    Tiny,
    Unlike,
    shuffle,
    swap,
)

LAYER, RMS = onepass.nn.LayerNorm, onepass.nn.RMSNorm
NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], type, int]] = {
    "layer": (lambda: nn.LayerNorm(16), (16,), LAYER, 0),
    "layer-small-eps": (lambda: nn.LayerNorm(16, eps=1e-12), (16,), LAYER, 0),
    "layer-two-dims": (lambda: nn.LayerNorm((3, 16)), (3, 16), LAYER, 0),
    "layer-no-bias": (lambda: nn.LayerNorm((3, 16), bias=False), (3, 16), LAYER, 0),
    "layer-not-affine": (lambda: nn.LayerNorm(16, elementwise_affine=False), (16,), LAYER, 0),
    "layer-narrow": (lambda: nn.LayerNorm(4), (4,), LAYER, 0),
    "rms": (lambda: nn.RMSNorm(16), (16,), RMS, 0),
    "rms-two-dims": (lambda: nn.RMSNorm((3, 16), eps=1e-3), (3, 16), RMS, 0),
    "rms-not-affine": (lambda: nn.RMSNorm(16, elementwise_affine=False), (16,), RMS, 0),
    "rms-one-column": (lambda: nn.RMSNorm(1), (1,), RMS, 0),
    "named": (lambda: FooRMSNorm(16), (16,), RMS, 0),
    "named-offset": (lambda: FooRMSNorm(16, offset=1.0), (16,), RMS, 1),
    "named-one-column": (lambda: FooRMSNorm(1, eps=1e-2), (1,), RMS, 0),
    "named-layer": (lambda: NamedLayerNorm(16), (16,), LAYER, 0),
    "named-layer-bias": (lambda: NamedLayerNorm(16, bias=True), (16,), LAYER, 0),
    "subclass": (lambda: InFloat(16), (16,), LAYER, 0),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def spread(*shape: int) -> Tensor:
    """Numbers of either sign that are at least a half, so that no row is close to zero."""
    x = torch.randn(shape)
    return x + x.sign() / 2


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("rows", [(2, 5), (1,), (0,)], ids=["rows", "one-row", "no-row"])
def test_exchanged(name: str, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    make, shape, cls, offset = NORMS[name]
    theirs = shuffle(make()).to(dtype)
    ours = copy.deepcopy(theirs)
    report = swap(ours)
    assert [(layer.names, layer.kind) for layer in report.exchanged] == [(("",), path_of(type(theirs)))]
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


def test_everything_else_stays() -> None:
    model = shuffle(Tiny()).bfloat16().eval()
    model.c.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    keys, modules = list(model.state_dict()), list(model.modules())
    assert len(swap(model).exchanged) == 3
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is p for name, p in before.items())
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert not model.c.weight.requires_grad
    assert not any(m.training for m in model.modules())
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in model.parameters())
    model.load_state_dict(Tiny().state_dict())


def test_hooks() -> None:
    """Each kind runs before the exchange, after it and after the way back; handles keep working."""
    model = Tiny()
    seen: list[str] = []
    handles: dict[str, Any] = {}
    for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward", "state_dict_pre", "state_dict_post",
                 "load_state_dict_pre", "load_state_dict_post"):  # fmt: skip
        # torch binds one of them to the module by a weak reference
        handles[kind] = getattr(model.c, f"register_{kind}_hook")(
            lambda m, *args, kind=kind: seen.append(f"{kind} {m is model.c}")
        )

    def all_of_them() -> list[str]:
        seen.clear()
        model(torch.randn(2, 16)).sum().backward()
        model.load_state_dict(model.state_dict())
        return seen

    wanted = [f"{kind} True" for kind in handles]
    assert all_of_them() == wanted
    seen.clear()
    report = swap(model)
    assert seen == []  # the check calls none
    assert all_of_them() == wanted
    handles["forward"].remove()
    report.undo()
    assert type(model.c) is FooRMSNorm
    wanted.remove("forward True")
    assert all_of_them() == wanted


def test_nothing_warns(recwarn: pytest.WarningsRecorder) -> None:
    torch.set_warn_always(True)
    try:
        onepass.swap(nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16)))
    finally:
        torch.set_warn_always(False)
    assert not [str(w.message) for w in recwarn]


def test_the_check_leaves_no_trace() -> None:
    model, state = shuffle(Tiny()), torch.get_rng_state()
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
    swap(counting)
    assert (counting.seen, counting.calls, counting._buffers) == ([], 0, {})
    with torch.device("meta"):
        assert len(swap(model, dry_run=True).exchanged) == 0
    torch.set_default_dtype(torch.float64)
    assert len(swap(Tiny()).exchanged) == 3


def test_meta_then_weights() -> None:
    """Exchanged before the weights are there; the check uses weights of its own."""
    with torch.device("meta"):
        model = Tiny()
    assert len(swap(model).exchanged) == 3
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
    model.other = nn.LayerNorm(16)
    model.other.weight = model.a.weight
    report = swap(model)
    assert model.again is model.a
    assert model.other.weight is model.a.weight
    assert [layer.names for layer in report.exchanged] == [("a", "again"), ("b",), ("c",), ("other",)]
    report.undo()
    assert type(model.again) is nn.LayerNorm


def test_copies_and_pickles() -> None:
    model = shuffle(Tiny())
    report, x = swap(model), torch.randn(2, 16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(twin(x), model(x))
    report.undo()
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert type(pickle.loads(pickle.dumps(model)).c) is FooRMSNorm


@pytest.mark.gpu
def test_dtypes_under_autocast_on_a_gpu() -> None:
    """torch's LayerNorm returns fp32 there, ours the dtype of x. The check takes none of the GPU's random numbers."""
    norm = nn.LayerNorm(16, device="cuda")
    x = torch.randn(2, 16, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        want, state = norm(x), torch.cuda.get_rng_state()
        swap(norm, strict=True)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        got = norm(x)
    assert (want.dtype, got.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(got.float(), want, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-5)


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
    *exchanged, left = lines = str(report).splitlines()
    assert exchanged == [
        "exchanged   3  torch.nn.LayerNorm -> onepass.nn.LayerNorm                 layers.*.a, last",
        "exchanged   2  torch.nn.RMSNorm -> onepass.nn.RMSNorm                     layers.*.b",
        "exchanged   2  swapping.norms.FooRMSNorm -> onepass.nn.RMSNorm(offset=1)  layers.*.c",
    ]
    assert len({re.search("layers|odd: ", line).start() for line in lines}) == 1
    told = r"its output differs by \d\.\de-\d\d from an RMS norm's"
    assert re.fullmatch(rf"left alone  1  swapping.norms.Unlike +odd: {told}", left), left
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
    with pytest.raises(ValueError, match=r"swap: exclude 'layer\.0' matches no norm .*; it has 'layers\.0\.c', "):
        swap(model, exclude="layer.0")
    for name, value, got in (("include", [3], "int"), ("exclude", None, "NoneType")):
        with pytest.raises(TypeError, match=f"swap: {name} must be a glob or several, got {got}"):
            swap(model, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"swap: model must be a torch\.nn\.Module, got str"):
        swap("model")  # type: ignore[arg-type]
    assert swap(nn.Linear(2, 2), exclude="head.*").layers == ()


def test_undo() -> None:
    model = shuffle(Tiny())
    model.a.eps = 1e-3
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    types, x = [type(m) for m in model.modules()], torch.randn(3, 16)
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
    with pytest.raises(ValueError, match="include '0' matches no norm of the model; it has 'a', 'b', 'c'"):
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
    model.a.forward = model.a.forward  # type: ignore[method-assign]
    for told in ("a was .* and is a LayerNorm with a forward of its own", "c was .* and is a ParametrizedRMSNorm"):
        with pytest.raises(RuntimeError, match=f"undo: {told} now"):
            report.undo()
        vars(model.a).pop("forward", None)
    assert type(model.a) is onepass.nn.LayerNorm
    parametrize.remove_parametrizations(model.c, "weight")
    report.undo()
    assert type(model.c) is FooRMSNorm


def test_a_parameter_put_in_later_stays() -> None:
    model = Tiny()
    with swap(model):
        model.a.weight = nn.Parameter(torch.full((16,), 2.0))
    assert model.a.weight[0] == 2


def test_compiled_before_and_after() -> None:
    """torch.compile sees the new class and compiles again; torch.fx traces it."""
    model, x = shuffle(Tiny()), torch.randn(2, 16)
    want = model(x)
    program = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(program(x), want)
    seen: list[type] = []
    with swap(model):
        model.c.register_forward_hook(lambda m, args, y: seen.append(type(m)))
        torch.testing.assert_close(program(x), want)
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), want)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), want)
        assert set(seen) == {onepass.nn.RMSNorm}
    torch.testing.assert_close(program(x), want)

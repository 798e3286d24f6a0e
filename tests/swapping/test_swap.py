"""`onepass.swap`: what it exchanges, and that the output, the gradients and everything else stay."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.swapping.recognise import path_of
from swapping.norms import ByProduct, Centred, Counting, FooRMSNorm, InFloat, NamedLayerNorm, Noisy, Tiny, shuffle, swap

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


def test_nothing_warns(recwarn: pytest.WarningsRecorder) -> None:
    torch.set_warn_always(True)
    try:
        onepass.swap(nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16)))
    finally:
        torch.set_warn_always(False)
    assert not [str(w.message) for w in recwarn]


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
    swap(counting)
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

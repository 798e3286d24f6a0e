"""`onepass.swap(residuals=True)` on small layers: what it exchanges, what stays, and what it leaves alone."""

from __future__ import annotations

import copy
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import onepass
from onepass import swap
from swapping.layers import Block, PostNorm, Two
from swapping.norms import shuffle

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EPS = torch.finfo(torch.float32).eps


def pair(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A model with its norms exchanged, and a copy with its additions fused as well."""
    plain = shuffle(make()).to(dtype)
    fused = copy.deepcopy(plain)
    swap(plain)
    assert swap(fused, residuals=True, strict=True).exchanged[-1].kind == type(plain).__name__
    return plain, fused


def test_a_number_in_a_sum() -> None:
    plain, fused = pair(PostNorm)
    x = torch.randn(3, 16)
    assert torch.equal(fused(x, 2.0), plain(x, 2.0))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)
@pytest.mark.parametrize("rows", [(2, 5), (1,), (0,)], ids=["rows", "one-row", "no-row"])
@pytest.mark.parametrize("make", [Block, PostNorm, Two])
def test_the_same_bits(make: Callable[[], nn.Module], rows: tuple[int, ...], dtype: torch.dtype) -> None:
    """Outputs: bit for bit. Gradients in 16 bits: that of the sum is rounded once instead of twice."""
    plain, fused = pair(make, dtype)
    inputs = [torch.randn(*rows, 16).to(dtype).requires_grad_() for _ in range(1 + (make is PostNorm))]
    results = []
    for model in (plain, fused):
        outs = model(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        total = sum((o.double() * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() for o in outs)
        assert isinstance(total, Tensor)
        results.append((outs, torch.autograd.grad(total, [*inputs, *model.parameters()])))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(a, b)
    eps = torch.finfo(dtype).eps
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert a.dtype == b.dtype
        # a few roundings, each relative to the largest term of a sum over 16 columns and 10 rows
        largest = float(a.abs().max()) if a.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=0.0, atol=(8 * eps + 64 * EPS) * max(largest, 1.0))


def test_the_norm_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused = pair(Block)
    calls: list[int] = []
    there = onepass.nn.LayerNorm.forward

    def forward(self: nn.Module, x: Tensor, residual: Tensor | None = None) -> Any:
        calls.append(1 + (residual is not None))
        return there(self, x, residual)  # type: ignore[arg-type]

    monkeypatch.setattr(onepass.nn.LayerNorm, "forward", forward)
    fused(torch.randn(2, 16))
    assert calls == [2]
    # two dtypes are added first: y has the dtype of the sum
    fused.mix.double()
    fused.mix.register_forward_pre_hook(lambda m, args: (args[0].double(),))
    fused.n2.double()
    fused.mlp.double()
    assert fused(torch.randn(2, 16)).dtype == torch.float64
    assert calls == [2, 1]


def test_arguments_reach_the_modules() -> None:
    plain, fused = pair(Block)
    x, context = torch.randn(2, 16), torch.randn(2, 16)
    for args, options in [
        ((), {}), ((0.5,), {}), ((), {"scale": 0.5, "unused": True}), ((), {"word": 1, "other": None}),
        ((2.0, False), {"context": context, "word": 2}), ((), {"context": context}),
    ]:  # fmt: skip
        for model in (plain, fused):
            model.mix.seen.clear()
        assert torch.equal(plain(x, *args, **options), fused(x, *args, **options))
        assert plain.mix.seen == fused.mix.seen
        assert len(fused.mix.seen) == 1
    with pytest.raises(TypeError, match="positional"):
        fused(x, 1.0, False, context)
    with pytest.raises(TypeError, match="missing"):
        fused()
    mine, theirs = (inspect.signature(m.forward).parameters.values() for m in (fused, plain))
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]


def test_class_and_source() -> None:
    """The class has the name, is a subclass, is shared by layers of a kind; its source can be read."""
    model = nn.ModuleList([Block(), Block(), Block(p=0.5)])
    report = swap(model, residuals=True)
    kinds = {type(m) for m in model}
    (kind,) = kinds
    assert (kind.__name__, kind.__module__, kind.__qualname__) == ("Block", Block.__module__, "Block")
    assert issubclass(kind, Block)
    assert inspect.getsource(kind.forward).splitlines()[0] == (
        "def forward(self, x, scale=None, unused=False, *, context=None, **more):"
    )
    assert str(report).splitlines()[-1] == "exchanged  3  Block -> Block(sums in n2)         *"
    again = swap(model, residuals=True)
    assert not again.layers
    report.undo()
    assert {type(m) for m in model} == {Block}
    assert type(model[0].n2) is nn.LayerNorm


def test_in_two_steps() -> None:
    """The norms first, the additions later; each is taken back by its own report."""
    model = shuffle(Block())
    x = torch.randn(3, 16)
    first = swap(model)
    want = model(x)
    dry = swap(model, residuals=True, dry_run=True)
    assert [layer.becomes for layer in dry.layers] == ["Block(sums in n2)"]
    assert type(model) is Block
    with swap(model, residuals=True) as second:
        assert type(model) is not Block
        assert len(second.exchanged) == 1
        assert torch.equal(model(x), want)
    assert type(model) is Block
    first.undo()
    assert type(model.n2) is nn.LayerNorm


def test_copies_and_pickles() -> None:
    _, fused = pair(Block)
    x = torch.randn(2, 16)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        other = pickle.loads(pickle.dumps(fused, protocol))
        assert type(other) is type(fused)
        assert torch.equal(other(x), fused(x))
    other = copy.deepcopy(fused)
    assert type(other) is type(fused)
    assert other.n2 is not fused.n2
    assert torch.equal(other(x), fused(x))


def test_hooks() -> None:
    """A norm with a hook gets one tensor, the sum, as before; hooks of the layer and of other modules run."""
    plain, fused = pair(Block)
    x = torch.randn(2, 16)
    seen: list[list[Any]] = [[], []]
    for model, found in zip((plain, fused), seen, strict=True):
        for name, m in model.named_modules():
            m.register_forward_pre_hook(lambda m, args, name=name, found=found: found.append((name, len(args))))
            m.register_forward_hook(lambda m, args, out, name=name, found=found: found.append((name, type(out))))
        model.n2.register_forward_hook(lambda m, args, out: 2 * out)
    assert torch.equal(plain(x), fused(x))
    assert seen[0] == seen[1]
    assert ("n2", 1) in seen[1]


def test_a_norm_that_was_replaced() -> None:
    """An adapter around the norm, or another norm, gets the sum."""
    plain, fused = pair(Block)
    x = torch.randn(2, 16)
    for model in (plain, fused):
        model.n2 = nn.Sequential(model.n2, nn.Tanh())
    assert torch.equal(plain(x), fused(x))


@pytest.mark.parametrize("training", [True, False])
def test_dropout(training: bool) -> None:
    plain, fused = pair(lambda: Block(p=0.5))
    x = torch.randn(4, 16)
    outs = []
    for model in (plain, fused):
        torch.manual_seed(1)
        outs.append(model.train(training)(x))
    assert torch.equal(*outs)
    assert torch.equal(outs[0], plain(x)) != training


def test_compiled_in_one_graph() -> None:
    plain, fused = pair(Block)
    program = torch.compile(fused, backend="eager", fullgraph=True)
    x = torch.randn(2, 16, requires_grad=True)
    torch.testing.assert_close(program(x), plain(x))
    torch.testing.assert_close(program(x, 0.5, word=1), plain(x, 0.5, word=1))
    torch.testing.assert_close(program(x, context=x), plain(x, context=x))
    # layers of one kind compile once
    torch._dynamo.reset()
    model = nn.ModuleList([Block() for _ in range(12)])
    swap(model, residuals=True)
    counter = CompileCounter()
    for m in model:
        torch.compile(m, backend=counter, fullgraph=True)(x)
    alone = nn.ModuleList([Block() for _ in range(12)])
    plainly = CompileCounter()
    torch._dynamo.reset()
    for m in alone:
        torch.compile(m, backend=plainly, fullgraph=True)(x)
    assert counter.frame_count == plainly.frame_count


def test_memory_of_values_that_are_done() -> None:
    """A value that no later module reads is let go before the next module runs, as in the layer's own forward."""
    _, fused = pair(Block)
    alive: list[bool] = []
    first: list[Any] = []
    fused.n1.register_forward_hook(lambda m, args, out: first.append(weakref.ref(out)))
    fused.mlp.register_forward_pre_hook(lambda m, args: alive.append(first[-1]() is not None))
    with torch.no_grad():
        fused(torch.randn(2, 16))
    assert alive == [False]


def test_the_check_runs_nothing() -> None:
    """No module of the layer, no hook, no random number, no parameter: a meta model is as good."""
    model = Block()
    for m in model.modules():
        m.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    state = torch.get_rng_state()
    swap(model, residuals=True, dry_run=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.mix.seen
    with torch.device("meta"):
        empty = Block()
        assert swap(empty, residuals=True).exchanged[-1].kind == "Block"


def test_undo_after_another_change() -> None:
    model = Block()
    report = swap(model, residuals=True)
    model.__class__ = type("Other", (type(model),), {})
    with pytest.raises(RuntimeError, match=r"undo: the model was exchanged for Block\(sums in n2\) and is a Other now"):
        report.undo()
    assert type(model.n2) is onepass.nn.LayerNorm

"""What every layer owes the programs around it: each layer of the table, each contract.

Formulas and edges of one layer are in its own file; what operators owe is in `tests/contract`.
"""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onepass.nn as onn
from nn.layers import bounds, each_is_as_alone, first, holes, outputs, rows_of, tokens, watched
from nn.table import DIM, TABLE, Called, Layer, made, those
from onepass.core.launch import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="layers are made of operators, which are tested there")
WIDE = torch.float64
every, layers, routed = those(), those("mask"), those("mask routing packed")


def _x(device: str = "cpu", dtype: torch.dtype = torch.float32, batch: int = 3, n: int = 40) -> Tensor:
    return tokens(batch, n, DIM).to(device, dtype)


def run(
    call: Callable[..., Any], layer: nn.Module, x: Tensor, mask: Tensor | None = None,
    context: AbstractContextManager[Any] | None = None, **packed: Any,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """Output, choices, and the gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    with context or nullcontext():
        y, routing = call(x, mask, return_routing=True, **packed)
    upstream = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    grads = torch.autograd.grad(y, [x, *layer.parameters()], upstream, materialize_grads=True)
    return y.detach(), [r.indices for r in outputs(routing)], list(grads)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def fill(module: nn.Module) -> None:
    """Stands for whatever was in memory."""
    with torch.no_grad():
        for t in tensors_of(module).values():
            t.fill_(math.nan)


def same(a: nn.Module, b: nn.Module, *, runs: bool = True) -> None:
    """The same tensors and, where it `runs`, the same results in training, bit for bit."""
    # what a forward in training counts is no state
    one, other = ({n: t for n, t in tensors_of(m).items() if "tokens_per_expert" not in n} for m in (a, b))
    assert one.keys() == other.keys()
    assert [n for n, t in one.items() if not torch.equal(t, other[n])] == []
    if runs:
        assert repr(a) == repr(b)
        results = [run(m, m, _x(batch=2)) for m in (a, b)]
        for x, y in zip(*([r[0], *r[1], *r[2]] for r in results), strict=True):
            assert torch.equal(x, y)


# --- modules, devices, copies, files: every module of onepass.nn


def test_every_exported_module_is_in_the_table() -> None:
    found = {name: getattr(onn, name) for name in onn.__all__}
    modules = {name for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    assert {type(spec.build()).__name__ for spec in TABLE} == modules
    for spec in TABLE:
        kind = type(spec.build())
        # what takes no module from its caller takes them itself
        given = {"device", "dtype"} & set(inspect.signature(kind).parameters)
        assert given == (set() if kind is onn.Routed else {"device", "dtype"}), kind


@every
def test_meta_device_then_reset(spec: Layer) -> None:
    """Built on meta, materialised, reset: the values are those of a module built in place."""
    with torch.device("meta"):
        module = Called(spec)
    assert all(t.is_meta for t in tensors_of(module).values())
    fill(module.to_empty(device="cpu"))
    found = [module, Called(spec)]
    for one in found:
        torch.manual_seed(3)
        for m in one.modules():
            if hasattr(m, "reset_parameters"):
                m.reset_parameters()
    assert [name for name, t in tensors_of(module).items() if t.isnan().any()] == []
    torch.manual_seed(3)
    direct = Called(spec)
    if spec.in_order:
        same(module, direct, runs=False)
    for name, t in tensors_of(direct).items():  # constants stay what the constructor makes them
        if t.numel() > 1 and bool((t == t.flatten()[0]).all()):
            assert torch.equal(t, tensors_of(module)[name]), name
    same(*found)


@every
def test_each_module_resets_what_it_owns_alone(spec: Layer) -> None:
    """A wrapper calls `reset_parameters` module by module: nothing may be drawn twice, nor another's be touched."""
    module = spec.build()
    for m in module.modules():
        own = {id(t) for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
        assert not own or hasattr(m, "reset_parameters"), type(m).__name__
        if hasattr(m, "reset_parameters"):
            fill(module)
            m.reset_parameters()
            for name, t in tensors_of(module).items():
                assert bool(t.isnan().all()) == (id(t) not in own), name


@every
def test_factory_arguments(spec: Layer) -> None:
    for device, dtype in (("meta", torch.bfloat16), ("cpu", WIDE), ("cpu", None)):
        for name, t in tensors_of(spec.build(device=device, dtype=dtype)).items():
            # biases of experts move by a thousandth
            wanted = torch.float32 if name.endswith(("expert_bias", "tokens_per_expert")) else dtype
            assert (t.device.type, t.dtype) == (device, wanted or torch.get_default_dtype()), name


@every
def test_copies_and_files(spec: Layer) -> None:
    """Also after a call, when something may be remembered: deepcopy, pickle, torch.save; and a file of weights."""
    module = made(spec)
    module.spec = spec._replace(build=None)  # type: ignore[arg-type]  # a lambda is not pickled
    for _ in range(2):
        torch.save(module, file := io.BytesIO())
        file.seek(0)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
            assert not {id(t) for t in tensors_of(twin).values()} & {id(t) for t in tensors_of(module).values()}
            same(module, twin)
    torch.save(module.state_dict(), file := io.BytesIO())
    for device in ("cpu", "meta"):
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert set(state) == {name for name in tensors_of(module) if not name.endswith("tokens_per_expert")}
        with torch.device(device):
            other = Called(spec)
        fill(other)
        other.load_state_dict(state, assign=device == "meta")
        assert [name for name, t in tensors_of(other).items() if t.is_meta or t.isnan().any()] == []
        same(module, other)


# --- PyTorch's modes: layers that take masks


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@layers
def test_autocast(spec: Layer, x_dtype: torch.dtype, device: str) -> None:
    layer, x = made(spec, device), _x(device, x_dtype)
    expected, choices, _ = run(layer, layer, x.float())
    y, ours, grads = run(layer, layer, x, context=torch.autocast(device, torch.bfloat16))
    assert y.dtype == (x_dtype if spec.keeps else torch.bfloat16)
    if not spec.keeps:  # a block's feed-forward reads what attention has rounded
        assert all(map(torch.equal, ours, choices)), "a choice is made in fp32 whatever the branches compute in"
        torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.1)
    assert [g.dtype for g in grads] == [x_dtype] + [torch.float32] * (len(grads) - 1)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, WIDE])
@layers
def test_any_dtype(spec: Layer, dtype: torch.dtype) -> None:
    layer = made(spec, dtype=dtype)
    y, _, grads = run(layer, layer, _x(dtype=dtype), holes(40))
    assert {y.dtype, *(g.dtype for g in grads)} == {dtype}
    assert all(t.isfinite().all() for t in (y, *grads))


@pytest.mark.parametrize("layout", ["transposed", "channels first", "stepped", "expanded"])
@layers
def test_any_strides(spec: Layer, layout: str) -> None:
    x = {
        "transposed": tokens(40, 3, DIM).transpose(0, 1),
        "channels first": tokens(3, DIM, 8, 5).flatten(2).mT,
        "stepped": tokens(3, 80, 2 * DIM)[:, ::2, ::2],
        "expanded": tokens(1, 40, DIM).expand(3, 40, DIM),
    }[layout]
    layer = made(spec)
    torch.testing.assert_close(run(layer, layer, x), run(layer, layer, x.contiguous()))


@those("mask", without="routers narrow shared Experts LocalAttention")
def test_compiled_in_one_graph(spec: Layer) -> None:
    """With a mask, and packed; without either `fused/test_operators.py` has them."""
    torch._dynamo.reset()
    layer, x, mask = made(spec).eval(), _x(n=64), holes(64)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, layer, x, mask), run(layer, layer, x, mask))
    if spec.name in ("RoutedBlock", "TransformerBlock"):
        packed = {"cu_seqlens": torch.tensor([0, 5, 64]), "max_seqlen": 61}
        torch.testing.assert_close(compiled(x[0], **packed), layer(x[0], **packed))


@pytest.mark.gpu
@those("mask packed", without="Routed RoutedAttention")
def test_compiled_with_inductor(spec: Layer) -> None:
    torch._dynamo.reset()
    layer, x = made(spec, "cuda").eval(), _x("cuda", batch=2, n=512)
    y = torch.compile(layer, fullgraph=True)(x)
    torch.testing.assert_close(y, layer(x), rtol=1e-3, atol=1e-3)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@those("mask", without="routers narrow three shared Experts LocalAttention causal")
def test_exported_with_named_batch_and_length(spec: Layer) -> None:
    """With a mask; without one, and causal, `fused/test_operators.py` has them."""
    layer, batch, n = made(spec).eval(), torch.export.Dim("batch", min=2), torch.export.Dim("n", min=16, max=4096)
    dynamic = ({0: batch, 1: n}, {0: batch, 1: n})
    program = torch.export.export(layer, (_x(), holes(40)), dynamic_shapes=dynamic).module()
    x, mask = _x(batch=5, n=77), torch.rand(5, 77) < 0.7
    torch.testing.assert_close(program(x, mask), layer(x, mask))


@pytest.mark.filterwarnings("ignore")  # one for each size that Python reads
@every
def test_traced_by_torch_jit(spec: Layer) -> None:
    """What the values of one call decided is not in the trace; a share of its length would be."""
    layer, x = made(spec).eval(), _x(batch=5)
    kinds = [type(getattr(m, name, None)) for m in (spec, *layer.modules()) for name in ("k", "k_q", "k_kv")]
    with torch.no_grad(), pytest.raises(NotImplementedError, match="a share") if float in kinds else nullcontext():
        torch.testing.assert_close(torch.jit.trace(layer, _x())(x), layer(x))


@every
def test_traced_by_torch_fx(spec: Layer) -> None:
    is_node = isinstance(layer := made(spec).layer, (onn.LayerNorm, onn.RMSNorm, onn.WeightedSum))
    with nullcontext() if is_node else pytest.raises(TypeError, match=r"got Proxy; torch\.fx\.wrap keeps"):
        torch.testing.assert_close(torch.fx.symbolic_trace(layer)(_x()), layer(_x()))


@layers
def test_checkpoint_repeats_bit_for_bit(spec: Layer, reentrant: bool, device: str) -> None:
    layer, x = made(spec, device), _x(device).requires_grad_()

    def grads(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = call(x)
        for t in (x, *layer.parameters()):
            t.grad = None
        y.square().sum().backward()
        return [y.detach(), *(t.grad.clone() for t in (x, *layer.parameters()) if t.grad is not None)]

    plain = grads(layer)
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        for a, e in zip(grads(call), plain, strict=True):
            assert torch.equal(a, e)


@layers
def test_shapes_of_meta_tensors(spec: Layer, masked: bool) -> None:
    layer, x = made(spec, "meta"), torch.empty(3, 40, DIM, device="meta", requires_grad=True)
    y = layer(x, holes(40).to("meta") if masked else None)
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in (x, *layer.parameters()))


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "own forward", "subclass", "wrapper, hook"])
@layers
def test_what_looks_at_any_module_is_called(spec: Layer, kind: str) -> None:
    """No path passes by a hook, an instance's or a subclass's forward; each runs inside its parent, as FSDP2 needs."""
    layer, x, mask = made(spec), _x(), holes(40)
    plain = run(layer, layer, x, mask)
    for where, _ in [*layer.layer.named_modules()][1:]:
        if where.endswith("router") and "xperts" in spec.name:
            continue  # a part of the choice, which is one operator
        other = copy.deepcopy(layer)
        part: Any = other.layer.get_submodule(where)
        parent, calls = other.layer.get_submodule(where.rpartition(".")[0]), list[list[int]]()
        if kind == "wrapper, hook":  # as `checkpoint_wrapper` it lends attributes, but not the class
            setattr(parent, where.rpartition(".")[2], part := torch.compile(part, backend="eager"))
        if "hook" in kind:
            register = part.register_forward_pre_hook if kind == "pre-hook" else part.register_forward_hook
            register(lambda *_, calls=calls: calls.append([id(f[0].f_locals.get("self")) for f in inspect.stack(0)]))
        else:
            place = part if kind == "own forward" else type("Other", (type(part),), {})
            own = part.forward if place is part else type(part).forward
            place.forward = lambda *args, own=own, calls=calls, **options: (calls.append([]), own(*args, **options))[1]
            part.__class__ = place if kind == "subclass" else type(part)
        found = run(other, other, x, mask, torch.compiler.set_stance("force_eager"))
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
        assert {not callers or id(parent) in callers for callers in calls} == {True}, where


@pytest.mark.gpu
@layers
def test_a_gpu_gives_what_a_cpu_gives(spec: Layer, masked: bool) -> None:
    layer, mask = made(spec), holes(40) if masked else None
    on_gpu, expected = copy.deepcopy(layer).cuda(), run(layer, layer, _x(), mask)
    found = run(on_gpu, on_gpu, _x("cuda"), None if mask is None else mask.cuda())
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(ours.cpu(), theirs)
    for a, e in zip((found[0], *found[2]), (expected[0], *expected[2]), strict=True):
        torch.testing.assert_close(a.cpu(), e, rtol=1e-3, atol=1e-3 * max(1.0, float(e.abs().max())))


# --- no tokens, and gradients


def _gives_gradients_of_zero(layer: nn.Module, y: Tensor) -> None:
    """None would be no gradient: DDP waits for one of every parameter on every process."""
    y.sum().backward()
    for where, p in layer.named_parameters():
        assert p.grad is not None, where
        assert not p.grad.any(), where


@pytest.mark.parametrize(("batch", "n"), [(0, 20), (2, 0), (2, 1)])
@layers
def test_empty_and_shortest(spec: Layer, batch: int, n: int) -> None:
    layer = made(spec)
    y, _, grads = run(layer, layer, _x(batch=batch, n=n))
    assert y.shape == (batch, n, DIM)
    assert all(t.isfinite().all() for t in (y, *grads))
    if batch * n == 0:
        _gives_gradients_of_zero(layer, layer(_x(batch=batch, n=n)))


@those("mask packed")
def test_packed_sequences_without_tokens(spec: Layer, training: bool, hooked: bool) -> None:
    layer = made(spec).train(training)
    if hooked:
        [*layer.modules()][-1].register_forward_hook(lambda *_: None)
    y = layer(torch.randn(0, DIM), cu_seqlens=torch.zeros(3, dtype=torch.int32))
    assert y.shape == (0, DIM)
    _gives_gradients_of_zero(layer, y)


@layers
def test_every_parameter_gets_a_gradient_from_gates_alone(spec: Layer) -> None:
    layer = made(spec).eval()  # no training mode: nothing is explored
    layer(_x(batch=2, n=320)).square().sum().backward()
    assert [where for where, p in layer.named_parameters() if p.grad is None or not p.grad.any()] == []


@layers
def test_a_graph_is_the_callers(spec: Layer) -> None:
    """Kept, it gives the same twice; saved tensors may travel, y be changed in place; a node ignores autocast then."""
    layer, x = made(spec), _x().requires_grad_()
    node = getattr(layer.layer, "fused_dtype", lambda *_: None)(x, None) is not None
    wanted = [x, *layer.parameters()]
    expected, y = torch.autograd.grad(layer(x).square().sum(), wanted), layer(x)
    with torch.autograd.graph.save_on_cpu():
        z = layer(x)
    for out, kept in ((y, True), (y, True), (z, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=out is z and node):
            assert all(map(torch.equal, torch.autograd.grad(out, wanted, 2 * out, retain_graph=kept), expected))
    y *= 2
    torch.testing.assert_close(torch.autograd.grad(y, wanted, 2 * y), tuple(4 * g for g in expected))


@layers
def test_a_gradient_alone_is_that_beside_all_others(spec: Layer) -> None:
    layer, x = made(spec, dtype=WIDE).eval(), _x(dtype=WIDE).requires_grad_()
    leaves = {"x": x, **dict(layer.layer.named_parameters())}
    together = dict(zip(leaves, torch.autograd.grad(layer(x).square().sum(), [*leaves.values()]), strict=True))
    for wanted in dict.fromkeys(name.rpartition(".")[0] or name for name in leaves):
        for name, leaf in leaves.items():
            leaf.requires_grad_(name.startswith(wanted))
        some = [name for name, leaf in leaves.items() if leaf.requires_grad]
        found = torch.autograd.grad(layer(x).square().sum(), [leaves[name] for name in some])
        torch.testing.assert_close(found, tuple(together[name] for name in some), msg=lambda m, at=wanted: f"{at}: {m}")


@pytest.mark.parametrize("put", [setattr, nn.Module.register_buffer])
@those("mask", without="Experts experts")
def test_another_tensor_in_a_parameters_place(spec: Layer, put: Callable[..., None]) -> None:
    """As who shards, replicates, freezes or computes a weight leaves it: it counts, and gets its gradient."""
    for where, p in [*made(spec).layer.named_parameters()]:
        layer, (path, _, name) = made(spec).eval(), where.rpartition(".")
        module, expected, other = layer.layer.get_submodule(path), layer(_x()), p.detach().clone().requires_grad_()
        delattr(module, name)
        put(module, name, other)
        y = layer(_x())
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        assert torch.autograd.grad(y.square().sum(), other)[0].any(), where


@those("mask", without="Experts")
def test_dropout_is_on_what_a_block_adds_while_training(spec: Layer) -> None:
    block = made(spec).layer
    if not hasattr(block, "feed_forward"):
        return
    block.dropout, x = 0.5, _x()
    torch.manual_seed(0)
    h = x + nn.functional.dropout(block.attention(x), 0.5)
    expected = h + nn.functional.dropout(block.feed_forward(h), 0.5)
    torch.manual_seed(0)
    torch.testing.assert_close(block(x), expected)
    h = x + block.eval().attention(x)
    torch.testing.assert_close(block(x), h + block.feed_forward(h))


# --- what reaches what: padding, other rows, later tokens


@layers
def test_other_sequences_count_for_nothing(spec: Layer, device: str) -> None:
    layer, x = made(spec, device), _x(device)
    y, choices, (dx, *_) = run(layer, layer, x)
    x[1] = 30 * tokens(40, DIM, seed=9).to(device)
    z, others, (dz, *_) = run(layer, layer, x)
    for before, after in ((y, z), (dx, dz), *zip(choices, others, strict=True)):
        assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(y[1], z[1])


def assert_padding_reaches_nothing(layer: nn.Module, x: Tensor, mask: Tensor, value: float) -> None:
    """Results of real tokens, to the bit; padding has an upstream gradient as well."""
    found = []
    for held in (0.0, value):
        y, _, (dx, *grads) = run(layer, layer, x.masked_fill(~mask[..., None], held), mask)
        found.append([y[mask], dx[mask], *grads])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
        assert b.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@those("mask", without="Routed")
def test_padding_reaches_nothing(spec: Layer, value: float, device: str) -> None:
    n = 1000 if device == "cuda" else 40  # several tiles
    layer, mask, x = made(spec, device), holes(n).to(device), _x(device, n=n)
    assert_padding_reaches_nothing(layer, x, mask, value)
    if "Attention" in spec.name and spec.width is None:
        # also what padded tokens get is that of zeros, so that a loss which multiplies it by 0 is one
        padded = x.masked_fill(~mask[..., None], value).requires_grad_()
        y = layer(padded, mask)
        assert torch.equal(y, layer(x.masked_fill(~mask[..., None], 0), mask))
        assert not torch.autograd.grad(y.square().sum(), padded)[0][~mask].any()


@those("mask", without="Routed Experts experts")
@settings(max_examples=8)
@given(data=st.data())
def test_nothing_reaches_what_it_must_not(spec: Layer, data: st.DataObject) -> None:
    """Of any length, with any k, as one node or with hooks, in training or not."""
    n, batch = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    layer = Called(spec).train(data.draw(st.booleans()))
    for part in layer.modules():
        for name in sorted({"k", "k_q", "k_kv"} & vars(part).keys()):
            setattr(part, name, data.draw(st.integers(1, n + 2) | st.sampled_from((0.1, 0.25, 1.0))))
    if data.draw(st.booleans()):
        watched(layer)
    x, other = torch.randn(batch, n, DIM), 10 * torch.randn(batch, n, DIM)
    mask = torch.rand(batch, n) < data.draw(st.sampled_from((0.0, 0.3, 0.7, 1.0)))
    value = data.draw(st.sampled_from((math.nan, math.inf, -math.inf, 1e30)))
    assert_padding_reaches_nothing(layer, x, mask, value)
    filled = x.masked_fill(~mask[..., None], value)
    y = layer(filled, mask).detach()
    again = layer(torch.cat((filled[:1], other[1:])), mask).detach()
    assert torch.equal(again[0][mask[0]], y[0][mask[0]]), "another row of the batch reaches this one"
    if "causal" in spec.name:
        at = data.draw(st.integers(0, n - 1))
        for later in (other, torch.full_like(other, data.draw(st.sampled_from((math.nan, math.inf))))):
            with torch.set_grad_enabled(data.draw(st.booleans())):
                ahead = layer(torch.cat((filled[:, :at], later[:, at:]), 1), mask).detach()
            assert torch.equal(ahead[:, :at][mask[:, :at]], y[:, :at][mask[:, :at]]), f"token {at} reaches earlier ones"


@pytest.mark.parametrize("spec", [s for s in TABLE if "causal" in s.name], ids=lambda s: s.name)
def test_no_later_token_counts(spec: Layer, autocast: bool, device: str) -> None:
    n, step = (500, 7) if device == "cuda" else (40, 3)
    layer, x = made(spec, device), _x(device, batch=1, n=n)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
        before = layer(x)
        for i in range(0, n, step):
            other = x.clone()
            other[:, i] = 10 * torch.randn(DIM, device=device)
            assert torch.equal(layer(other)[:, :i], before[:, :i]), f"token {i} changed an earlier output"


# --- a padded row, or one of a packed sequence, gives what its tokens give alone


@those("mask shares")
@settings(max_examples=6)
@given(
    k=st.sampled_from((1 / 16, 0.1, 0.3, 0.5, 0.9, 1.0)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    more=st.integers(0, 25),
    seed=st.integers(0, 1000),
)
def test_a_padded_row_is_as_alone(
    spec: Layer, hooked: bool, k: float, lengths: list[int], more: int, seed: int
) -> None:
    layer, n = made(spec, dtype=WIDE), max(lengths) + more
    for part in layer.modules():
        for name in {"k", "k_q"} & vars(part).keys():
            setattr(part, name, k)
    if hooked:
        watched(layer)
    # a module of the user's sees padding as it is
    held = math.nan if spec.name != "Routed" else 0.0

    def padded(rows: list[Tensor]) -> tuple[list[Tensor], Any]:
        x = torch.stack([nn.functional.pad(row, (0, 0, 0, n - len(row)), value=held) for row in rows])
        y, routing = layer(x, first(n, *lengths), return_routing=True)
        return [part[: len(row)] for part, row in zip(y, rows, strict=True)], routing

    each_is_as_alone(layer, padded, rows_of(lengths, DIM, seed))


@those("mask packed")
@settings(max_examples=6)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any), more=st.sampled_from((None, 0, 5)),
    flat=st.booleans(), dtype=st.sampled_from((torch.int32, torch.int64)), seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_packed_row_is_as_alone(
    spec: Layer, lengths: list[int], more: int | None, flat: bool, dtype: torch.dtype, seed: int
) -> None:
    layer = made(spec, dtype=WIDE)

    def packed(rows: list[Tensor]) -> tuple[list[Tensor], None]:
        x, most = torch.cat(rows), None if more is None else max(lengths) + more
        y = layer(x if flat else x[None], cu_seqlens=bounds(lengths, dtype), max_seqlen=most)
        assert y.shape == (x.shape if flat else (1, *x.shape))
        return [*y.view(x.shape).split(lengths)], None

    each_is_as_alone(layer, packed, rows_of(lengths, DIM, seed))


@pytest.mark.gpu
@routed
def test_padded_and_packed_rows_on_a_gpu(spec: Layer) -> None:
    """In fp32, by kernels: the choices are the same, results and gradients to rounding; CUDA graphs read masks anew."""
    layer, x, mask = made(spec, "cuda").eval(), _x("cuda", batch=2, n=1000), first(1000, 700, 1000).cuda()
    short, near = x[:1, :700].clone().requires_grad_(), {"rtol": 1e-3, "atol": 1e-3}
    x.requires_grad_()
    y, routing = layer(x, mask, return_routing=True)
    alone, own = layer(short, return_routing=True)
    if "experts" not in spec.name:
        for a, b in zip(outputs(routing), outputs(own), strict=True):
            assert torch.equal(a.indices[0][a.indices[0] >= 0], b.indices[0][b.indices[0] >= 0])
    (dx,) = torch.autograd.grad(y[0, :700].square().sum(), x)
    (expected,) = torch.autograd.grad(alone.square().sum(), short)
    torch.testing.assert_close(dx[0, :700], expected[0], **near)
    still, at = x.detach(), bounds([700, 300]).cuda()
    with pytest.raises(ValueError, match=r"max_seqlen.*must be given"):
        layer(still[0], cu_seqlens=at)
    calls = lambda: layer(still, mask), lambda: layer(still[0], cu_seqlens=at, max_seqlen=700)
    for call, held, other in zip(calls, (mask, at), (first(1000, 300, 0), bounds([300, 700])), strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(call().reshape(-1, DIM)[:700], alone[0], **near)
            with torch.cuda.graph(graph):
                captured = call()
            held.copy_(other)
            graph.replay()
            torch.testing.assert_close(captured, call(), **near)


# --- what all refuse: in one line that says what to write, and nothing has changed


X = torch.ones(2, 9, DIM)
BAD: list[tuple[Callable[[nn.Module], object], type[Exception], str, str]] = [  # and the layers that leave it to torch
    (lambda layer: layer(X, torch.ones(2, 9)), TypeError, "mask must be bool.*float32; of an additive mask of 0", ""),
    (lambda layer: layer(X, torch.ones(2, 9).int()), TypeError, "mask must be bool.*int32; of an attention_mask", ""),
    (lambda layer: layer(X, torch.ones(2, 5).bool()), ValueError, r"mask must be .*\(2, 9\), got \(2, 5\)", ""),
    (lambda layer: layer(X, torch.ones(2, 9, device="meta").bool()), ValueError, "mask is on meta but x is on cpu", ""),
    (lambda layer: layer(X, [True]), TypeError, "mask must be a tensor", ""),
    (lambda layer: layer(X[..., 1:]), ValueError, r"x must (be|end) .*32[,)]+ got \(2, 9, 31\)", ""),
    (lambda layer: layer(X.bfloat16()), TypeError, "x is torch.bfloat16 and the weights are torch.float32; convert",
     "Routed"),
    (lambda layer: layer(X.int()), TypeError, "x must be float32|x is torch.int32 and the weights are", ""),
]  # fmt: skip
PACKED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens": [0, 6]}, TypeError, "cu_seqlens must be a tensor, got list"),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, "cu_seqlens must be int32 or int64, got torch.float32"),
    ({"cu_seqlens": torch.tensor([[0, 6]])}, ValueError, r"cu_seqlens must be \(sequences \+ 1,\), got \(1, 2\)"),
    ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"rise from 0 to the 6 tokens of x, got \[0, 5\]"),
    ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, ValueError, r"rise from 0 .* got \[0, 4, 3, 6\]"),
    ({"cu_seqlens": torch.tensor([0, 6]), "max_seqlen": 5}, ValueError, "max_seqlen must be at least 6.* got 5"),
    ({"cu_seqlens": torch.tensor([0, 6]), "max_seqlen": 6.0}, TypeError, "max_seqlen must be an int, got float"),
    ({"cu_seqlens": torch.tensor([0, 6], device="meta")}, ValueError, "cu_seqlens is on meta but x is on cpu"),
    ({"cu_seqlens": torch.tensor([0, 6]), "mask": torch.ones(1, 6).bool()}, ValueError, "exclude each other"),
    ({"max_seqlen": 6}, ValueError, "max_seqlen belongs to cu_seqlens"),
]


def refused(spec: Layer, call: Callable[[nn.Module], object], error: type[Exception], match: str) -> None:
    layer = made(spec)
    before, random = copy.deepcopy(tensors_of(layer)), torch.get_rng_state()
    with pytest.raises(error, match=match) as caught:
        call(layer)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(t, before[name]) for name, t in tensors_of(layer).items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("row", BAD, ids=[row[2] for row in BAD])
@layers
def test_what_layers_refuse(spec: Layer, row: Any) -> None:
    if spec.name.split()[0] != row[3]:
        refused(spec, *row[:3])


@pytest.mark.parametrize("row", PACKED, ids=[row[2] for row in PACKED])
@those("packed")
def test_what_packed_calls_refuse(spec: Layer, row: Any) -> None:
    refused(spec, lambda layer: layer(torch.ones(1, 6, DIM), **row[0]), *row[1:])


@those("mask packed")
def test_several_rows_are_no_packed_sequence(spec: Layer) -> None:
    match = r"x must be \(total, dim\) or \(1, total, dim\), got \(2, 9, 32\)"
    refused(spec, lambda layer: layer(X, cu_seqlens=bounds([9])), ValueError, match)


@those("packed shares")
def test_causal_layers_refuse_an_int_k_of_packed_sequences(spec: Layer) -> None:
    """It would be the share k/n of the longest sequence for all; others count tokens of each."""
    layer = made(spec, dtype=WIDE).eval()
    for part in layer.modules():
        for name in {"k", "k_q", "k_kv"} & vars(part).keys():
            setattr(part, name, 4)
    x, packed = tokens(30, DIM, dtype=WIDE), {"cu_seqlens": bounds([18, 12]), "max_seqlen": 20}
    if "causal" in spec.name:
        with pytest.raises(TypeError, match=r"need k(_q)? as a share, .* got the int 4, which means the share 4/n"):
            layer(x, **packed)
    else:
        rows = rows_of([18, 12], DIM, 1)
        each_is_as_alone(layer, lambda rows: ([*layer(torch.cat(rows), **packed).split([18, 12])], None), rows)

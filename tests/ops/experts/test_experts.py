"""`experts` beyond the contract: order and choice against their definitions, loads of every kind, memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import onepass
from harness import Sample, call, close, float64, waiting_is_an_error
from onepass.core.launch import INTERPRET
from onepass.core.launch.geometry import Gpu
from onepass.ops.experts import choice, definition

BF16, EXAMPLES = torch.bfloat16, 12 if INTERPRET else 40


def _tensors(tokens: int, dim: int, hidden: int, n_experts: int, k: int, device: str = "cpu") -> list[Tensor]:
    """x, weights, up and down."""
    shapes = ((tokens, dim), (tokens, k), (n_experts, dim, hidden), (n_experts, hidden, dim))
    return [(torch.randn(s) / s[-2] ** (0.5 * (len(s) == 3))).to(device).requires_grad_() for s in shapes]


def _by(own: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without own products let torch's compute all, between kernels, as those of large matrices in bf16 on a GPU."""
    if device == "cpu" and not INTERPRET and not own:
        pytest.skip("no kernel runs")
    if not own:
        monkeypatch.setattr("onepass.ops.experts.kernels_products.takes", lambda *matrices: False)


@pytest.mark.hypothesis
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_order_is_a_stable_sort(device: str, data: st.DataObject) -> None:
    tokens, k, n_experts = data.draw(st.integers(0, 300)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    indices = torch.randint(-1, n_experts, (tokens, k), generator=generator).to(dtype)
    ours = onepass.expert_order(indices.to(device), n_experts)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, definition.expert_order(indices, n_experts), strict=True))


@pytest.mark.hypothesis
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_choice_is_its_definition(device: str, data: st.DataObject) -> None:
    """Weights, indices, counts and gradients; scores of few values, so that the lowest index has to win ties."""
    tokens, n_experts = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 33))
    k, dim = data.draw(st.integers(1, n_experts)), 8
    score_func, norm = data.draw(st.sampled_from(["sigmoid", "softmax"])), data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    u = torch.randint(-2, 3, (tokens, dim), generator=generator).float()
    weight = torch.randint(-1, 2, (n_experts, dim), generator=generator).float() / 2
    bias = torch.randint(-1, 2, (n_experts,), generator=generator) / 4 if data.draw(st.booleans()) else None
    mask = torch.rand(tokens, generator=generator) < 0.7 if data.draw(st.booleans()) else None
    own = [t.to(device).requires_grad_() for t in (u, weight)]
    here = [None if t is None else t.to(device) for t in (bias, mask)]
    weights, logits, indices, counts = choice.choose_experts(*own, *here, k, score_func, norm)
    wide = [t.double().requires_grad_() for t in (u, weight)]
    z = wide[0] @ wide[1].t()
    # the choice of fp32 scores: those of float64 may tell apart what is equal in fp32
    _, chosen, load = definition.choose(z.detach().float(), bias, mask, k, score_func, norm)
    if device == "cpu" and not INTERPRET:
        assert all(map(torch.equal, (indices, counts), (chosen, load)))
    assert torch.equal(counts.cpu(), torch.bincount(indices[indices >= 0].cpu(), minlength=n_experts).int())
    s = z.softmax(-1) if score_func == "softmax" else z.sigmoid()
    expected = s.gather(-1, indices.cpu().clamp(min=0))
    expected = expected / expected.sum(-1, keepdim=True) if norm and k > 1 else expected
    expected = expected.masked_fill(indices.cpu() < 0, 0.0)
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    # of no expert that was left out is s + b larger, and the chosen are in order
    v = s.detach() if bias is None else s.detach() + bias
    if mask is None:
        taken = v.gather(-1, indices.cpu())
        assert (taken.diff() <= 1e-6).all()
        assert (v.scatter(-1, indices.cpu(), -torch.inf).amax(-1) <= taken[:, -1] + 1e-6).all()
    up, more = torch.randn(weights.shape, generator=generator), torch.randn(logits.shape, generator=generator)
    found = torch.autograd.grad((weights * up.to(device)).sum() + (logits * more.to(device)).sum(), own)
    wanted = torch.autograd.grad((expected * up).sum() + (z * more).sum(), wide)
    torch.testing.assert_close(tuple(a.cpu().double() for a in found), wanted, rtol=1e-4, atol=1e-4)


def test_ties_and_nan(device: str) -> None:
    """The lowest index wins a tie; NaN counts as the largest score, so that it shows in the result."""
    eye = torch.eye(4, device=device)
    u = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, torch.nan, 0.0], [0.0, 2.0, 0.0, 2.0]], device=device)
    u = u.nan_to_num(nan=0.0) if device == "cpu" and INTERPRET else u
    weights, _, indices, _ = choice.choose_experts(u, eye, None, None, 2, "sigmoid", True)
    assert indices[::2].tolist() == [[0, 1], [1, 3]]
    # a NaN in a token reaches all of its logits
    assert weights[1].isnan().all() or INTERPRET


@pytest.mark.parametrize("load", ["one expert", "the last", "none", "unlike"])
def test_loads(device: str, load: str, gated: bool, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is kept gives the same twice: backward overwrites its own memory alone, nothing that others hold."""
    _by(own, device, monkeypatch)
    indices = torch.stack([torch.randperm(5)[:2] for _ in range(50)])
    indices[:, 0], indices[10:, 1] = 3, -1
    indices[:] = {"one expert": 0, "the last": 4, "none": -1}.get(load, indices)
    *given, down = _tensors(50, 16, 24, 5, 2, device)
    given += [down.detach()[:, : 12 if gated else 24].requires_grad_()]
    wide = [t.detach().cpu().double().requires_grad_() for t in given]
    ours, other = (partial(f, activation="swiglu" if gated else "gelu") for f in (onepass.experts, definition.experts))
    y, expected = ours(given[0], indices.to(device), *given[1:]), other(wide[0], indices, *wide[1:])
    dy, held, hooked = torch.randn(y.shape), [], []
    others = Tensor.detach, lambda t: torch.from_dlpack(t.detach()), lambda t: t.T.contiguous().T if t.ndim == 2 else t
    for unpack in (lambda t: t, *others):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append((t, t.clone())) or t, unpack):
            hooked += torch.autograd.grad(ours(given[0], indices.to(device), *given[1:]), given, dy.to(device))
    kept = torch.autograd.grad(y, given, dy.to(device), retain_graph=True)
    found = [y, *torch.autograd.grad(y, given, dy.to(device))]
    assert all(map(torch.equal, 5 * found[1:], (*hooked, *kept)))
    assert all(torch.equal(t.nan_to_num(), before.nan_to_num()) for t, before in held)
    wanted = [expected, *torch.autograd.grad(expected, wide, dy.double())]
    torch.testing.assert_close([a.cpu().double() for a in found], wanted, rtol=1e-4, atol=1e-5)
    assert load != "none" or not any(t.any() for t in found[:2]), "y and dx"


def test_gradients_lie_as_their_weights(device: str, gated: bool, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers and torchtitan keep each matrix turned: autograd would copy a gradient that lies otherwise."""
    x, weights, up, down = _tensors(50, 16, 48, 5, 2, device)
    kept = [up, down[:, :24] if gated else down]
    turned = [w.detach().mT.contiguous().mT.requires_grad_() for w in kept]
    indices = torch.rand(50, 5, device=device).topk(2).indices

    def gradients(up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        y = onepass.experts(x, indices, weights, up, down, activation="swiglu" if gated else "gelu")
        return torch.autograd.grad(y.sum(), (up, down))

    expected = gradients(*kept)
    _by(own, device, monkeypatch)
    for found in (gradients(*turned), torch.compile(gradients, backend="aot_eager")(*turned)):
        assert [g.stride() for g in found] == [w.stride() for w in turned]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="Dynamo can't trace Triton's interpreter")
def test_compiled_autograd_traces_backward_for_any_size() -> None:
    for tokens in (18, 20):
        given = [t.requires_grad_() for t in _tensors(tokens, 16, 24, 5, 2, "cpu")]
        y = onepass.experts(given[0], torch.rand(tokens, 5).topk(2).indices, *given[1:]).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", dynamic=True)):
            y.backward(retain_graph=True)
        torch.testing.assert_close([t.grad for t in given], [*torch.autograd.grad(y, given)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 8])
def test_few_tokens_without_gradients(device: str, gated: bool, tokens: int) -> None:
    """As in decoding: kernels of their own on a GPU, the same function."""
    x, weights, up, down = (t.detach() for t in _tensors(tokens, 40, 72, 5, 3, device))
    indices = torch.stack([torch.randperm(5)[:3] for _ in range(tokens)]).to(device)
    indices[-1, 1], weights[-1, 1] = -1, torch.nan
    kind = {"activation": "swiglu" if gated else "gelu"}
    sample = Sample("few", (x, indices, weights, up, down[:, :36] if gated else down), kind)
    with torch.no_grad():
        y, again = (call(onepass.experts, sample)[0] for _ in range(2))
    assert torch.equal(y, again)
    close(y, *call(definition.experts, float64(sample)), 1e-4, 1e-5, "y")


def test_what_takes_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's products: only matrices that they take, on GPUs where they don't wait. Few choices: rows within int32."""
    products, few = (pytest.importorskip(f"onepass.ops.experts.kernels_{name}") for name in ("products", "few"))
    x, ends = torch.randn(16, 16).bfloat16(), torch.arange(2, 17, 2, dtype=torch.int32)
    for capability, waits in (((8, 9), True), ((12, 0), True), ((10, 3), False), ((9, 0), False)):
        monkeypatch.setattr(products, "gpu", lambda x, of=capability: Gpu(132, 49152, of))
        assert products.takes(x, torch.zeros(8, 16, 32, dtype=BF16)) is waits
    by_torch = [((512, 32, 1), 0), ((512, 1, 16), 0), ((32, 256, 1), 0), ((640, 40, 1), 8)]
    others = [((1, 256, 8), 0), ((512, 32, 1), 1), ((0, 32, 1), 0), ((512, 8, 1), 0), ((512, 36, 1), 0)]
    for strides, start in (*by_torch, *others):
        up = torch.zeros(6000, dtype=BF16).as_strided((8, 16, 32), strides, start)
        assert products.takes(x, up) is ((strides, start) in others)
        assert (strides, start) in others or F.grouped_mm(x, up, offs=ends).shape == (16, 32)
    fused = torch.empty(4096, 256, 4096, device="meta").transpose(0, 1)
    assert [few.takes(2, m, m) for m in (fused[:, :2000], fused)] == [True, False]


def test_many_experts(device: str) -> None:
    """More than 16 bits can number; counts that int32 can't find are refused by name."""
    u, weight = torch.randn(3, 8, device=device), torch.randn(70000, 8, device=device)
    _, logits, indices, _ = choice.choose_experts(u, weight, None, None, 2, "softmax", True)
    assert torch.equal(indices, logits.topk(2).indices)
    with pytest.raises(ValueError, match="4194304 choices of 65536 experts are too many for one call; pass fewer"):
        pytest.importorskip("onepass.ops.experts.kernels_rows").order(torch.zeros(1 << 22, 1), 1 << 16)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "most"), [(BF16, 0), (BF16, 1 << 19), (torch.float16, 0), (torch.float32, 0)])
def test_the_host_never_waits(dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.ops.experts.kernels_products.MOST", most)
    given = [t.detach().to(dtype).requires_grad_() for t in _tensors(300, 64, 128, 8, 2, "cuda")]
    indices = torch.rand(300, 8, device="cuda").topk(2, -1).indices
    onepass.experts(given[0], indices, *given[1:]).sum().backward()
    with waiting_is_an_error():
        onepass.experts(given[0], indices, *given[1:]).sum().backward()


@pytest.mark.gpu
def test_an_index_out_of_range_is_clamped() -> None:
    x, *others = _tensors(6, 8, 8, 3, 2, "cuda")
    wild = torch.tensor([[0, 9], [2, -5], [1, 2], [0, 1], [7, 0], [-1, 1]], device="cuda")
    assert torch.equal(onepass.experts(x, wild, *others), onepass.experts(x, wild.clamp(-1, 2), *others))


@pytest.mark.gpu
@pytest.mark.parametrize("most", [0, 1 << 19])
def test_peak_memory(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tensors of the rows' size at once, besides y and gradients: no copy in fp32, none that lingers."""
    monkeypatch.setattr("onepass.ops.experts.kernels_products.MOST", most)
    tokens, dim, hidden, n_experts, k = 8192, 512, 512, 8, 2
    given = [t.detach().bfloat16().requires_grad_() for t in _tensors(tokens, dim, hidden, n_experts, k, "cuda")]
    indices = torch.rand(tokens, n_experts, device="cuda").topk(k, -1).indices
    dy = torch.randn(tokens, dim, device="cuda", dtype=BF16)

    def run() -> None:
        torch.autograd.grad(onepass.experts(given[0], indices, *given[1:]), given, dy)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    rows, y, matrix = tokens * k * dim * 2, tokens * dim * 2, n_experts * dim * hidden * 2
    # backward of the activation: rows of dy, their product, and the units in place of h; then a matrix's gradient too
    assert torch.cuda.max_memory_allocated() - before <= 3 * rows + y + matrix + 2**21

"""soft_topk: oracles, edges, scores of any magnitude, and a k that follows from a shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import onepass
from harness import Module
from onepass.core.launch import INTERPRET
from onepass.ops.soft_topk.op import KINDS

ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


@ALL_KINDS
def test_float32_where_neighbouring_numbers_are_more_than_eps_apart(kind: str, device: str) -> None:
    """A threshold that lies between two fp32 numbers is told from the nearer one: small gates keep their digits."""
    p = torch.tensor([0.001, 0.04, 0.3, 0.6, 0.96, 0.999], device=device)
    # a score and the next are 1.46 eps apart; several rows of a program's, on a GPU also a team's
    for m in (10, 20000) if device == "cuda" else (10,):
        s = torch.tensor([2884.0, 0.0], device=device).repeat_interleave(m).expand(len(p), 2 * m)
        y = onepass.soft_topk(s, p * m, eps=1 / 6000, kind=kind)
        expected = ((p * m).double() / m)[:, None].expand(-1, m)
        # equal gates share the rounding of their sum: 32 equal numbers, added one after another, are off by up to 6e-7
        torch.testing.assert_close(y[:, :m].double(), expected, rtol=2e-6, atol=0)
        assert not y[:, m:].any()


@ALL_KINDS
def test_float32_threshold_nearer_to_the_number_above_every_score(kind: str, device: str) -> None:
    """The nearer of two fp32 numbers is known after a look between them; that look is no step of Newton's."""
    s, k = torch.randn(40, 1).to(device).expand(40, 4), 1e-3
    for eps in (1e-8, 1e-9):
        total = onepass.soft_topk(s, k, eps=eps, kind=kind).double().sum(-1)
        torch.testing.assert_close(total, torch.full_like(total, k), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_k_and_eps_in_their_own_dtype_and_shape(dtype: torch.dtype) -> None:
    s = torch.randn(2, 3, 20)
    for shape in ((), (1,), (3,), (2, 1), (2, 3)):
        k = torch.full(shape, 4.5).to(dtype).requires_grad_()
        eps = torch.full(shape, 0.5).to(dtype).requires_grad_()
        y = onepass.soft_topk(s, k, eps=eps)
        dk, deps = torch.autograd.grad(y.square().sum(), (k, eps))
        assert (dk.shape, dk.dtype, deps.shape, deps.dtype) == (k.shape, dtype, eps.shape, dtype)
        wide = [t.detach().double().expand(2, 3).clone().requires_grad_() for t in (k, eps)]
        expected = torch.autograd.grad(onepass.soft_topk(s.double(), wide[0], eps=wide[1]).square().sum(), wide)
        for a, e in zip((dk, deps), expected, strict=True):
            tolerance = 8 * torch.finfo(dtype).eps + 1e-5
            torch.testing.assert_close(a.double(), e.sum_to_size(shape), rtol=tolerance, atol=tolerance)


def test_integer_k_tensors() -> None:
    s = torch.randn(2, 20)
    assert torch.equal(onepass.soft_topk(s, torch.tensor([3, 4])), onepass.soft_topk(s, torch.tensor([3.0, 4.0])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@ALL_KINDS
def test_numbers_that_float32_cannot_hold(kind: str, dtype: torch.dtype) -> None:
    """A k that large takes everybody; with an eps that large all gates are equal; |s|/eps may overflow."""
    s = torch.randn(2, 8, dtype=dtype)
    for huge in (math.inf, 1e60):
        assert torch.equal(onepass.soft_topk(s, huge, kind=kind), torch.ones_like(s))
        torch.testing.assert_close(onepass.soft_topk(s, 3, eps=huge, kind=kind), torch.full_like(s, 3 / 8))
    far = torch.tensor([3e38, -3e38, 0.0], dtype=dtype)
    torch.testing.assert_close(onepass.soft_topk(far, 1, eps=0.1, kind=kind), far.new_tensor([1.0, 0.0, 0.0]))


@ALL_KINDS
def test_k_at_least_the_valid_entries(kind: str) -> None:
    s = torch.randn(4, 10, requires_grad=True)
    mask = torch.arange(10) < torch.tensor([[0], [3], [4], [10]])
    k = torch.tensor(4.0, requires_grad=True)
    y = onepass.soft_topk(s, k, mask=mask, kind=kind)
    assert torch.equal(y[:3], mask[:3].float())
    torch.testing.assert_close(y[3].sum(), torch.tensor(4.0))
    ds, dk = torch.autograd.grad(y[:3].sum(), (s, k))
    assert not ds.any()
    assert dk == 0


@ALL_KINDS
def test_upstream_nan_where_nothing_can_change(kind: str) -> None:
    s, mask = torch.randn(2, 10, requires_grad=True), torch.arange(10) < 8
    (ds,) = torch.autograd.grad(
        onepass.soft_topk(s, 3, mask=mask, kind=kind), s, torch.where(mask, 1.0, math.nan).expand(2, 10)
    )
    assert ds.isfinite().all()


@pytest.mark.parametrize(("call", "numbers"), [
    (lambda s: onepass.soft_topk(s, 10), 2), (lambda s: onepass.coor_descent(s, n_iters=50, k=10), 100),
])  # fmt: skip
def test_saved_for_backward(call: Callable[[Tensor], Tensor], numbers: int) -> None:
    """The scores, which exist anyway, and so many numbers per row: of coor_descent two a step."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        s = torch.randn(4, 1000, requires_grad=True)
        call(s)
    assert sum(t.numel() for t in saved if t.data_ptr() != s.data_ptr()) == 4 * numbers


@pytest.mark.interpret
@ALL_KINDS
def test_backward_of_long_rows_in_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a length that the interpreter can bear."""
    from onepass.ops.soft_topk import kernels_backward

    monkeypatch.setattr(kernels_backward, "LONGEST", 256)
    _short_chunks(monkeypatch)
    s = torch.randn(3, 3000, requires_grad=True)
    s.data[1, 3] = math.inf
    k = torch.tensor([2.5, 100.3, 2999.9], requires_grad=True)
    eps, mask = torch.tensor(0.2, requires_grad=True), torch.arange(3000) % 50 != 7
    y = onepass.soft_topk(s, k, eps=eps, mask=mask, kind=kind)
    wide = [t.detach().double().requires_grad_() for t in (s, k, eps)]
    expected = onepass.soft_topk(wide[0], wide[1], eps=wide[2], mask=mask, kind=kind)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)
    gy = torch.randn(3, 3000)
    actual = torch.autograd.grad(y, (s, k, eps), gy)
    for a, e in zip(actual, torch.autograd.grad(expected, wide, gy.double()), strict=True):
        assert (a - e).abs().max() <= 1e-4 * max(1.0, e.abs().max().item())


@pytest.mark.interpret
@pytest.mark.parametrize("longest", [256, 4096])
@pytest.mark.parametrize(("n", "k"), [(2100, 3), (2100, 1500), (70, 50)])
@ALL_KINDS
def test_gradients_of_chosen_entries_alone(
    kind: str, n: int, k: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the gradients of rows that are 0 elsewhere."""
    from onepass.ops.soft_topk import kernels_backward, kernels_chosen, op

    for kernels in (kernels_backward, kernels_chosen):
        monkeypatch.setattr(kernels, "LONGEST", longest)
    _short_chunks(monkeypatch)
    s, eps = torch.randn(3, n), torch.tensor([0.3, 0.5, 0.1])
    s[1, 7] = math.inf
    mask, number = torch.arange(n) % 50 != 9, KINDS.index(kind)
    _, state = op.forward(s, None, eps, mask, float(k), 0.0, number)
    indices = s.masked_fill(~mask, -math.inf).topk(k).indices
    indices[2, k // 2 :] = -1
    g = torch.randn(k, 3).t()
    gy = torch.zeros(3, n).scatter_(1, indices.clamp(min=0), torch.where(indices >= 0, g, 0.0))
    gy[2].scatter_(0, indices[2, : k // 2], g[2, : k // 2])
    actual = op.backward_chosen(g, indices, s, state, eps, mask, 0.0, number, True, True)
    ds, _, deps = op.backward(gy, s, None, eps, mask, state, 1.0, 0.0, number, True, False, True)
    for a, e in zip(actual, (ds, deps), strict=True):
        assert (a - e).abs().max() <= 1e-5 * max(1.0, e.abs().max().item())


def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.ops._shared import kernels_rows

    monkeypatch.setattr(kernels_rows, "CHUNK", 1024)
    monkeypatch.setattr(kernels_rows, "TILE", 1024)


@pytest.mark.interpret
@pytest.mark.parametrize("kind", [*KINDS, "coor_descent"])
def test_rows_beyond_the_registers_are_torchs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward together: they keep different traces. The interpreter has no teams."""
    from onepass.ops.coor_descent import kernels as descents
    from onepass.ops.coor_descent import op as descent
    from onepass.ops.soft_topk import kernels, op

    schedule = {"n_iters": 20, "eps": 0.03, "eps_init": 4.0, "eps_decay": 0.7}

    def run() -> tuple[Tensor, ...]:
        descends = kind == "coor_descent"
        y = onepass.coor_descent(s, k=k, **schedule) if descends else onepass.soft_topk(s, k, eps=0.3, kind=kind)
        return y, *torch.autograd.grad(y, (s, k), gy)

    s, gy = torch.randn(2, 300, requires_grad=True), torch.randn(2, 300)
    k = torch.tensor([2.5, 100.3], requires_grad=True)
    monkeypatch.setattr(kernels, "LONGEST", (256,) * 4)
    monkeypatch.setattr(descents, "FORWARD_MAX_COLS", 256)
    actual = run()
    for module in (op, descent):
        monkeypatch.setattr(module, "uses_triton", lambda x: False)
    assert all(map(torch.equal, actual, run()))


# two of each kind of row in every run, four more in the slow one
SEEDS = [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 48))]


def hostile(seed: int, n: int, generator: torch.Generator) -> Tensor:
    """(n,) fp32: Cauchy, outliers, two groups, ties, every magnitude, few levels, a huge pair, a step."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    normal, u = torch.randn(n, generator=generator, dtype=torch.float64), uniform(n)
    scale = 10 ** (12 * uniform(1) - 4)
    few = max(1, n // 3)
    pair = 1e-3 * normal
    pair[0], pair[-1] = 1e30, -1e30
    outliers = normal.clone()
    outliers[:few] *= 10 ** (30 * uniform(1))
    rows = (
        (math.pi * (u - 0.5)).tan() * scale,
        outliers,
        normal * 10 ** (4 * uniform(1) - 3) + (u > uniform(1)) * 10 ** (32 * uniform(1) - 2),
        (2 * normal).round() * scale,
        normal.sign() * 10 ** (60 * u - 30),
        (4 * u).floor() * 10 ** (30 * uniform(1) - 3),
        pair,
        normal + 1e7 * scale * (u > 0.5) + 1e7 * (uniform(1) - 0.5),
    )
    return rows[seed % len(rows)].float()


@pytest.mark.skipif(INTERPRET, reason="a hundred passes over a thousand rows")
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_sum_to_k_whatever_the_scores(seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(5, 300, (1,), generator=generator))
    if device == "cuda":
        # a few widths, that few kernels be compiled: several rows of a program's, one, a wide one, a team's
        n = (48, 272, 5008, 40000)[seed // 8 % 4]
    s = hostile(seed, n, generator)
    eps = 10 ** (-4 * torch.rand(1, generator=generator)).item()
    descending = s.sort(descending=True).values
    # as many as lie above the widest gap, and beside that
    gap = int((descending[:-1] - descending[1:]).argmax()) + 1
    k = torch.tensor([0.01 * n + 0.3, n / 8, 0.7 * n, gap, gap + 0.5, gap + 1e-3], dtype=torch.float64)
    k = k[k < n]
    s = s.expand(len(k), n)
    for kind in KINDS:
        y = onepass.soft_topk(s.to(device), k.to(device), eps=eps, kind=kind).double().cpu()
        assert ((y.sum(-1) - k).abs() <= 1e-6 * k).all(), (kind, n, k, gap, eps)
        exact = onepass.soft_topk(s.double(), k, eps=eps, kind=kind)
        assert ((exact.sum(-1) - k).abs() <= 1e-9 * k).all(), (kind, n, k, gap, eps)
        # what a sum may be off (1e-6 k, and k itself is rounded to fp32) can be the gate of a single entry
        assert ((y - exact).abs().amax(-1) <= (1e-6 * k).clamp(min=1e-4)).all(), (kind, n, k, gap, eps)


no_interpreter = pytest.mark.skipif(INTERPRET, reason="compiled code calls the registered op")
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "soft_topk of a float": lambda x: onepass.soft_topk(x, x.shape[-1] / 4),
    "soft_topk of an int": lambda x: onepass.soft_topk(x, x.shape[-1] // 4),
    "coor_descent": lambda x: onepass.coor_descent(x, n_iters=5, k=x.shape[-1] // 4),
    "topk": lambda x: onepass.topk(x, x.shape[-1] // 4).values,
}


@no_interpreter
@pytest.mark.parametrize("name", CALLS)
def test_one_program_for_every_length(name: str) -> None:
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(CALLS[name], dynamic=True, fullgraph=True, backend=counter)
    for n in range(8, 40, 4):
        x = torch.randn(3, n)
        torch.testing.assert_close(compiled(x), CALLS[name](x))
    assert counter.frame_count == 1


@no_interpreter
@pytest.mark.parametrize("name", CALLS)
def test_an_exported_program_takes_other_lengths(name: str, strict: bool) -> None:
    shapes = ((dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC),),)
    given = Module(CALLS[name]), (torch.randn(3, 12),)
    program = torch.export.export(*given, dynamic_shapes=shapes, strict=strict).module()
    x = torch.randn(2, 20)
    torch.testing.assert_close(program(x), CALLS[name](x))

"""The pieces of a routed feed-forward as `nn` puts them together: norms, scores, choice, layers, gated addition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.launch import INTERPRET
from onepass.fused.choice import Choice
from onepass.fused.feed_forward import Plan, routed_feed_forward
from onepass.ops.routing import reference
from onepass.ops.soft_topk.reference import soft_topk

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)

BATCH, N, DIM, K = 2, 9, 32, 3
HIDDEN = 16, 64
GROUPS = {
    "tokens": ["x"], "router": ["vectors"], "norms": ["light_norm", "heavy_norm"], "light": [*range(4)],
    "heavy": [*range(4, 8)], "biases": [1, 3, 5, 7], "one norm": ["heavy_norm"],
}  # fmt: skip


def _tensors(device: str, dtype: torch.dtype, bias: bool) -> dict[Any, Tensor | None]:
    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device) / shape[-1] ** 0.5

    found: dict[Any, Tensor | None] = {"x": make(BATCH, N, DIM) * 6, "vectors": make(1, DIM)}
    for name in ("light_norm", "heavy_norm"):
        found[name] = torch.rand(DIM, device=device).to(dtype)
    for branch, hidden in enumerate(HIDDEN):
        for i, shape in enumerate([(hidden, DIM), (hidden,), (DIM, hidden), (DIM,)]):
            found[4 * branch + i] = make(*shape) if bias or len(shape) == 2 else None
    return found


def _ours(t: dict[Any, Tensor | None], mask: Tensor | None, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, vectors = t["x"], t["vectors"]
    assert x is not None
    assert vectors is not None
    return routed_feed_forward(x, vectors, t["light_norm"], t["heavy_norm"], mask, plan, *(t[i] for i in range(8)))


def _definition(t: dict[Any, Tensor | None], mask: Tensor | None, indices: Tensor, plan: Plan) -> list[Tensor]:
    """Y, gates and scores in float64, for a given choice; masked tokens count as zeros."""

    def norm(x: Tensor, weight: Any) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + plan.eps).rsqrt() * weight

    def layers(x: Tensor, first: int) -> Tensor:
        up, up_bias, down, down_bias = (t[first + i] for i in range(4))
        u = F.linear(x, up, up_bias)  # type: ignore[arg-type]
        return F.linear(F.gelu(u), down, down_bias)  # type: ignore[arg-type]

    x, vectors = t["x"], t["vectors"]
    assert x is not None
    assert vectors is not None
    x = x if mask is None else x * mask[..., None]
    scores = reference.score(x, vectors[0], eps=plan.score_eps)
    soft = soft_topk(scores, plan.choice.k, eps=plan.choice.eps, mask=mask)
    found, columns = reference.present(indices, N)
    gates = soft.gather(1, columns).where(found, 0)
    update = layers(norm(reference.gather(x, indices), t["heavy_norm"]), 4)
    return [reference.scatter_add(layers(norm(x, t["light_norm"]), 0), update, gates, indices), gates, scores]


def _close(a: Tensor | None, b: Tensor | None, limit: float) -> None:
    # a gradient that autograd calls unused is one of zeros in the definition
    a = torch.zeros_like(b) if a is None and b is not None else a
    b = torch.zeros_like(a) if b is None and a is not None else b
    if a is not None and b is not None:
        scale = max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a.detach().double(), b.detach().double(), rtol=limit, atol=limit * scale)


@pytest.mark.parametrize("loss", ["y", "gates and scores", "all", "scores"] if not INTERPRET else ["all"])
@pytest.mark.parametrize(("bias", "masked"), [(True, False), (False, True)])
@pytest.mark.parametrize("wanted", ["all", *GROUPS] if not INTERPRET else ["all", "heavy"])
def test_the_node_is_the_composition(device: str, bias: bool, masked: bool, wanted: str, loss: str) -> None:
    kernels = device == "cuda" or INTERPRET
    dtype, limit = (torch.float32, 2e-5) if kernels else (torch.float64, 1e-9)
    plan = Plan(dtype, Choice(K, 0.3, 0, False), 0, 0.0, False, 1e-5, 1e-5, 1e-6)
    given = _tensors(device, dtype, bias)
    mask = torch.ones(BATCH, N, dtype=torch.bool, device=device)
    mask[0, 2:] = False  # fewer than k
    names = [n for group, members in GROUPS.items() if wanted in (group, "all") for n in members]
    leaves = {n: t.requires_grad_() for n in names if (t := given[n]) is not None}
    if not leaves:
        pytest.skip("no such parameters")
    wide = {n: None if t is None else t.detach().double().requires_grad_(n in leaves) for n, t in given.items()}
    y, indices, gates, scores = _ours(given, mask if masked else None, plan)
    expected = _definition(wide, mask if masked else None, indices, plan)
    for a, b in zip((y, gates, scores), expected, strict=True):
        _close(a, b, limit)
    assert not indices.requires_grad
    used = {"y": [0], "gates and scores": [1, 2], "all": [0, 1, 2], "scores": [2]}[loss]
    outs, theirs = [(y, gates, scores)[i] for i in used], [expected[i] for i in used]
    upstream = [torch.randn(o.shape, dtype=dtype, device=device) for o in outs]
    if masked:
        upstream[-1] = upstream[-1].masked_fill(~mask, 0) if used[-1] == 2 else upstream[-1]
    if not any(o.requires_grad for o in theirs):
        pytest.skip("nothing to differentiate")
    ours = torch.autograd.grad(outs, [*leaves.values()], upstream, allow_unused=True)
    reachable = [(o, g.double()) for o, g in zip(theirs, upstream, strict=True) if o.requires_grad]
    definition = torch.autograd.grad(
        [o for o, _ in reachable], [wide[n] for n in leaves], [g for _, g in reachable], allow_unused=True
    )  # type: ignore[arg-type]
    for a, b in zip(ours, definition, strict=True):
        _close(a, b, 4 * limit)


def test_a_loss_on_the_choice_alone_leaves_the_branches_alone(device: str) -> None:
    given = _tensors(device, torch.float32, True)
    leaves = [t.requires_grad_() for t in given.values() if t is not None]
    plan = Plan(torch.float32, Choice(K, 0.3, 0, False), 0, 0.0, False, 1e-5, 1e-5, 1e-6)
    _, _, gates, _ = _ours(given, None, plan)
    grads = torch.autograd.grad(gates.square().sum(), leaves, allow_unused=True)
    assert [g is not None for g in grads] == [True, True] + [False] * 10

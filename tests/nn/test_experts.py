"""`Experts`: the layer against its definition, masks, balance, losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from onepass.core.launch import INTERPRET
from onepass.nn import Experts, load_balancing_loss, router_z_loss, update_balance
from onepass.ops.experts import definition

KINDS = [{}, {"activation": "swiglu", "shared_dim": 8}, {"score_func": "softmax", "norm_topk": False},
         {"score_func": "softmax", "top_k": 1, "shared_dim": 8}]  # fmt: skip


def _definition(layer: Experts, x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return y and the chosen weights."""
    p = dict(layer.named_parameters())
    u = x * (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).rsqrt() * p["norm.weight"]
    z = u @ p["router.weight"].t()
    s = z.softmax(-1) if layer.score_func == "softmax" else z.sigmoid()
    weights = s.gather(-1, indices)
    if layer.norm_topk and layer.top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    y = definition.experts(u, indices, weights, p["up"], p["down"], activation=layer.activation)
    if layer.shared is not None:
        h, gate = u @ p["shared.up.weight"].t(), p.get("shared.gate.weight")
        a = F.gelu(h, approximate="tanh") if gate is None else F.silu(u @ gate.t()) * h
        y = y + a @ p["shared.down.weight"].t()
    return y, weights


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_layer_is_its_definition(kind: dict[str, object], device: str) -> None:
    layer = Experts(16, 4, hidden_dim=24, **kind).to(device)  # type: ignore[arg-type]
    x = torch.randn(2, 9, 16, device=device, requires_grad=True)
    y, routing = layer(x, return_routing=True)
    wide = Experts(16, 4, hidden_dim=24, dtype=torch.float64, **kind)  # type: ignore[arg-type]
    state = {n: t.double() for n, t in layer.state_dict().items()}
    if "activation" in kind:  # as it was written when the gate was a parameter of its own
        state["gate"], state["up"] = state["up"].chunk(2, 2)
        assert wide.load_state_dict({"gate": state["gate"]}, strict=False).unexpected_keys == ["gate"]
    wide.load_state_dict(state)
    rows = x.detach().cpu().double().view(18, 16).requires_grad_()
    expected, weights = _definition(wide, rows, routing.indices.cpu().view(18, -1))
    torch.testing.assert_close(y.cpu().double().view(18, 16), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(routing.weights.cpu().double().view(18, -1), weights, rtol=1e-4, atol=1e-5)
    dy = torch.randn(y.shape)
    found = torch.autograd.grad(y, [x, *layer.parameters()], dy.to(device))
    wanted = torch.autograd.grad(expected, [rows, *wide.parameters()], dy.double().view(18, 16))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.cpu().double().view(b.shape), b, rtol=1e-3, atol=1e-4)


def test_masked_tokens_take_no_part(device: str) -> None:
    """Not even as NaN: outputs 0, indices −1, weights 0, and the others get what they get alone."""
    layer = Experts(16, 4, shared_dim=8).to(device)
    x, mask = torch.randn(2, 7, 16, device=device), torch.rand(2, 7, device=device) < 0.6
    mask[0, 0], mask[0, 1] = True, False
    y, routing = layer(x.masked_fill(~mask[..., None], torch.nan), mask, return_routing=True)
    assert not torch.cat((y[~mask], routing.weights[~mask]), -1).any()
    assert (routing.indices[~mask] == -1).all()
    assert routing.counts.sum() == 2 * mask.sum()
    torch.testing.assert_close(y[mask], layer(x[mask]), rtol=1e-5, atol=1e-6)
    _, alone = layer(x[mask], return_routing=True)
    torch.testing.assert_close(*(load_balancing_loss(r) + router_z_loss(r) for r in (routing, alone)))
    one, same = (layer(t, return_routing=True)[1] for t in (x[0, 0], x[:1, 0]))
    assert load_balancing_loss(one) + router_z_loss(one) == load_balancing_loss(same) + router_z_loss(same)


@pytest.mark.parametrize(("activation", "products"), [("gelu", 2), ("swiglu", 3)])
def test_products_are_counted(activation: str, products: int) -> None:
    layer, x = Experts(16, 4, hidden_dim=24, activation=activation), torch.randn(9, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 9 * 16 * (4 + 2 * 24 * products)


def test_losses() -> None:
    layer = Experts(16, 4, score_func="softmax")
    _, routing = layer(torch.randn(50, 16), return_routing=True)
    torch.set_default_dtype(torch.bfloat16)  # in which a share would have three digits
    p, f = routing.logits.double().softmax(-1).mean(0), routing.counts.double() / 100
    torch.testing.assert_close(load_balancing_loss(routing).double(), 4 * (p * f).sum(), rtol=1e-5, atol=1e-6)
    expected = routing.logits.double().logsumexp(-1).square().mean()
    torch.testing.assert_close(router_z_loss(routing).double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(load_balancing_loss(routing) + router_z_loss(routing), layer.router.weight)[0].any()


def test_balance_moves_toward_the_mean_in_fp32() -> None:
    layer, x = Experts(8, 4, balance_rate=1e-3).bfloat16(), torch.randn(64, 8).bfloat16()
    state = {name: t.bfloat16() + name.endswith("bias") for name, t in layer.state_dict().items()}
    layer.to("meta").load_state_dict(state, assign=True)  # a file of bf16 alone
    layer(x)
    counts = layer.tokens_per_expert.clone()
    assert (counts.sum(), counts.dtype, layer.up.dtype) == (128, torch.float32, torch.bfloat16)
    update_balance(nn.ModuleList([layer, Experts(8, 4, device="meta")]))  # another device
    assert torch.equal(layer.bfloat16().expert_bias, 1 + 1e-3 * (32 - counts).sign())
    assert not layer.tokens_per_expert.any()
    layer.eval()(x)
    assert not layer.tokens_per_expert.any()
    assert "tokens_per_expert" not in layer.state_dict()


def test_four_parts_move_a_bias_as_one_batch() -> None:
    whole, parts, x = Experts(8, 4), Experts(8, 4, device="meta"), torch.randn(64, 8)
    parts.load_state_dict({name: t.clone() for name, t in whole.state_dict().items()}, assign=True)
    whole(x)
    for part in x.split(16):
        checkpoint(parts, part.requires_grad_(), use_reentrant=False).sum().backward()
    # checkpointing counts each part twice
    torch.testing.assert_close(parts.tokens_per_expert, 2 * whole.tokens_per_expert)
    update_balance(nn.ModuleList([whole, parts]))
    assert torch.equal(whole.expert_bias, parts.expert_bias)


def test_transforms_of_torch_func() -> None:
    layer, x = Experts(8, 4), torch.randn(3, 5, 8)
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer.eval()(x), rtol=1e-5, atol=1e-6)
    layer.train()
    weights, before = {n: p.detach() for n, p in layer.named_parameters()}, layer.tokens_per_expert.clone()
    found = torch.func.grad(lambda w: torch.func.functional_call(layer, w, (x,)).square().sum())(weights)
    layer.eval()(x).square().sum().backward()
    torch.testing.assert_close(found, {n: p.grad for n, p in layer.named_parameters()}, rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.tokens_per_expert, before)


@pytest.mark.skipif(INTERPRET, reason="torch.compile of kernels that run in Python")
def test_compiled_in_one_graph_and_exported(device: str) -> None:
    """The same bits as eager; counts too; any length."""
    layer = Experts(16, 4).to(device)
    # compiled, a norm's gradient has other bits: docs/reliability.md
    layer.norm = nn.Identity()
    x, mask = torch.randn(2, 9, 16, device=device, requires_grad=True), torch.rand(2, 9, device=device) < 0.8
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    found = []
    for call in (layer, compiled):
        layer.tokens_per_expert.zero_()
        y = call(x, mask)
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
        found.append([y, *gradients, layer.tokens_per_expert])
    assert all(map(torch.equal, *found))
    exported = torch.export.export(layer.eval(), (x,), dynamic_shapes=({1: torch.export.Dim("n", min=2)},))
    longer = torch.randn(2, 12, 16, device=device)
    assert torch.equal(exported.module()(longer), layer(longer))


@pytest.mark.skipif(INTERPRET, reason="bfloat16")
def test_autocast(device: str) -> None:
    """Logits stay in fp32, products take autocast's dtype, y is like x."""
    layer, x = Experts(16, 4, activation="swiglu", shared_dim=8).to(device), torch.randn(40, 16, device=device)
    plain = layer(x)
    with torch.autocast(device, torch.bfloat16):
        y, again = layer(x, return_routing=True)
    u = layer.norm(x).bfloat16().float()
    torch.testing.assert_close(again.logits, u @ layer.router.weight.t(), rtol=1e-4, atol=1e-5)
    assert (y.dtype, torch.equal(y, plain)) == (torch.float32, False)
    torch.testing.assert_close(y, plain, rtol=0.05, atol=0.05)


def test_router_and_norm_with_hooks_and_others_in_their_place(autocast: bool, device: str) -> None:
    """They are called then; logits stay in fp32."""
    layer, x = Experts(16, 4).to(device), torch.randn(40, 16, device=device)
    with torch.autocast(device, torch.float16, enabled=autocast):
        _, plain = layer(x, return_routing=True)
        for module in (layer.norm, layer.router):
            module.register_forward_hook(lambda module, given, y: 2 * y)
        _, hooked = layer(x, return_routing=True)
        layer.router = nn.Sequential(layer.router)
        _, inside = layer(x, return_routing=True)
    torch.testing.assert_close(hooked.logits, 4 * plain.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(inside.logits, hooked.logits)


@pytest.mark.gpu
def test_a_graph_counts_at_each_replay() -> None:
    layer, x = Experts(64, 8).cuda(), torch.randn(100, 64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = layer(x)
        update_balance(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        y = layer(x)
        update_balance(layer)
    bias = layer.expert_bias.clone()
    layer.expert_bias.zero_()
    graph.replay()
    assert all(map(torch.equal, (y, layer.expert_bias), (expected, bias)))
    graph.replay()
    assert layer.expert_bias.abs().max() <= 2e-3 + 1e-9

"""What a type checker tells a user of this package: mypy reads the program below, as a user's would be read.

A line marked ``# wrong`` must be refused and every other accepted. `assert_type` refuses Any.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import onepass
from onepass import TopK, nn, optim
from onepass.compat import colt5_attention, cs336, lion_pytorch, triton_transformer
from onepass.nn import AttentionRouting, BlockRouting, RouterOutput
from onepass.nn.cache import BlockCache
from onepass.optim.release import ReleasedGradients

x = torch.ones(2, 16, 8)
linear = torch.nn.Linear(8, 8)
assert_type(onepass.__version__, str)


def functions(some: Tensor | None) -> None:
    assert_type(onepass.layer_norm(x), Tensor)
    assert_type(onepass.layer_norm(x, x, x, eps=1e-5, stable=True, residual=x), tuple[Tensor, Tensor])
    assert_type(onepass.layer_norm(x, residual=some), Tensor | tuple[Tensor, Tensor])
    assert_type(onepass.layer_norm(x), tuple[Tensor, Tensor])  # wrong
    assert_type(onepass.rms_norm(x), Tensor)
    assert_type(onepass.rms_norm(x, residual=some), Tensor | tuple[Tensor, Tensor])
    assert_type(onepass.rms_norm(x, x, x, gate=x, gate_first=True, groups=2, rounding="twice"), Tensor)
    assert_type(onepass.layer_norm(x, x, x, offset=1.0, out_dtype=torch.float32), Tensor)
    assert_type(onepass.rms_norm(x, quantize="row"), onepass.Quantized)
    assert_type(onepass.rms_norm(x, quantize="block", residual=x), tuple[onepass.Quantized, Tensor])
    onepass.rms_norm(x, quantize="int8")  # wrong
    onepass.layer_norm(x, gate=x)  # wrong
    onepass.rms_norm(x, rounding="never")  # wrong
    assert_type(onepass.qk_norm_rope(x, x, x, None, cos=x, sin=x, positions=x), tuple[Tensor, Tensor])
    onepass.qk_norm_rope(x, x)  # wrong
    assert_type(onepass.weighted_sum(x, x), Tensor)
    assert_type(onepass.expert_order(x, 2), tuple[Tensor, Tensor, Tensor])
    assert_type(onepass.experts(x, x, x, x, x, activation="swiglu"), Tensor)
    assert_type(onepass.soft_topk(x, 2), Tensor)
    assert_type(onepass.coor_descent(x, n_iters=1, k=2), Tensor)
    with onepass.swap(linear, include="layers.*", exclude=["a", "b"], strict=True, dry_run=True) as report:
        assert_type(report, onepass.SwapReport)
    assert_type(report.exchanged[0].names, tuple[str, ...])
    assert_type(report.undo(), None)
    onepass.swap("linear")  # wrong
    assert_type(onepass.kth_value(x, 1), Tensor)
    assert_type(onepass.topk(x, 2), TopK)
    assert_type(onepass.topk(x, 2).gates, Tensor)
    onepass.layer_norm(x, residual=1)  # wrong


def norms(some: Tensor | None) -> None:
    assert_type(nn.LayerNorm(8)(x), Tensor)
    assert_type(nn.LayerNorm(8)(x, x), tuple[Tensor, Tensor])
    assert_type(nn.LayerNorm(8)(x, residual=some), Tensor | tuple[Tensor, Tensor])
    assert_type(nn.RMSNorm(8)(x), Tensor)
    assert_type(onepass.nn.RMSNorm(8, rounding="twice")(x, residual=x), tuple[Tensor, Tensor])
    assert_type(nn.RMSNorm(8).forward(x, x), tuple[Tensor, Tensor])
    nn.LayerNorm(8)(x, 1)  # wrong


def modules(asked: bool) -> None:
    assert_type(nn.WeightedSum(8)(x), Tensor)
    assert_type(nn.LocalAttention(8)(x), Tensor)
    assert_type(nn.Router(8)(x, 2), RouterOutput)
    nn.Router(8, score="cosine")  # wrong
    assert_type(nn.CausalRouter(8)(x, 2, mask=None), RouterOutput)
    assert_type(nn.Routed(linear, linear, nn.Router(8), k=2)(x), Tensor)
    assert_type(nn.Routed(linear, linear, nn.Router(8), k=2)(x, return_routing=True), tuple[Tensor, RouterOutput])
    assert_type(nn.RoutedFeedForward(8, k=2)(x, return_routing=False), Tensor)
    nn.RoutedFeedForward(8, k=2, balance="even")  # wrong
    nn.Routed(linear, linear, nn.Router(8), 2, True)  # wrong
    assert_type(nn.Experts(8, 4, top_k=1)(x), Tensor)
    assert_type(nn.Experts(8, 4)(x, return_routing=True), tuple[Tensor, nn.ExpertRouting])
    routing = nn.Experts(8, 4)(x, None, True)[1]
    assert_type(nn.load_balancing_loss(routing) + nn.router_z_loss(routing), Tensor)
    assert_type(nn.update_balance(linear), None)
    assert_type(nn.RoutedBlock(8, k=2)(x), Tensor)
    assert_type(nn.RoutedAttention(8, k_q=2, k_kv=2)(x), Tensor)
    assert_type(nn.RoutedAttention(8, k_q=2, k_kv=2)(x, return_routing=True), tuple[Tensor, AttentionRouting])
    assert_type(nn.RoutedBlock(8, k=2)(x, return_routing=True)[1], BlockRouting)
    assert_type(nn.graphed(nn.RoutedBlock(8, k=2), x), Callable[..., Any])
    bounds = torch.tensor([0, 9, 16], dtype=torch.int32)
    assert_type(nn.RoutedBlock(8, k=0.5)(x[0], cu_seqlens=bounds, max_seqlen=9), Tensor)
    assert_type(nn.Router(8)(x[0], 0.5, cu_seqlens=bounds), RouterOutput)
    nn.RoutedFeedForward(8, k=0.5)(x[0], cu_seqlens=[0, 9, 16])  # wrong
    decoder = nn.RoutedBlock(8, k=0.5, causal=True)
    assert_type(decoder.new_cache(2), BlockCache)
    assert_type(decoder(x, cache=decoder.new_cache(2)), Tensor)
    assert_type(decoder.new_cache(2).nbytes, int)
    decoder.new_cache(x)  # wrong
    writer = nn.Decoder([decoder], linear, linear, batch=2, max_tokens=9, top_k=3)
    assert_type(writer.generate(x[..., 0].long(), 4, lengths=[3, 5]), Tensor)
    assert_type(writer.step(), Tensor)
    nn.Decoder(decoder, linear, linear, batch=2, max_tokens=9)  # wrong
    assert_type(nn.routing_stats([[nn.RoutedBlock(8, k=2)(x, return_routing=True)[1]]], [None]), dict[str, float])
    nn.routing_stats([{"0": nn.Router(8)(x, 2)}])
    nn.routing_stats([[x]])  # wrong
    assert_type(nn.RoutedBlock(8, k=2)(x, return_routing=asked), Tensor | tuple[Tensor, BlockRouting])
    cross = nn.RoutedCrossAttention(8, k_q=2, k_kv=2)
    assert_type(cross(x, x), Tensor)
    assert_type(cross(x, x, return_routing=True), tuple[Tensor, AttentionRouting])
    assert_type(cross(x, x, return_routing=asked), Tensor | tuple[Tensor, AttentionRouting])
    nn.RoutedBlock(8, k=2)(x).feed_forward  # wrong
    assert_type(nn.TransformerBlock(8, dim_head=4, window=4)(x), Tensor)
    block = nn.TransformerBlock(8, dim_head=4, num_experts=4)
    assert_type(block(x, return_routing=True), tuple[Tensor, nn.ExpertRouting | None])
    nn.TransformerBlock(8, 2)  # wrong


def optimizers() -> None:
    assert_type(optim.Lion([x]).step(), None)
    assert_type(optim.Lion([x]).step(lambda: x.sum()), Tensor)
    assert_type(optim.clip_grad_norm([x], 1.0), Tensor)
    assert_type(optim.release_gradients(linear, optim.Lion([x])), ReleasedGradients)
    optim.clip_grad_norm([x])  # wrong


def compat() -> None:
    assert_type(colt5_attention.coor_descent(x, n_iters=1, k=2), Tensor)
    assert_type(colt5_attention.triton_coor_descent(x, n_iters=1, k=2), Tensor)
    assert_type(colt5_attention.topk(x, 2), colt5_attention.TopkReturn)
    assert_type(cs336.WeightedSumFunc.apply(x, x), Tensor)
    assert_type(lion_pytorch.Lion([x]).step(), None)
    assert_type(lion_pytorch.update_fn(x, x, x, 1e-4, 0.0, 0.9, 0.99), None)  # type: ignore[func-returns-value]
    assert_type(triton_transformer.layernorm(x, x), Tensor)
"""


def test_results_have_types(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    # `make types` has these options, and torch in its cache; mypy takes PYTHONPATH for installed packages
    options = "--cache-dir", ROOT / ".mypy_cache", "--config-file", ROOT / "pyproject.toml", "--no-error-summary"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    errors = re.findall(r"^program\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    wrong = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert (done.stderr, {int(line) for line, _ in errors}) == ("", wrong), done.stdout
    codes = "arg-type assert-type attr-defined call-arg call-overload list-item"  # default options find these, too
    assert {code for _, code in errors} <= {*codes.split()}, done.stdout


def test_every_public_name_is_in_the_program() -> None:
    for module, names in json.loads((ROOT / "tests" / "stability.json").read_text())["names"].items():
        for name in names:
            assert re.search(rf"\b{name}\b", PROGRAM), f"{module}.{name}: say above what it returns"

"""The fused path on CUDA against the definition: dtypes, layouts, many groups, graphs, GradScaler, no waiting."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.ops.lion.op import lion_
from onepass.ops.lion.reference import join, reference
from onepass.optim import Lion, clip_grad_norm, release_gradients

pytestmark = pytest.mark.gpu

SHAPES = [(3, 4), (5,), (0,), (), (1023,), (1024,), (1025,), (130, 300), (1 << 20,), (999_999,)]
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# no 16-bit numbers are an exact tie with these
BETAS = (0.9137, 0.99)


def make(dtype: torch.dtype, shapes: Any = SHAPES, scale: float = 1.0) -> list[Tensor]:
    return [(torch.randn(s, device="cuda") * scale).to(dtype) for s in shapes]


def near(got: Tensor, want: Tensor, ulp: float) -> bool:
    return bool(((got.double() - want).abs() <= want.abs() * ulp * 1.01 + 1e-6).all())


def hyper(*rows: tuple[float, float, float, float, float]) -> Tensor:
    return torch.tensor([[lr, wd, b1, 1 - b1, b2, 1 - b2, f, 0.0] for lr, wd, b1, b2, f in rows], dtype=torch.float64)


@pytest.mark.parametrize("dtypes", itertools.product(HALF_ULP, repeat=3), ids=lambda d: "-".join(str(t)[6:] for t in d))
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_every_dtype_mix_and_alignment(dtypes: tuple[torch.dtype, ...], offset: int) -> None:
    sizes = [1, 7, 1023, 1024, 1025, 70_000]
    params, grads, momenta = (
        [(torch.randn(n + offset, device="cuda") * s).to(t)[offset:] for n in sizes]
        for t, s in zip(dtypes, (1.0, 1.0, 0.1), strict=True)
    )
    want = [
        reference(p.double(), g.double(), m.double(), lr=1e-3, weight_decay=0.1, betas=BETAS)
        for p, g, m in zip(params, grads, momenta, strict=True)
    ]
    lion_(params, grads, momenta, [], [0] * len(sizes), hyper((1e-3, 0.1, *BETAS, 1.0)), "none")
    for p, m, (new_p, new_m) in zip(params, momenta, want, strict=True):
        assert near(p, new_p, HALF_ULP[dtypes[0]] + 2.0**-23)
        assert near(m, new_m, HALF_ULP[dtypes[2]] + 2.0**-23)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("momentum", [torch.float32, torch.bfloat16])
def test_remainder_is_fp32_bit_for_bit(offset: int, momentum: torch.dtype) -> None:
    low = [t[offset:].requires_grad_() for t in make(torch.bfloat16, [(n + offset,) for n in (5, 1024, 100_003)])]
    full = [p.detach().float().requires_grad_() for p in low]
    ours = Lion(low, lr=3e-6, weight_decay=0.1, state_dtype=momentum)
    oracle = Lion(full, lr=3e-6, weight_decay=0.1, state_dtype=momentum)
    for _ in range(20):
        for p, q in zip(low, full, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        ours.step()
        oracle.step()
    for p, q in zip(low, full, strict=True):
        assert torch.equal(join(p.detach(), ours.state[p]["remainder"]), q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kahan_follows_float64(dtype: torch.dtype) -> None:
    p = make(dtype, [(10_000,)])[0].requires_grad_()
    exact, m = p.detach().double(), torch.zeros_like(p, dtype=torch.float64)
    optimizer = Lion([p], lr=1e-4, betas=BETAS, low_precision="kahan", state_dtype=torch.float32)
    for _ in range(50):
        p.grad = torch.randn_like(p)
        exact, m = reference(exact, p.grad.double(), m, lr=1e-4, betas=BETAS)
        optimizer.step()
    full = p.detach().double() + optimizer.state[p]["kahan_comp"].double()
    moved = (exact - p.detach().double()).abs().mean()
    assert (full - exact).abs().mean() < 0.1 * moved


def test_together_is_one_at_a_time_is_cpu() -> None:
    a = [p.requires_grad_() for p in make(torch.float32)]
    b = [p.detach().clone().requires_grad_() for p in a]
    c = [p.detach().cpu().requires_grad_() for p in a]
    together, on_cpu = Lion(a, lr=1e-2, weight_decay=0.1, betas=BETAS), Lion(c, lr=1e-2, weight_decay=0.1, betas=BETAS)
    apart = [Lion([p], lr=1e-2, weight_decay=0.1, betas=BETAS) for p in b]
    for _ in range(3):
        for p, q, r in zip(a, b, c, strict=True):
            p.grad = torch.randn_like(p)
            q.grad, r.grad = p.grad.clone(), p.grad.cpu()
        for optimizer in (together, on_cpu, *apart):
            optimizer.step()
    for p, q, r in zip(a, b, c, strict=True):
        assert torch.equal(p, q)
        # a sign can differ where u is a rounding error
        assert ((p.cpu() - r).abs() > 1e-6).double().mean() < 1e-4 if p.numel() else True


def test_many_groups_and_many_small_tensors() -> None:
    a = [p.requires_grad_() for p in make(torch.float32, [(n,) for n in range(1, 400)])]
    b = [p.detach().double().requires_grad_() for p in a]
    groups = [
        [{"params": [p], "lr": 1e-3 * (1 + i % 7), "weight_decay": 0.01 * (i % 3), "maximize": i % 2 == 0}
         for i, p in enumerate(ps)]
        for ps in (a, b)
    ]  # fmt: skip
    fused, exact = Lion(groups[0], betas=BETAS), Lion(groups[1], betas=BETAS)
    for _ in range(3):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.double()
        fused.step()
        exact.step()
    wrong = sum(int(((p.double() - q).abs() > 1e-5).sum()) for p, q in zip(a, b, strict=True))
    assert wrong <= 2


def test_special_gradients() -> None:
    inf, nan = float("inf"), float("nan")
    g = torch.tensor([nan, inf, -inf, 0.0, 1e-42, -1e-42, 3e38, -3e38], device="cuda")
    for n in (1, 200):
        p = torch.ones(8 * n, device="cuda", requires_grad=True)
        p.grad = g.repeat(n)
        optimizer = Lion([p], lr=0.25)
        optimizer.step()
        want = torch.tensor([nan, 0.75, 1.25, 1.0, 0.75, 1.25, 0.75, 1.25], device="cuda").repeat(n)
        assert torch.equal(p.nan_to_num(7.0), want.nan_to_num(7.0))
        m = optimizer.state[p]["exp_avg"]
        assert m[0].isnan()
        assert m[1] == inf


def test_gradients_that_move_and_change_layout() -> None:
    p = torch.randn(64, 128, device="cuda", requires_grad=True)
    q = p.detach().double().requires_grad_()
    fused, exact = Lion([p], lr=1e-2, betas=BETAS), Lion([q], lr=1e-2, betas=BETAS)
    keep = []
    for i in range(8):
        g = torch.randn(64, 128, device="cuda")
        storage = torch.empty(64 * 128 + i, device="cuda")
        p.grad = (g, g.t().contiguous().t(), storage[i:].view(64, 128).copy_(g))[i % 3]
        keep.append(p.grad)
        q.grad = g.double()
        fused.step()
        exact.step()
    assert ((p.double() - q).abs() > 1e-5).sum() <= 2


def test_fused_true_refuses_what_it_cannot_do() -> None:
    p = torch.ones(4, 6, device="cuda")[:, ::2].requires_grad_()
    p.grad = torch.ones(4, 3, device="cuda")
    with pytest.raises(RuntimeError, match="`fused=True` requires dense parameters"):
        Lion([p], fused=True).step()
    Lion([p], lr=0.5).step()
    assert torch.equal(p, torch.full((4, 3), 0.5, device="cuda"))


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"cautious": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fallbacks_agree(options: dict[str, Any], dtype: torch.dtype) -> None:
    a = [p.requires_grad_() for p in make(dtype, SHAPES[:8])]
    b = [p.detach().cpu().requires_grad_() for p in a]
    ours = Lion(a, lr=1e-2, weight_decay=0.1, betas=BETAS, **options)
    on_cpu = Lion(b, lr=1e-2, weight_decay=0.1, betas=BETAS, cautious=options.get("cautious", False))
    for _ in range(3):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.cpu()
        ours.step()
        on_cpu.step()
    for p, q in zip(a, b, strict=True):
        if p.numel():
            assert ((p.cpu().double() - q.double()).abs() > 1e-2 * q.double().abs() + 1e-4).double().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_replay_sees_the_schedulers_lr(dtype: torch.dtype) -> None:
    a = [p.requires_grad_() for p in make(dtype, [(1000,), (50, 7)])]
    b = [p.detach().clone().requires_grad_() for p in a]
    captured = Lion([{"params": a[:1]}, {"params": a[1:], "lr": 3e-2}], lr=1e-2, weight_decay=0.1, capturable=True)
    eager = Lion([{"params": b[:1]}, {"params": b[1:], "lr": 3e-2}], lr=1e-2, weight_decay=0.1)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 0.5**i) for o in (captured, eager)]

    def grads() -> None:
        for p, q in zip(a, b, strict=True):
            q.grad = torch.randn_like(q)
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(q.grad)

    grads()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    eager.step()
    graph = torch.cuda.CUDAGraph()
    before = [p.detach().clone() for p in a]
    with torch.cuda.graph(graph):
        captured.step()
    for p, old in zip(a, before, strict=True):
        assert torch.equal(p, old), "capturing must not run"
    for i in range(5):
        for scheduler in schedulers:
            scheduler.step()
        grads()
        if i == 3:
            captured.step()  # an eager step between replays must not disturb the graph's table, nor it this one's
        else:
            graph.replay()
        eager.step()
        for p, q in zip(a, b, strict=True):
            assert torch.equal(p, q)


def test_capture_needs_capturable_and_a_first_step() -> None:
    for capturable in (False, True):
        p = torch.ones(3, device="cuda", requires_grad=True)
        p.grad = torch.ones(3, device="cuda")
        optimizer = Lion([p], capturable=capturable)
        if not capturable:
            optimizer.step()
        words = "take a step before" if capturable else "capturable is False"
        with pytest.raises(RuntimeError, match=words), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
        torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler(dtype: torch.dtype) -> None:
    p = torch.ones(3000, dtype=dtype, device="cuda", requires_grad=True)
    q = p.detach().clone().requires_grad_()
    scaled, plain = (Lion([x], lr=0.25, state_dtype=torch.float32, betas=BETAS) for x in (p, q))
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for i in range(4):
        scaler.scale(torch.ones((), device="cuda"))
        g = torch.randn_like(q)
        p.grad = g * scaler.get_scale()
        if i == 1:
            p.grad[17] = float("inf")
        scaler.step(scaled)
        if i != 1:
            q.grad = g
            plain.step()
        scaler.update()
        assert torch.equal(p, q)
        assert torch.equal(scaled.state[p]["exp_avg"], plain.state[q]["exp_avg"])


def test_step_does_not_wait_for_the_device() -> None:
    params = [p.requires_grad_() for p in make(torch.bfloat16)]
    optimizer = Lion(params, lr=torch.tensor(1e-3, device="cuda"))
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * i
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_extra_memory() -> None:
    params = [torch.randn(1 << 22, device="cuda").requires_grad_() for _ in range(8)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = Lion(params)
    torch.cuda.synchronize()
    # what was asked for: the allocator hands out up to a megabyte more with a large block
    key = "requested_bytes.all."
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()[key + "current"]
    optimizer.step()
    states = sum(p.numel() * 4 for p in params)
    assert torch.cuda.memory_stats()[key + "peak"] - before - states < 1 << 20


def test_more_than_2_to_31_elements() -> None:
    n = 2**31 + 1025
    if torch.cuda.mem_get_info()[0] < 4 * 2 * n:
        pytest.skip("needs 18 GiB")
    p, g, m = (torch.zeros(n, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    g[-3:] = 1.0
    g[7] = -1.0
    lion_([p], [g], [m], [], [0], hyper((0.5, 0.0, 0.9, 0.99, 1.0)), "none")
    assert torch.equal(p[-4:].float().cpu(), torch.tensor([0.0, -0.5, -0.5, -0.5]))
    assert p[7] == 0.5
    assert p.count_nonzero() == 4


def test_other_devices_are_guarded() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    params = [torch.ones(3, device=f"cuda:{i}", requires_grad=True) for i in (0, 1)]
    for p in params:
        p.grad = torch.ones_like(p)
    Lion(params, lr=0.5).step()
    for p in params:
        assert torch.equal(p.cpu(), torch.full((3,), 0.5))


def test_compiled_step() -> None:
    a = [p.requires_grad_() for p in make(torch.float32, [(40,), (3, 5)])]
    b = [p.detach().clone().requires_grad_() for p in a]
    lr = torch.tensor(1e-2, device="cuda")
    compiled, eager = Lion(a, lr=lr, weight_decay=0.1), Lion(b, lr=1e-2, weight_decay=0.1)
    step = torch.compile(compiled.step, backend="aot_eager")
    for _ in range(3):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        step()
        eager.step()
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)


LOW = [
    (torch.float32, {"state_dtype": "int8"}),
    (torch.bfloat16, {"state_dtype": "int8", "low_precision": "none"}),
    (torch.bfloat16, {"state_dtype": "int8", "low_precision": "remainder"}),
    (torch.bfloat16, {"low_precision": "stochastic"}),
    (torch.float16, {"low_precision": "stochastic", "state_dtype": "int8"}),
    (torch.float32, {"cautious": True}),
    (torch.bfloat16, {"cautious": 0.25, "cautious_weight_decay": True}),
    (torch.bfloat16, {"cautious": True, "state_dtype": "int8", "low_precision": "stochastic"}),
]


@pytest.mark.parametrize(("dtype", "options"), LOW, ids=str)
def test_low_precision_and_cautious_are_the_cpus(dtype: torch.dtype, options: dict[str, Any]) -> None:
    a = [p.requires_grad_() for p in make(dtype, [*SHAPES, (5000,)])]
    b = [p.detach().cpu().requires_grad_() for p in a]
    fused, on_cpu = (Lion(x, lr=1e-2, weight_decay=0.1, betas=BETAS, **options) for x in (a, b))
    for _ in range(3):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.cpu()
        fused.step()
        on_cpu.step()
    assert fused._work is not None
    assert fused._work.all_fused
    for p, q in zip(a, b, strict=True):
        # fp32 may round a tie, or a code, to the other side; then the weight differs by the step
        differ = (p.cpu().double() - q.double()).abs() > 1e-5 + 2.0**-7 * q.double().abs() * (dtype != torch.float32)
        assert differ.sum() <= 1 + p.numel() // 500
        for key, value in on_cpu.state[q].items():
            other = fused.state[p][key].cpu()
            assert other.dtype == value.dtype
            if value.dtype in (torch.int8, torch.int64):
                assert (other != value).sum() <= p.numel() // 50


@pytest.mark.parametrize(("dtype", "options"), LOW, ids=str)
def test_low_precision_is_deterministic_resumes_and_does_not_depend_on_grouping(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    start = make(dtype, [(5000,), (77,), (300_001,)])

    def train(optimizer: Lion, params: list[Tensor], steps: range) -> None:
        for step in steps:
            for i, p in enumerate(params):
                generator = torch.Generator("cuda").manual_seed(100 * step + i)
                p.grad = torch.randn(p.shape, device="cuda", generator=generator).to(dtype)
            optimizer.step()

    results = []
    for grouping in ([[0, 1, 2]], [[0, 1, 2]], [[0], [1], [2]]):
        params = [p.clone().requires_grad_() for p in start]
        optimizer = Lion([{"params": [params[i] for i in g]} for g in grouping], lr=1e-3, weight_decay=0.1, **options)
        train(optimizer, params, range(3))
        if len(results) == 1:
            weights, state = [p.detach().clone().requires_grad_() for p in params], optimizer.state_dict()
            params, optimizer = weights, Lion(weights, lr=5.0)
            optimizer.load_state_dict(state)
        train(optimizer, params, range(3, 6))
        results.append([p.detach() for p in params] + [optimizer.state[p]["exp_avg"] for p in params])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_int8_is_scale_invariant() -> None:
    a = torch.randn(100_000, device="cuda", requires_grad=True)
    b = a.detach().clone().requires_grad_()
    one, two = (Lion([x], lr=1e-2, state_dtype="int8") for x in (a, b))
    for _ in range(4):
        a.grad = torch.randn_like(a)
        b.grad = a.grad * 2.0**-20
        one.step()
        two.step()
    assert torch.equal(a, b)
    assert torch.equal(one.state[a]["exp_avg"], two.state[b]["exp_avg"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clipping_is_torchs_waits_for_nothing_and_repeats_its_bits(dtype: torch.dtype) -> None:
    a = [p.requires_grad_() for p in make(dtype, [*SHAPES, (3_000_001,)])]
    optimizer = Lion(a, lr=1e-2, betas=BETAS, state_dtype=torch.float32)
    for p in a:
        p.grad = torch.randn_like(p)
    want = float(torch.nn.utils.get_total_norm([p.grad.double() for p in a if p.grad is not None]))
    first = clip_grad_norm(a, 2.0)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norms = []
        for _ in range(20):
            for p in a:
                assert p.grad is not None
                p.grad = p.grad.clone()
            norms.append(clip_grad_norm(a, 2.0))
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert abs(float(first) - want) < 1e-5 * want
    assert all(torch.equal(n, first) for n in norms)
    p = a[-1]
    assert p.grad is not None
    m = optimizer.state[p]["exp_avg"].double()
    assert torch.allclose(m, p.grad.double() * (2.0 / want) * (1 - 0.99**21), rtol=1e-4)


def test_clipping_with_grad_scaler_and_mixed_dtypes() -> None:
    a = [torch.zeros(1000, device="cuda", dtype=t, requires_grad=True) for t in (torch.float32, torch.float16)]
    optimizer = Lion(a, state_dtype=torch.float32)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    scale = scaler.scale(torch.ones((), device="cuda"))
    for p in a:
        p.grad = torch.full_like(p, 3.0 * 256)
    norm = clip_grad_norm(a, 1.0, grad_scale=scale)
    assert abs(float(norm) - 3.0 * 2000**0.5) < 1e-3
    scaler.step(optimizer)
    for p in a:
        m = optimizer.state[p]["exp_avg"]
        assert torch.allclose(m, torch.full_like(m, 0.01 / 2000**0.5), rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"state_dtype": "int8", "low_precision": "stochastic"}, {"cautious": True}])
def test_graph_with_clipping_and_every_mode(options: dict[str, Any]) -> None:
    a = [p.requires_grad_() for p in make(torch.bfloat16, [(5000,), (70,)])]
    b = [p.detach().clone().requires_grad_() for p in a]
    captured, eager = (Lion(x, lr=1e-2, capturable=c, **options) for x, c in ((a, True), (b, False)))
    for p in a:
        p.grad = torch.zeros_like(p)

    def grads() -> None:
        for p, q in zip(a, b, strict=True):
            q.grad = torch.randn_like(q)
            assert p.grad is not None
            p.grad.copy_(q.grad)

    def both(optimizer: Lion, params: list[Tensor]) -> None:
        clip_grad_norm(params, 0.5)
        optimizer.step()

    grads()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both(captured, a)
    torch.cuda.current_stream().wait_stream(stream)
    both(eager, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both(captured, a)
    for _ in range(4):
        grads()
        graph.replay()
        both(eager, b)
        for p, q in zip(a, b, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(captured.state[p]["exp_avg"], eager.state[q]["exp_avg"])


def test_released_gradients_take_less_memory_and_change_nothing() -> None:
    def build() -> tuple[torch.nn.Module, Lion]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(12))).cuda()
        return model, Lion(model.parameters(), lr=1e-3)

    x = torch.randn(8, 2048, device="cuda")
    peaks, models = [], []
    for released in (False, True):
        model, optimizer = build()
        if released:
            release_gradients(model, optimizer, bucket_bytes=1 << 24)
        for i in range(3):
            if i == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        models.append(model)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    # 12 gradients of 16 MiB against two of them and what backward itself needs
    assert peaks[0] > 12 << 24
    assert peaks[1] < 4 << 24

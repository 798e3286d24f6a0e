"""Lion from step to step, whatever happens between: each step is the definition in float64 of what was there before.

Hypothesis draws what happens. On a CPU it is the torch path, in Triton's interpreter and on CUDA the kernels.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from onepass.core.launch import INTERPRET
from onepass.ops.lion.definition import Row, dequantize, join, quantize_, reference, scales_for
from onepass.optim import Lion, clip_grad_norm
from onepass.optim.options import has_remainder

F64, F32, F16, BF16, C64 = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64
# the interpreter converts to bf16 otherwise than a GPU; there it is about launches, so that all takes their way
DTYPES = [F32, F32, F16] if INTERPRET else [F32, F32, BF16, BF16, F16, F64, C64]
SHAPES = [(), (1,), (0,), (3, 5), (6, 6), (300,), *([] if INTERPRET else [(4096,), (5001,)])]
# an interpreted conversion to 16 bits truncates
ULP = {F64: 1e-12, F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-11, C64: 2.0**-22}
CHANGES: dict[str, list[Any]] = {
    "lr": [0.0625, 0.25, 0.0, lambda: torch.tensor(0.5), lambda: torch.full((1,), 0.03125), lambda: np.array(0.125)],
    "betas": [(0.9137, 0.97), (0.5, 0.75), lambda: [0.8071, 0.9]],
    "weight_decay": [0.0, 0.5, lambda: torch.tensor(0.25)],
    "maximize": [True, False],
    # 1.0 and False are off, 0.0 and True are on, and Python finds False equal to 0.0
    "cautious": [False, True, 0.0, 1.0, 0.25, 1, np.True_],
    "cautious_weight_decay": [True, False],
    "foreach": [None] if INTERPRET else [None, True, False],
    # codes are interpreted in `test_launched.py`
    "state_dtype": [None, F32] if INTERPRET else [None, F32, BF16, "int8"],
    "low_precision": ["auto", "none"],
    "capturable": [True, False],
}
REFUSED: list[tuple[str, Any, str]] = [
    ("low_precision", "auto8", "Invalid low_precision: 'auto8'; "),
    ("state_dtype", "auto8", "Invalid state_dtype: 'auto8'; "),
    ("betas", (torch.tensor(0.5), 0.99), "Lion takes two numbers"),
    ("betas", (0.5,), r"Invalid betas: \(0.5,\); Lion takes two numbers"),
    ("cautious", torch.tensor(0.5), "Invalid cautious value"),
]


def _fits(key: str, value: Any, dtypes: set[torch.dtype]) -> bool:
    """Whether parameters of these dtypes take an option."""
    if key == "state_dtype":
        return not (value in (BF16, "int8") and C64 in dtypes)
    return True


def _near(found: Tensor, wanted: Tensor, ulp: float, dtype: torch.dtype) -> bool:
    """Whether they differ by a rounding at the end, and what fp32 loses of larger terms."""
    room = wanted.abs() * ulp * 1.01 + (1e-12 if dtype == F64 else 2e-6)
    return bool(((found - wanted).abs() <= room).all())


def _reals(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


Change = Callable[["Machine", st.DataObject], None]


def _between_steps(change: Change) -> Change:
    """The same optimizer steps before, twice, and after: what it keeps from step to step must see the change."""

    @functools.wraps(change)
    def run(self: Machine, data: st.DataObject) -> None:
        self.one_step(data, "every")
        self.one_step(data, "every")
        change(self, data)
        self.one_step(data, "every")

    return run


class Machine(RuleBasedStateMachine):
    """An optimizer, and of each parameter what it held after the last step."""

    device = "cpu"

    @initialize(seed=st.integers(0, 2**31), written=st.booleans(), data=st.data())
    def begin(self, seed: int, written: bool, data: st.DataObject) -> None:
        self.random = torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"lr": torch.tensor(0.125), "betas": [0.9, 0.99]} if written else {"lr": 0.125}
        params = [self._parameter(F32, (40,)), self._parameter(F32, (6, 6))]
        self.optimizer = Lion(params, weight_decay=0.125, **options)
        codes = {"params": [self._parameter(F32, (70 if INTERPRET else 4099,))]}
        self.optimizer.add_param_group({**codes, "state_dtype": CHANGES["state_dtype"][-1]})
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.add_group(data)

    def _parameter(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        p = torch.randn(shape, generator=self.random, dtype=C64 if dtype == C64 else F64)
        return p.to(self.device, dtype).requires_grad_()

    @staticmethod
    def _one(data: st.DataObject, choices: list[Any]) -> Any:
        """One of them, by its place: tensors are no readable draws."""
        return choices[data.draw(st.integers(0, len(choices) - 1))]

    def _all(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(p, group) for group in self.optimizer.param_groups for p in group["params"]]

    def _value(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The number that a weight and what is kept beside it stand for."""
        rest = self.optimizer.state.get(p, {}).get("remainder")
        joined = rest is not None and has_remainder(p, group)
        return _reals(join(p.detach(), rest) if joined else p.detach()).double().clone()  # type: ignore[arg-type]

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.optimizer.state.get(p, {})
        m = state.get("exp_avg")
        if m is None:
            return torch.zeros_like(_reals(p.detach()), dtype=F64)
        return (dequantize(m, state["exp_avg_scale"]) if m.dtype == torch.int8 else _reals(m)).double().clone()

    def _hold(self) -> None:
        self.held = {id(p): (self._value(p, group), self._momentum(p)) for p, group in self._all()}

    @invariant()
    def nothing_moves_between_steps(self) -> None:
        for p, group in self._all() if hasattr(self, "optimizer") else ():
            if id(p) in self.held:
                for now, then in zip((self._value(p, group), self._momentum(p)), self.held[id(p)], strict=True):
                    assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))

    @rule(data=st.data())
    def add_group(self, data: st.DataObject) -> None:
        dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
        group: dict[str, Any] = {"params": [self._parameter(t, data.draw(st.sampled_from(SHAPES))) for t in dtypes]}
        for key in data.draw(st.sets(st.sampled_from([*CHANGES]), max_size=4)):
            value = data.draw(st.sampled_from([v for v in CHANGES[key] if _fits(key, v, {*dtypes})]))
            group[key] = value() if callable(value) else value
        if data.draw(st.booleans()):
            group |= {"decouple_lr": True, "peak_lr": 0.5}
        self.optimizer.add_param_group(group)

    @rule(data=st.data())
    @_between_steps
    def change_an_option(self, data: st.DataObject) -> None:
        group = self._one(data, self.optimizer.param_groups)
        key = data.draw(st.sampled_from([*CHANGES]))
        dtypes = {p.dtype for p in group["params"]}
        value = data.draw(st.sampled_from([v for v in CHANGES[key] if _fits(key, v, dtypes)]))
        if key == "low_precision":
            # what was kept counts no longer, or again
            self.held = {}
        group[key] = value() if callable(value) else value

    @rule(data=st.data())
    @_between_steps
    def change_the_state_dtype(self, data: st.DataObject) -> None:
        group = self.optimizer.param_groups[1]
        dtypes = {p.dtype for p in group["params"]}
        choices = [v for v in CHANGES["state_dtype"] if _fits("state_dtype", v, dtypes)]
        group["state_dtype"] = data.draw(st.sampled_from(choices))

    @rule(data=st.data())
    @_between_steps
    def write_to_an_option(self, data: st.DataObject) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(0.1875)
            elif isinstance(group["lr"], np.ndarray):
                group["lr"][...] = 0.3125
            if isinstance(group["betas"], list):
                group["betas"][0] = 0.625

    @rule(data=st.data())
    @_between_steps
    def move_memory(self, data: st.DataObject) -> None:
        """Of parameters, gradients and states, into other places; in another layout; a matrix is transposed."""
        for p, _ in self._all():
            ways = "stay", "parameter", "gradient", "state", "in it", "turned", "in place", "gaps"
            match data.draw(st.sampled_from(ways)):
                case "parameter":
                    p.data = p.data.clone()
                case "gradient" if p.grad is not None:
                    p.grad.data = p.grad.data.clone()
                case "state" if "exp_avg" in self.optimizer.state[p]:
                    self.optimizer.state[p]["exp_avg"] = self.optimizer.state[p]["exp_avg"].clone()
                case "in it" if "exp_avg" in self.optimizer.state[p]:
                    self.optimizer.state[p]["exp_avg"].data = self.optimizer.state[p]["exp_avg"].data.clone()
                case "turned" if p.dim() == 2:
                    p.data = p.data.mT.contiguous().mT
                case "gaps":
                    p.data = torch.stack((p.data, p.data), -1)[..., 0]
                case "in place" if p.shape == (6, 6):
                    p.data = p.data.mT
                    self.held.pop(id(p), None)

    @precondition(lambda self: len(self._all()) > 1)
    @rule(data=st.data())
    def cast(self, data: st.DataObject) -> None:
        p, _ = self._one(data, self._all()[1:])
        if not p.is_complex():
            p.grad, p.data = None, p.data.to(data.draw(st.sampled_from([t for t in DTYPES if t != C64])))
            self.held.pop(id(p), None)

    @precondition(lambda self: len(self.optimizer.param_groups) > 2)
    @rule(data=st.data())
    @_between_steps
    def drop_or_exchange(self, data: st.DataObject) -> None:
        group = self._one(data, self.optimizer.param_groups[2:])
        if group["params"]:
            p = group["params"].pop(0)
            self.optimizer.state.pop(p, None)
            self.held.pop(id(p), None)
            if data.draw(st.booleans()):
                group["params"].insert(0, self._parameter(p.dtype, tuple(p.shape)))

    @rule(way=st.sampled_from(["file", "copy", "pickle", "itself", "shared"]))
    def save_and_load(self, way: str) -> None:
        """Into an optimizer of other options, whose options then are those of the file."""
        old, before = self._all(), [(self._value(p, g), self._momentum(p)) for p, g in self._all()]
        if way == "copy":
            self.optimizer = copy.deepcopy(self.optimizer)
        elif way == "pickle":
            self.optimizer = pickle.loads(pickle.dumps(self.optimizer))
        elif way == "itself":
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        else:
            state = self.optimizer.state_dict()
            if way == "file":
                torch.save(state, file := io.BytesIO())
                file.seek(0)
                groups = self.optimizer.param_groups
                of_numpy = any(isinstance(v, (np.ndarray, np.generic)) for g in groups for v in g.values())
                state = torch.load(file, weights_only=not of_numpy)
            groups = [
                {"params": [p.detach().clone().requires_grad_() for p in g["params"]], "peak_lr": 0.25}
                for g in self.optimizer.param_groups
            ]
            other = Lion(groups, lr=0.4375)
            other.load_state_dict(state)
            # stepping the first writes into no state of the second
            for p, _ in old if way == "shared" else ():
                p.grad = torch.ones_like(p)
            if way == "shared":
                self.optimizer.step()
            self.optimizer = other
        found = [(self._value(p, g), self._momentum(p)) for p, g in self._all()]
        torch.testing.assert_close(found, before, rtol=0, atol=0, equal_nan=True)
        self._hold()

    def _refused(self, error: type[Exception], match: str, call: Callable[[], Any]) -> None:
        """No weight has moved; a state may have been converted to the dtype that it was asked to have."""
        before = [self._value(p, group) for p, group in self._all()]
        with pytest.raises(error, match=match):
            call()
        for (p, group), value in zip(self._all(), before, strict=True):
            assert torch.equal(self._value(p, group), value)
        self._hold()

    @rule(case=st.sampled_from(REFUSED), data=st.data())
    def refuse_an_option(self, case: tuple[str, Any, str], data: st.DataObject) -> None:
        key, value, words = case
        for p, _ in self._all():
            p.grad = torch.ones_like(p)
        group = self._one(data, [g for g in self.optimizer.param_groups if g["params"]])
        before = group[key]

        def call() -> None:
            group[key] = value
            try:
                self.optimizer.step()
            finally:
                group[key] = before

        self._refused(ValueError, words, call)

    @rule()
    def refuse_others(self) -> None:
        p = self.optimizer.param_groups[0]["params"][0]
        kept, p.grad = p.grad, torch.ones_like(p).to_sparse()
        self._refused(RuntimeError, "not support sparse gradients, got .*; write sparse=False", self.optimizer.step)
        p.grad = kept
        state = torch.optim.AdamW([q for q, _ in self._all()]).state_dict()
        self._refused(ValueError, "another optimizer's state", lambda: self.optimizer.load_state_dict(state))

    @rule(data=st.data(), way=st.sampled_from(["plain", "plain", "clip", "scale", "skip", "closure", "forgotten clip"]))
    def step(self, data: st.DataObject, way: str) -> None:
        self.one_step(data, way)

    def one_step(self, data: st.DataObject, way: str) -> None:
        """Gradients of some parameters, some of them zeros, or in another order of memory; then what is there after."""
        optimizer, factor, skipped = self.optimizer, 1.0, way == "skip"
        for p, _ in self._all():
            g = torch.randn(p.shape, generator=self.random, dtype=C64 if p.is_complex() else F64).to(p.device, p.dtype)
            kinds = ("given",) if way == "every" else ("given", "given", "given", "none", "zeros", "turned")
            match data.draw(st.sampled_from(kinds)):
                case "none":
                    p.grad = None
                    continue
                case "zeros":
                    g.zero_()
                case "turned" if p.dim() == 2:
                    g = g.mT.contiguous().mT
            p.grad = g
        live = [(p, group) for p, group in self._all() if p.grad is not None]
        if way in ("clip", "forgotten clip") and live and all(p.dtype in (F64, F32, F16) for p, _ in live):
            given, limit = [p.grad.clone() for p, _ in live], data.draw(st.sampled_from([0.5, 0.0, 1e6]))  # type: ignore[union-attr]
            norm = clip_grad_norm([p for p, _ in live], limit, optimizer=optimizer)
            want = torch.nn.utils.get_total_norm([g.double() for g in given])
            assert norm.shape == ()
            assert abs(norm - want) <= 1e-5 * want
            assert all(torch.equal(g, p.grad) for g, (p, _) in zip(given, live, strict=True))
            factor = min(1.0, limit / (float(norm) + 1e-6))  # that of fp32 gradients is fp32, beside float64 ones too
            if way == "forgotten clip":
                kept, factor = [p.grad for p, _ in live], 1.0
                optimizer.zero_grad()
                for (p, _), g in zip(live, kept, strict=True):
                    p.grad = g
        if way in ("scale", "skip"):
            optimizer.grad_scale = torch.tensor(4.0, device=self.device)
            optimizer.found_inf = torch.tensor(float(skipped), device=self.device)
            factor = 0.25
        before = [(self._value(p, group), self._momentum(p)) for p, group in live]
        places = [p.data_ptr() for p, _ in live]
        kinds = [getattr(self.optimizer.state.get(p, {}).get("exp_avg"), "dtype", None) for p, _ in live]
        with torch.no_grad():
            loss: Any = optimizer.step((lambda: live[0][0].sum() * 2 if live else True) if way == "closure" else None)  # type: ignore[arg-type,return-value]
        assert places == [p.data_ptr() for p, _ in live], "weights stay where they are"
        assert (loss is not None) == (way == "closure")
        assert not isinstance(loss, Tensor) or loss.requires_grad, "a closure computes gradients"
        if way in ("scale", "skip"):
            del optimizer.grad_scale, optimizer.found_inf
        for (p, group), (value, momentum), kind in zip(live, before, kinds, strict=True):
            self._judge(p, group, value, momentum, kind, factor, skipped)
        assert optimizer.clip_coefficient is None
        self._hold()

    def _judge(
        self, p: Tensor, group: dict[str, Any], value: Tensor, momentum: Tensor, kind: torch.dtype | None,
        factor: float, skipped: bool,
    ) -> None:  # fmt: skip
        state = self.optimizer.state[p]
        now = state["exp_avg"]
        assert p.grad is not None
        if group["state_dtype"] == "int8":
            assert now.dtype == (torch.int8 if p.numel() >= 4096 else p.dtype)
        elif group["state_dtype"] is not None:
            assert now.dtype == (C64 if p.is_complex() else group["state_dtype"])
        else:
            assert now.dtype == (p.dtype if kind in (None, torch.int8) else kind), "a momentum keeps its dtype"
        g = _reals(p.grad).double() * factor * (-1 if group["maximize"] else 1)
        cautious, (beta1, beta2) = group["cautious"], group["betas"]
        if isinstance(cautious, (bool, np.bool_)):
            cautious = 0.0 if cautious else 1.0
        if kind is not None and kind != now.dtype and not now.is_complex():
            momentum = self._converted(momentum, p, now.dtype)
        if skipped:
            assert torch.equal(self._value(p, group), value)
            return
        decay = float(group["weight_decay"]) / (0.5 if group["decouple_lr"] else 1)
        shares, mode = (beta1, 1 - beta1, beta2, 1 - beta2), group["cautious_weight_decay"]
        row = Row(float(group["lr"]), decay, *shares, cautious_decay=mode, cautious=cautious)
        want, new = reference(value, g, momentum, row)
        # where both terms cancel, fp32 may find the other sign
        u, size = momentum * beta1 + g * (1 - beta1), momentum.abs() * beta1 + g.abs() * (1 - beta1)
        sure = (u.abs() > 1e-5 * size) | (size == 0)
        if cautious == 1 or bool(sure.all()):
            ulp = 2.0**-22 if has_remainder(p, group) else (1 + INTERPRET) * ULP[p.dtype]
            assert _near(self._value(p, group)[sure], want[sure], ulp, p.dtype)
        if now.dtype == torch.int8:
            codes, scales = torch.zeros_like(now), torch.zeros_like(state["exp_avg_scale"])
            error = 2.0**-22 * (momentum.abs() * beta2 + g.abs() * (1 - beta2))  # fp32's; its fourth root is two codes
            for side in (-1, 1):
                quantize_((new + side * error).float(), codes, scales)
                assert bool((side * (codes.int() - now.int()) >= -1).all())
            torch.testing.assert_close(scales, state["exp_avg_scale"], rtol=1e-5, atol=0)
        else:
            assert _near(_reals(now).double(), new, (1 + INTERPRET) * ULP[now.dtype], now.dtype)

    @staticmethod
    def _converted(momentum: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
        """A momentum that the step has converted first."""
        if dtype != torch.int8:
            return momentum.to(dtype).double()
        codes = torch.zeros_like(p.detach(), dtype=torch.int8)
        scales = torch.zeros(scales_for(p.numel()), device=p.device)
        quantize_(momentum.float(), codes, scales)
        return dequantize(codes, scales).double()


class TestLion(Machine.TestCase):
    settings = settings(max_examples=15 if INTERPRET else 30, stateful_step_count=15)


@pytest.mark.gpu
class TestLionOnCuda(Machine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=30)

    def runTest(self) -> None:  # noqa: N802
        Machine.device = "cuda"
        try:
            super().runTest()
        finally:
            Machine.device = "cpu"

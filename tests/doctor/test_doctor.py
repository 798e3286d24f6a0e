from __future__ import annotations

import contextlib
import getpass
import io
import platform
import re
import runpy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import onepass.__main__ as entry
from harness import SPECS
from onepass.__main__ import main
from onepass.core import about
from onepass.core.launch import backend
from onepass.core.spec import Sample, Spec
from onepass.doctor import facts, report, selftest
from onepass.ops._shared import specs as operators

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _only_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "COMMANDS", ("onepass.doctor.cli",))


def samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    yield Sample("vector", (make(3),))
    yield Sample("matrix", (make(2, 3),))


def double(x: Tensor) -> Tensor:
    return 2 * x


def operator(op: Callable[..., Any], name: str = "double", reference: Callable[..., Any] = double) -> Spec:
    return Spec(name=name, op=op, reference=reference, samples=samples)


def install(monkeypatch: pytest.MonkeyPatch, *specs: Spec) -> None:
    """Let these be all the operators there are."""
    monkeypatch.setattr(operators, "folders", lambda: ["fakes"])
    monkeypatch.setattr(operators, "load", lambda folder: SimpleNamespace(SPECS=specs))
    monkeypatch.setattr(selftest, "lion_checks", lambda device, dtype: iter(()))


def doctor(code: int = 0) -> str:
    """What the command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["doctor"]) == code, out.getvalue()
    return out.getvalue()


def test_healthy() -> None:
    out = doctor()
    assert "all is well" in out
    for name in ["weighted_sum", "Lion", *(s.name for s in SPECS)]:
        assert f"\n{name} cpu float32: " in out
    assert "problems: none" in out
    assert all(out.count(f"{name} ") == 1 for name in ("weighted_sum", "Lion", "soft_topk"))
    assert not re.search(r"\d/\d+ samples", out)
    assert torch.__version__ in out
    assert platform.python_version() in out


@pytest.mark.parametrize(("op", "words"), [
    (lambda x: 2.001 * x, "times the tolerance"),
    (lambda x: x + x.detach(), "times the tolerance"),
    (lambda x: (2 * x).index_fill(-1, torch.tensor(x.shape[-1] - 1), torch.nan), "inf times the tolerance"),
    (Mock(side_effect=RuntimeError("no such kernel\nlong story")), "RuntimeError: no such kernel"),
    (lambda x: 2 * x[..., :1], "shape (1,), expected (3,)"),
    (lambda x: (2 * x, x), "2 results, expected 1"),
    (lambda x: 2 * x.detach() + 0 * x.sum().detach(), "gradient"),
])  # fmt: skip
def test_a_broken_operator_is_named_and_the_others_go_on(
    op: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, operator(op, "broken"), operator(double, "sound"))
    out = doctor(1)
    assert "sound cpu float32: torch (device cpu has no Triton path); ok in all samples, error" in out
    assert "problem: broken on cpu in float32: vector: " in out
    assert words in out
    assert "Traceback" not in out
    assert "2 problems found" in out


def test_without_triton_and_with_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Mock(side_effect=about.importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(backend, "triton_installed", lambda: False)
    monkeypatch.setattr(about.importlib.metadata, "version", missing)
    install(monkeypatch, operator(double))
    out = doctor()
    assert "triton none" in out
    assert "double cpu float32: torch (Triton is not installed)" in out
    monkeypatch.setenv("ONEPASS_BACKEND", "torch")
    assert "ONEPASS_BACKEND=torch" in doctor()


@pytest.mark.parametrize("value", ["1", "true", "ON", "Yes", "y", "t", "2", ""])
def test_the_interpreter_is_asked_for_as_triton_reads_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    read_by_triton = pytest.importorskip("triton.knobs").runtime.interpret
    assert runpy.run_path(backend.__file__)["INTERPRET"] is read_by_triton


def test_old_versions_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.problems({"torch": "2.10.1+cu128", "triton": "3.6.0"}) == [
        "torch 2.10.1+cu128 is older than 2.11: pip install --upgrade torch"
    ]
    assert facts.problems({"torch": "2.11.0", "triton": None}) == []
    assert facts.problems({"torch": "3.0", "triton": "3.10.0"}) == []


def test_a_driver_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert facts.advice({"driver": "580.1", "triton": "3.6"}) == [
        "there is an NVIDIA driver (580.1), but this torch is built without CUDA"
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "slower torch path" in facts.advice({"driver": "580.1", "triton": None})[0]


def test_a_gpu_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=RuntimeError("CUDA error: no kernel image"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    found, problems = facts.devices()
    assert [d.device.type for d in found] == ["cpu"]
    assert problems == ["cuda:0 can't be used: RuntimeError: CUDA error: no kernel image"]


class TestBlock:
    @pytest.mark.parametrize(
        ("text", "kept"),
        [
            ("can't open /home/ada/private/lib/kernel.so: no", "can't open .../kernel.so: no"),
            ("~/models/x.py line 3", ".../x.py line 3"),
            (r"C:\Users\ada\x.py", ".../x.py"),
            ("float32 and/or bfloat16, 3/4 samples", "float32 and/or bfloat16, 3/4 samples"),
        ],
    )
    def test_directories_are_scrubbed(self, text: str, kept: str) -> None:
        assert report.scrub(text) == kept

    def test_is_plain_and_private(self, monkeypatch: pytest.MonkeyPatch) -> None:
        leaky = Mock(side_effect=OSError("/home/ada/cache/kernel.cubin: gone"))
        monkeypatch.setattr(getpass, "getuser", lambda: "lovelace")
        install(monkeypatch, operator(leaky, "leaky_of_lovelace"))
        text = doctor(1).split("```")[1]
        assert text.isascii()
        assert "\x1b" not in text
        assert "/home" not in text
        assert ".../kernel.cubin: gone" in text


@pytest.mark.gpu
def test_healthy_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--full"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "weighted_sum cuda:0 bfloat16: triton (cuda:0 with Triton); ok" in out

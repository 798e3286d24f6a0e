"""The first hour: help with examples, and errors that say what to do next."""

from __future__ import annotations

import pytest
import torch

import onepass
from onepass import nn
from onepass.__main__ import main
from onepass.doctor import facts


@pytest.mark.parametrize("command", [[], ["doctor"], ["train"], ["show"], ["generate"]])
def test_every_help_has_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    said = capsys.readouterr().out
    examples = said.partition("\nexamples:\n")[2]
    assert "onepass " + " ".join(command) in examples


X = torch.randn(2, 64, 32)
MASKED = {
    "topk": lambda mask: onepass.topk(X[..., 0], 4, mask=mask),
    "RoutedBlock": lambda mask: nn.RoutedBlock(32, k=4, heads=2, dim_head=16)(X, mask),
    "Experts": lambda mask: nn.Experts(32, 4)(X, mask),
}


@pytest.mark.parametrize("call", MASKED)
def test_masks_of_other_libraries_get_a_hint(call: str) -> None:
    with pytest.raises(TypeError, match=r"mask must be bool \(True = .*\), got torch.int64; of an attention_mask"):
        MASKED[call](torch.ones(2, 64, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"got torch.float32; of an additive mask of 0 and -inf, pass mask == 0"):
        MASKED[call](torch.zeros(2, 64))


def test_doctor_names_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((7, 5), (9, 0))[index])
    monkeypatch.setattr(torch.version, "hip", None)
    (line,) = facts.advice({"triton": "3.6"})
    assert line.startswith("cuda:0 has compute capability 7.5: the kernels are written for 8.0 and newer")
    assert "ONEPASS_BACKEND=torch" in line


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RMSNorm", "; it is onepass.nn.RMSNorm"),
        ("Lion", "; it is onepass.optim.Lion"),
        ("layernorm", ""),
        ("__wrapped__", ""),
    ],
)
def test_a_name_of_another_room_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(onepass, name)
    assert str(error.value) == f"module 'onepass' has no attribute {name!r}{hint}"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train", "--stesp", "3"], "onepass train: unrecognized arguments: --stesp; did you mean --steps?\n"),
        (["train", "--tsk=x"], "onepass train: unrecognized arguments: --tsk=x; did you mean --task?\n"),
        (["doctor", "--zzz"], "onepass doctor: unrecognized arguments: --zzz\n"),
        (["--versoin"], "onepass: unrecognized arguments: --versoin; did you mean --version?\n"),
    ],
)
def test_a_misspelt_option(command: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 2
    assert capsys.readouterr().err == said

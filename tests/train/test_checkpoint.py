"""What a run's files hold, and damage to them: told in one line before a step, and nothing is lost by it."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from onepass.optim import Lion
from onepass.train import checkpoint, metrics
from onepass.train.commands.errors import UserError
from onepass.train.config import Config, from_json
from onepass.train.language import ByteModel
from onepass.train.metrics import Mark
from onepass.train.model import new, parameter_groups
from train.tiny import TINY, config, contents, printed, refused, rows


def small(**values: object) -> Config:
    return config(**{"experts": 4, "dim": 8, "blocks": 1, "seq": 16, "batch": 2, "steps": 5, **values})


def saved_to(path: Path, precision: str = "fp32") -> tuple[ByteModel, Lion]:
    """A model after a step and its optimizer, whose checkpoint is in `path` now."""
    settings = small(precision=precision)
    model = new(settings)
    optimizer = Lion(parameter_groups(model, 0.1), lr=1e-3)
    tokens = torch.randint(257, (2, 16))
    model(tokens, tokens[:, :3] % 16)[0].square().mean().backward()
    optimizer.step()
    checkpoint.save(path, model, optimizer, settings, step=3, metrics=Mark(77, "d1"), seconds=1.5)
    return model, optimizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint."""
    path = tmp_path_factory.mktemp("good") / checkpoint.NAME
    saved_to(path)
    return path


@pytest.mark.parametrize(("precision", "kinds"), [("fp32", {torch.float32}), ("bf16", {torch.bfloat16, torch.int16})])
def test_round_trip(tmp_path: Path, precision: str, kinds: set[torch.dtype]):
    model, optimizer = saved_to(tmp_path / checkpoint.NAME, precision)
    saved = checkpoint.load(tmp_path / checkpoint.NAME)
    assert (saved.config, saved.step, saved.seconds) == (small(precision=precision), 3, 1.5)
    assert (saved.metrics_bytes, saved.metrics_digest) == (77, "d1")

    other = new(small(seed=1, precision=precision))
    other_optimizer = Lion(parameter_groups(other, 0.1), lr=1e-3)
    checkpoint.restore_model(saved, other)
    checkpoint.restore_optimizer(saved, other, other_optimizer)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    ours, theirs = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert len(ours) == len(list(model.parameters()))
    for index, state in ours.items():
        assert {value.dtype for value in theirs[index].values()} == kinds
        assert all(torch.equal(value, theirs[index][key]) for key, value in state.items())


def test_nothing_in_it_is_pickled(good: Path):
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(good.read_bytes())
    header = good.read_bytes()[8 : 8 + int.from_bytes(good.read_bytes()[:8], "little")]
    assert {entry["dtype"] for name, entry in json.loads(header).items() if name != "__metadata__"} == {"F32"}


def not_loaded(content: bytes | bytearray, path: Path) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        checkpoint.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes(good: Path, tmp_path: Path, data: st.DataObject):
    not_loaded(data.draw(st.binary(max_size=200)), tmp_path / "noise")
    content = bytearray(good.read_bytes())
    cut = data.draw(st.integers(0, len(content) - 1))
    assert "cut off" in not_loaded(content[:cut], tmp_path / "cut")
    header = 8 + int.from_bytes(content[:8], "little")
    # half of the flips in the header, which is a small part of the file
    last = header if data.draw(st.booleans()) else len(content)
    for place in data.draw(st.lists(st.integers(0, last - 1), min_size=1, max_size=3, unique=True)):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "flipped"
    path.write_bytes(bytes(content))
    try:
        saved = checkpoint.load(path)
    except UserError as error:
        message = str(error)
    else:
        message = ""
        # what changes nothing that is read, such as the white space that pads the header, may pass
        whole = checkpoint.load(good)
        assert (saved.config, saved.step) == (whole.config, whole.step)
        assert all(torch.equal(value, whole.tensors[name]) for name, value in saved.tensors.items())
    assert "\n" not in message


@pytest.mark.parametrize(
    "metadata",
    [
        None, {"onepass": "{}"}, {"onepass": "{}", "sha256": "0"}, {"onepass": "[]", "sha256": "sum"},
        {"onepass": '{"config": 3, "step": 1}', "sha256": "sum"},
        {"onepass": '{"config": "{}", "step": "x", "metrics_bytes": 0, "seconds": 0}', "sha256": "sum"},
    ],
)  # fmt: skip
def test_other_safetensors_files(tmp_path: Path, metadata: dict[str, str] | None):
    tensors = {"a": torch.zeros(2)}
    if metadata and metadata.get("sha256") == "sum":
        metadata = {**metadata, "sha256": checkpoint._digest(metadata["onepass"], tensors)}
    not_loaded(save(tensors, metadata), tmp_path / "other")


def strangers(good: Path, **changes: object) -> bytes:
    """A checkpoint with other values, and a digest that fits them; `config` and `momentum` change those parts."""
    saved = checkpoint.load(good)
    values = json.loads(saved.config.to_json()) | dict(changes.pop("config", {}))  # type: ignore[call-overload]
    change = changes.pop("momentum", None)
    tensors = {n: change(t) if change and n.startswith("optimizer/") else t for n, t in saved.tensors.items()}
    record = {"config": json.dumps(values), "step": 3, "metrics_bytes": 77, "metrics_digest": "d1", "seconds": 1.5}
    record = json.dumps({**record, **changes})
    return save(tensors, {"onepass": record, "sha256": checkpoint._digest(record, tensors)})


STRANGE: dict[str, tuple[dict[str, object], str]] = {
    "a model of 170 billion weights": ({"config": {"dim": 2**14, "heads": 512, "blocks": 256}}, "another config"),
    "another width": ({"config": {"dim": 16}}, r"weight is float32 \(\d+,\) there and float32 \(\d+,\) in"),
    "a model without blocks": ({"config": {"blocks": 0}}, "blocks must be from 1 to"),
    "a rate without end": ({"config": {"lr": math.inf}}, "lr must be a number, got inf"),
    "paths that are numbers": ({"config": {"paths": [1]}}, "paths must be a list of texts"),
    "another block": ({"config": {"blocks": 2}}, r"blocks.1.* is absent there"),
    "weights of 32 bits in a run of 16": ({"config": {"precision": "bf16"}}, "is float32 .* there and bfloat16 .* in"),
    "int8 momentum without scales": ({"momentum": lambda t: t.to(torch.int8)}, "exp_avg is int8"),
    "momentum of another shape": ({"momentum": lambda t: t.new_zeros(1)}, r"exp_avg is float32 \(1,\) there"),
    "complex momentum": ({"momentum": lambda t: t.to(torch.complex64)}, "exp_avg is complex64"),
    "a step before the first": ({"step": -5}, "step -5 after"),
    "a step after the last": ({"step": 6}, "none of a run of 5 steps"),
    "half a step": ({"step": 1.5}, "step 1.5 after"),
    "a step without end": ({"step": math.inf}, "step inf after"),
    "no time": ({"seconds": math.nan}, "after nan s"),
    "negative time": ({"seconds": -1.0}, r"after -1\.0 s"),
    "metrics of negative length": ({"metrics_bytes": -1}, "none of a run"),
    "a digest that is a list": ({"metrics_digest": [1]}, "none of a run"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strangers_checkpoint(good: Path, tmp_path: Path, name: str):
    """A digest that fits says nothing about its numbers: each is refused before a model is built."""
    changes, message = STRANGE[name]
    assert re.search(message, not_loaded(strangers(good, **changes), tmp_path / "strange"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=400)
@given(st.data())
def test_damaged_configurations(data: st.DataObject):
    """Any value in the place of one; bytes exchanged, or cut off."""
    values = json.loads(small().to_json())
    if data.draw(st.booleans()):
        one_line(json.dumps({**values, data.draw(st.sampled_from(sorted(values))): data.draw(JSON)}))
        return
    content = bytearray(json.dumps(values).encode())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    one_line("[" * 100_000)
    one_line(content.decode("utf-8", "replace"))


def one_line(text: str) -> None:
    message = "config.json: "
    try:
        values = from_json(text, "config.json: ")
    except UserError as error:
        message = str(error)
    else:
        assert from_json(values.to_json(), "") == values
    assert message.startswith("config.json: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    "row",
    ["[]", "3", "null", "{}", '{"loss": 1}', '{"step": 1.0}', '{"step": true}', '{"step": "1"}',
     '{"step": 1, "a": "b"}', '{"step": 1, "loss": NaN}', '{"step": 1, "loss": null}', "[" * 100_000],
)  # fmt: skip
def test_rows_that_are_none(row: str):
    with pytest.raises(UserError, match="a line is damaged"):
        metrics.parsed(row.encode(), Path("metrics.jsonl"))


def test_what_resuming_refuses_goes_on_once_it_is_put_back(whole: Path, finished: Path, texts: Path):
    """To start over would cost the metrics."""
    before, resume = contents(finished), ("train", texts, *TINY, "--resume", "--out", finished)
    saved, lines, settings = (finished / name for name in (checkpoint.NAME, "metrics.jsonl", "config.json"))
    first, kept = texts / "1.txt", (texts / "1.txt").read_text()
    damage: list[tuple[Callable[[], object], str]] = [
        (saved.unlink, "checkpoint.safetensors is gone; put it back"),
        (lambda: (saved.unlink(), saved.symlink_to(texts / "unmounted")), "no such file"),
        (lambda: saved.write_bytes(before[checkpoint.NAME][:-100]), "cut off"),
        (lambda: saved.write_bytes(strangers(saved, config={"seed": 5}, step=12)),
         "is of another configuration: seed is 5 there and 0 in config.json"),
        (lines.unlink, "has 0 bytes, fewer than"),
        (lambda: lines.write_bytes(before["metrics.jsonl"][:50]), "has 50 bytes, fewer than"),
        *((lambda at=at: lines.write_bytes(before["metrics.jsonl"][:at] + b"#" + before["metrics.jsonl"][at + 1 :]),
           "it is damaged, or of another run than") for at in (0, checkpoint.load(saved).metrics_bytes - 1)),
        (lambda: settings.write_bytes(b"\xff"), "config.json: is no JSON"),
        (settings.unlink, "there is no run in"),
        (lambda: first.write_text("something else"),
         f"the data has changed since the run began; put back the files that {finished}/data.json lists"),
    ]  # fmt: skip
    for do, said in damage:
        do()
        assert said in refused(*resume)
        first.write_text(kept)
        for name, content in before.items():
            (finished / name).unlink(missing_ok=True)
            (finished / name).write_bytes(content)
    assert "--steps 8: the run has 12; give more to train longer" in refused(*resume, "--steps", 8)
    assert "task is causal here and masked in the run" in refused(*resume, "--task", "causal")
    assert "model is routed here and transformer in the run" in refused(*resume, "--model", "routed")
    # a model may be passed on without its metrics
    lines.rename(texts.parent / "metrics")
    printed("show", finished, first)
    (texts.parent / "metrics").rename(lines)
    (finished / "data.json").write_bytes(b"{")
    printed(*resume)
    assert (finished / "data.json").read_bytes() == before["data.json"]
    assert rows(finished) == rows(whole)

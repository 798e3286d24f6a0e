"""A checkpoint: one file, without code, with all that a run needs to go on: weights, momentum, step, configuration.

It is a safetensors file with `model/…` and `optimizer/<parameter>/<state>` tensors; its header holds one JSON record
and a SHA-256 over record and tensors. The file is replaced whole, so all its parts come from one step. It needs no
random state, because every random draw is a function of seed and step.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onepass.optim.sharded import whole
from onepass.optim.state import gatherable
from onepass.train.commands import files
from onepass.train.commands.errors import UserError
from onepass.train.config import Config, from_json
from onepass.train.language import ByteModel
from onepass.train.metrics import Mark
from onepass.train.model import new

NAME = "checkpoint.safetensors"


@dataclass
class Checkpoint:
    """The content of a file that passed all checks."""

    path: Path
    config: Config
    step: int
    metrics_bytes: int  # length of metrics.jsonl at this step
    metrics_digest: str  # SHA-256 of those bytes
    seconds: float  # training time up to this step
    tensors: dict[str, Tensor]


def _digest(record: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(record.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save(
    path: Path, model: nn.Module, optimizer: Optimizer, config: Config, *, step: int, metrics: Mark, seconds: float,
    first: bool = True,
) -> None:  # fmt: skip
    """Write a checkpoint; it replaces the previous one atomically.

    Tensors in shards are gathered one by one, by all processes; the `first` one writes them whole. So the file does not
    depend on the number of processes.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for key, value in gatherable(state).items():
            tensors[f"optimizer/{names[id(parameter)]}/{key}"] = value
    for name in sorted(tensors):
        value = whole(tensors[name].detach())
        if first:
            # collectives can't send int16 remainders, so they were widened
            tensors[name] = (value.short() if value.dtype == torch.int32 else value).cpu().contiguous()
    if not first:
        return
    values = {
        "config": config.to_json(),
        "step": step,
        "metrics_bytes": metrics.length,
        "metrics_digest": metrics.digest,
        "seconds": seconds,
    }
    record = json.dumps(values, sort_keys=True)
    metadata = {"onepass": record, "sha256": _digest(record, tensors)}
    files.write(path, safetensors.torch.save(tensors, metadata))


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; raise UserError if the file is cut off, damaged, or not one of the run that it names.

    A digest only shows accidents, so every number is checked before a model of this configuration is built.
    """
    prefix = f"{path} can't be used: "
    content = files.read(path)
    if len(content) < 8 or len(content) < 8 + int.from_bytes(content[:8], "little"):
        raise UserError(f"{prefix}it is cut off after {len(content):,} bytes")
    try:
        tensors = safetensors.torch.load(content)
        # safetensors has just parsed this header: a length, then that many bytes of JSON
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
        record, digest = metadata["onepass"], metadata["sha256"]
    except KeyError:
        raise UserError(f"{prefix}it is no checkpoint of an onepass run") from None
    except Exception as error:
        # a damaged header raises any of a dozen exceptions, depending on the byte
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{prefix}it is cut off or damaged ({why:.80})") from None
    if _digest(record, tensors) != digest:
        raise UserError(f"{prefix}it is damaged (its SHA-256 does not fit its content)")
    try:
        values = json.loads(record)
        config = from_json(values["config"], f"{path}: ")
        step, length, seconds = values["step"], values["metrics_bytes"], values["seconds"]
        digest = values["metrics_digest"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{prefix}it was written by another version of onepass") from None
    numbers = type(step) is int and type(length) is int and type(seconds) is float and isinstance(digest, str)
    if not (numbers and 0 <= step <= config.steps and length >= 0 and 0 <= seconds < math.inf):
        raise UserError(f"{prefix}step {step!r:.20} after {seconds!r:.20} s is none of a run of {config.steps:,} steps")
    checkpoint = Checkpoint(path, config, step, length, digest, seconds, tensors)
    with torch.device("meta"):
        compare(checkpoint, new(config))
    return checkpoint


def _stored(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def compare(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise UserError unless the checkpoint holds the weights of this model and nothing else but Lion's states."""
    weights = {f"model/{name}": value for name, value in model.state_dict().items()}
    states: dict[str, Tensor] = {f"optimizer/{n}/exp_avg": p for n, p in model.named_parameters()}
    states |= {f"optimizer/{n}/remainder": p.short() for n, p in model.named_parameters() if p.dtype == torch.bfloat16}
    for name in sorted(weights.keys() | checkpoint.tensors.keys()):
        saved, expected = checkpoint.tensors.get(name), weights.get(name, states.get(name))
        if (stored := _stored(saved)) != (needed := _stored(expected)):
            key = name.removeprefix("model/")
            raise UserError(
                f"{checkpoint.path} is of another configuration: {key:.80} is {stored} there and {needed} in this model"
            )


def restore_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Load the weights into a model of the checkpoint's configuration."""
    prefix = "model/"
    model.load_state_dict({n.removeprefix(prefix): t for n, t in checkpoint.tensors.items() if n.startswith(prefix)})


def of_run(directory: Path) -> tuple[Checkpoint, ByteModel]:
    """Return the checkpoint of a run and its model, which trains no more; raise UserError if there is none."""
    if not (directory / NAME).exists():
        raise UserError(f"there is no run with a checkpoint in {directory} (no {NAME})")
    saved = load(directory / NAME)
    model = new(saved.config)
    restore_model(saved, model)
    return saved, model.eval()


def restore_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer) -> None:
    """Load Lion's states into the optimizer; learning rate and decay come from the configuration."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states: dict[int, dict[str, object]] = {}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    for index, name in enumerate(order):
        prefix = f"optimizer/{name}/"
        state: dict[str, object] = {
            key.removeprefix(prefix): value for key, value in checkpoint.tensors.items() if key.startswith(prefix)
        }
        if state:
            states[index] = state
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})

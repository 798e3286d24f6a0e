"""The state of a run that was cut off, in a file that can't run code: weights, momentum, draws, measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import nn

from onepass.optim import Lion
from onepass.train.commands import files
from onepass.train.commands.errors import UserError

State = dict[str, Any]  # steps of the whole run; step, curve, counted steps and their seconds so far


def save(path: Path, task: Any, optimizer: Lion, state: State) -> None:
    """Write the state with weights, momentum and the generator of the batches."""
    model: nn.Module = task.model
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer/{name}/{key}"] = value
    tensors["draws"] = task.draws.get_state()
    content = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    files.write(path, safetensors.torch.save(content, {"state": json.dumps(state)}))


def read(path: Path) -> State:
    """Return the state alone."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            return dict(json.loads(file.metadata()["state"]))
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no state of a run ({error!s:.80}); remove it") from None


def load(path: Path, task: Any, optimizer: Lion) -> State:
    """Restore weights, momentum and generator in a new task and optimizer of the same run; return the state."""
    state, tensors, model = read(path), safetensors.torch.load_file(path), task.model
    model.load_state_dict({n.removeprefix("model/"): value for n, value in tensors.items() if n.startswith("model/")})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    momentum: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        prefix = f"optimizer/{names[id(parameter)]}/"
        momentum[index] = {n.removeprefix(prefix): value for n, value in tensors.items() if n.startswith(prefix)}
    optimizer.load_state_dict({"state": momentum, "param_groups": optimizer.state_dict()["param_groups"]})
    task.draws.set_state(tensors["draws"])
    return state

"""What docs/reliability.md freezes: public names, and the keys of everything that is saved.

The listing stands in stability.json. A failure shows what differs; a wanted change is written down with
`python tests/test_stability.py > tests/stability.json` and named in the changelog.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from nn.table import TABLE

LISTING = Path(__file__).with_name("stability.json")


def public_names() -> dict[str, list[str]]:
    """`__all__`, or where a module has none (the originals' names) what is defined in it."""
    import onepass.compat

    names = ["onepass", "onepass.nn", "onepass.optim"]
    names += [
        f"onepass.compat.{found.name}"
        for found in pkgutil.iter_modules(onepass.compat.__path__)
        if found.name[0] != "_"
    ]
    listed = {}
    for name in names:
        module = importlib.import_module(name)
        own = [n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", None) == name]
        listed[name] = sorted(getattr(module, "__all__", own))
    return listed


LIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16 remainder": {"dtype": torch.bfloat16},
    "bfloat16 none": {"dtype": torch.bfloat16, "low_precision": "none"},
    "float16": {"dtype": torch.float16},
    "int8 momentum": {"state_dtype": "int8"},
    "decouple_lr": {"decouple_lr": True},
}


def lion_keys(options: dict[str, Any]) -> dict[str, Any]:
    """Keys of a parameter's state with their dtypes, and of a param group, after one step."""
    from onepass.optim import Lion

    p = torch.ones(4096, dtype=options.get("dtype", torch.float32)).requires_grad_()
    optimizer = Lion([p], **{name: value for name, value in options.items() if name != "dtype"})
    p.grad = torch.ones_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    state = {key: str(value.dtype).removeprefix("torch.") for key, value in sorted(saved["state"][0].items())}
    return {"state": state, "group": sorted(saved["param_groups"][0])}


def checkpoint_keys() -> dict[str, Any]:
    """What `onepass train` writes: names of tensors, header, record and configuration."""
    from safetensors import safe_open

    from onepass.optim import Lion
    from onepass.train import checkpoint
    from onepass.train.config import CHOICES, FORMAT, Config, build
    from onepass.train.metrics import Mark
    from onepass.train.model import new, parameter_groups

    listed: dict[str, Any] = {"config": sorted(f.name for f in dataclasses.fields(Config)), "format": FORMAT}
    sizes = {"experts": 2, "dim": 8, "blocks": 1, "seq": 16, "batch": 2, "steps": 1}
    rest = {"seed": 0, "device": "cpu", "precision": "fp32", "threads": 1, "data": "", "paths": ()}
    for name in CHOICES["model"]:
        config = build("cpu", task="causal", model=name, **sizes, **rest)
        model = new(config)
        optimizer = Lion(parameter_groups(model, 0.1))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / checkpoint.NAME
            checkpoint.save(path, model, optimizer, config, step=1, metrics=Mark(), seconds=0.0)
            with safe_open(path, "pt") as file:
                listed[f"tensors, {name}"] = sorted(file.keys())
                header = file.metadata()
        listed["header"] = sorted(header)
        listed["record"] = sorted(json.loads(header["onepass"]))
    return listed


def listing() -> dict[str, Any]:
    """All that is frozen."""
    return {
        "names": public_names(),
        "state_dict of modules": {spec.name: sorted(spec.build().state_dict()) for spec in TABLE},
        "state of Lion": {name: lion_keys(options) for name, options in LIONS.items()},
        "checkpoint.safetensors": checkpoint_keys(),
    }


def test_listing() -> None:
    now, frozen = listing(), json.loads(LISTING.read_text())
    for part in frozen:
        assert now[part] == frozen[part], f"{part} is now\n{json.dumps(now[part], indent=1)}"
    assert now.keys() == frozen.keys()


if __name__ == "__main__":
    print(json.dumps(listing(), indent=1))

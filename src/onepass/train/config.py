"""The configuration of a run: every value that decides its result, two presets, reading, writing and comparing."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from onepass.train.commands.errors import UserError

FORMAT = 3


@dataclass(frozen=True)
class Config:
    """One run. Runs that differ only in `paths` give the same numbers on the same CPU and software."""

    preset: str
    task: str  # guess hidden bytes, or each next byte
    model: str  # what its blocks are
    device: str
    precision: str  # of weights, momentum and products; beside bf16 weights Lion stores the lower bits of fp32 ones
    seed: int
    steps: int
    batch: int  # sequences per step
    seq: int  # bytes per sequence
    dim: int
    blocks: int
    heads: int
    global_every: int  # every so many transformer blocks, one attends to all bytes; the others attend within windows
    experts: int  # of a transformer block; 0: a feed-forward for all bytes
    top_k: int  # experts that a byte takes
    hidden_mult: float  # hidden width of a feed-forward or of an expert, times dim
    routed: float  # share of a sequence's tokens that the heavy branch of a routed block gets
    light_mult: float
    heavy_mult: float
    window: int  # bytes in a local attention window
    masked: float  # share of the bytes that are hidden and guessed
    lr: float  # peak learning rate of the blocks
    outside: float  # factor on the learning rate outside the blocks: embedding, convolution, last norm, head
    beta1: float  # of Lion
    beta2: float
    warmup: int
    weight_decay: float
    eval_every: int
    eval_windows: int  # validation sequences of the curve
    final_windows: int  # validation sequences of the last lines
    threads: int  # CPU threads, which decide the order of sums
    data: str  # digest of the names and bytes of the data
    paths: tuple[str, ...]  # where the data was read; empty: the standard library's sources
    changes: tuple[str, ...]  # what --resume changed, and after which step

    @property
    def hides(self) -> float | None:
        """Share of the bytes that are hidden; None if the task is to guess each next byte."""
        return None if self.task == "causal" else self.masked

    def to_json(self) -> str:
        return json.dumps({"onepass_run": FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"


# values of each preset; options of the command line override most of them. Experts are on where they won at equal
# time: not on a CPU (benchmarks/results/cpu/raw/train_models.txt), on a GPU for next bytes alone (docs/evidence.md)
PRESETS: dict[str, dict[str, int | float]] = {
    "cpu": {
        "steps": 1200, "batch": 16, "seq": 256, "dim": 128, "blocks": 3, "heads": 2, "window": 64, "global_every": 1,
        "experts": 0, "hidden_mult": 1.0, "lr": 2e-3, "eval_windows": 128, "final_windows": 1024,
    },
    "gpu": {
        "steps": 50000, "batch": 2, "seq": 8192, "dim": 256, "blocks": 4, "heads": 4, "window": 128, "global_every": 4,
        "experts": 0, "hidden_mult": 4.0, "lr": 4e-4, "eval_windows": 16, "final_windows": 128,
    },
}  # fmt: skip
CHECKPOINT_EVERY = {"cpu": 50, "gpu": 1000}  # on a GPU, writing takes as long as a hundred steps
# values that differ with --task causal, and with --model routed
OTHERS: dict[tuple[str, object], dict[str, int | float]] = {
    ("gpu", "causal"): {"steps": 40000, "experts": 32, "hidden_mult": 2.0},
    ("cpu", "routed"): {"heads": 4},
    ("gpu", "routed"): {"steps": 8000, "dim": 512, "blocks": 6, "heads": 8, "window": 256, "lr": 2e-4},
}
# `outside`: Lion needs a larger rate outside the blocks. One rate for all is too small for the output layer or too
# large for the matrices of the blocks; AdamW tolerates too large a rate, an update by signs does not
COMMON: dict[str, int | float] = {
    "seed": 0, "top_k": 2, "routed": 0.125, "light_mult": 0.5, "heavy_mult": 4.0, "masked": 0.15,
    "outside": 10.0, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1,
}  # fmt: skip

RANGES: dict[str, tuple[float, float]] = {  # the smallest and the largest accepted value
    "seed": (0, 2**63 - 1), "steps": (1, 10**9), "batch": (1, 2**16), "seq": (8, 2**20), "dim": (8, 2**14),
    "blocks": (1, 256), "heads": (1, 512), "global_every": (1, 256), "experts": (0, 4096), "top_k": (1, 4096),
    "hidden_mult": (1e-4, 64.0), "routed": (1e-6, 1.0), "light_mult": (1e-4, 64.0),
    "heavy_mult": (1e-4, 64.0), "window": (1, 2**20), "masked": (0.01, 0.9), "lr": (0.0, 10.0),
    "outside": (0.0, 1e4), "beta1": (0.0, 0.999999), "beta2": (0.0, 0.999999), "warmup": (0, 10**9),
    "weight_decay": (0.0, 10.0), "eval_every": (1, 10**9), "eval_windows": (1, 10**6), "final_windows": (1, 10**6),
    "threads": (1, 4096),
}  # fmt: skip
# the types that a field's value may have in a file, and their name in errors; floats must be finite, too
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"), "float": ((int, float), "a number"), "str": ((str,), "a text"),
    "tuple": ((list, tuple), "a list of texts"),
}  # fmt: skip
CHOICES = {
    "preset": tuple(PRESETS), "task": ("masked", "causal"), "model": ("transformer", "routed"),
    "device": ("cpu", "cuda"), "precision": ("fp32", "bf16"),
}  # fmt: skip


def build(preset: str, **values: object) -> Config:
    """Return the configuration of a preset; `values` override it where they are not None."""
    chosen = {"preset": preset} | {name: value for name, value in values.items() if value is not None}
    merged: dict[str, Any] = {"task": "masked", "model": "transformer", "changes": (), **COMMON, **PRESETS[preset]}
    merged |= OTHERS.get((preset, chosen.get("task")), {}) | OTHERS.get((preset, chosen.get("model")), {}) | chosen
    steps, dim = merged["steps"], merged["dim"]
    merged.setdefault("warmup", min(100, steps // 10))
    merged.setdefault("eval_every", max(1, steps // 10))
    if values.get("heads") is None and dim % (2 * merged["heads"]):
        # the preset's heads don't divide this width: take the most heads of even width, as rotary positions need pairs
        merged["heads"] = next((heads for heads in (8, 4, 2) if dim % (2 * heads) == 0), 1)
    return checked(merged, "")


def checked(values: dict[str, object], where: str) -> Config:
    """Return a Config; raise UserError if a value is missing, unknown, of a wrong type or out of range."""
    fields = {field.name: str(field.type) for field in dataclasses.fields(Config)}
    if missing := sorted(fields.keys() - values.keys()):
        raise UserError(f"{where}{missing[0]} is missing")
    if unknown := sorted(values.keys() - fields.keys()):
        raise UserError(f"{where}{unknown[0]} is unknown to this version of onepass")
    clean: dict[str, object] = {}
    for name, kind in fields.items():
        value = values[name]
        accepted, words = KINDS[kind.partition("[")[0]]
        if type(value) not in accepted or (isinstance(value, float) and not math.isfinite(value)):
            raise UserError(f"{where}{name} must be {words}, got {value!r:.40}")
        if name in CHOICES and value not in CHOICES[name]:
            raise UserError(f"{where}{name} must be one of {', '.join(CHOICES[name])}, got {value!r:.40}")
        if name in RANGES and isinstance(value, int | float) and not RANGES[name][0] <= value <= RANGES[name][1]:
            low, high = RANGES[name]
            raise UserError(f"{where}{name} must be from {low:,} to {high:,}, got {value!s:.40}")
        if isinstance(value, list | tuple):
            if not all(isinstance(text, str) for text in value):
                raise UserError(f"{where}{name} must be {words}, got {value!r:.40}")
            value = tuple(value)
        clean[name] = float(value) if kind == "float" and isinstance(value, int) else value
    config = Config(**clean)  # type: ignore[arg-type]
    if config.dim % (2 * config.heads):
        raise UserError(
            f"{where}dim must be a multiple of 2 × heads (rotary positions turn pairs), "
            f"got dim {config.dim} and {config.heads} heads"
        )
    if 0 < config.experts < config.top_k:
        raise UserError(f"{where}top_k must be at most experts, got top_k {config.top_k} and {config.experts} experts")
    for name, mult in (("light_mult", config.light_mult), ("heavy_mult", config.heavy_mult)):
        if config.dim * mult < 1:
            raise UserError(f"{where}dim {config.dim} times {name} must be at least 1, got {config.dim * mult:g}")
    return config


def from_json(text: str | bytes, where: str) -> Config:
    """Parse a configuration; raise UserError with a message that starts with `where` if it is not valid."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}is no JSON ({error!s:.80})") from None
    if not isinstance(values, dict) or values.pop("onepass_run", None) != FORMAT:
        raise UserError(f"{where}is no configuration of an onepass run (format {FORMAT})")
    return checked(values, where)


def changed(config: Config, step: int, **values: int | None) -> Config:
    """Return the configuration with the values that are not None and a record of each change after `step`."""
    changes = {name: value for name, value in values.items() if value is not None and getattr(config, name) != value}
    notes = (f"{name} {getattr(config, name)} to {value} after step {step}" for name, value in changes.items())
    return dataclasses.replace(config, changes=(*config.changes, *notes), **changes)  # type: ignore[arg-type]


def contradiction(config: Config, saved: Config) -> str | None:
    """Return the first value in which a checkpoint's configuration is not the run's, or None.

    `changed` may have come between them: the run then has more steps, other threads and a longer record.
    """
    later = config.changes[: len(saved.changes)] == saved.changes and len(config.changes) > len(saved.changes)
    free = {"steps", "threads", "changes"} if later else set()
    names = [field.name for field in dataclasses.fields(Config) if field.name not in free]
    return next((name for name in names if getattr(config, name) != getattr(saved, name)), None)


def difference(run: Config, options: dict[str, object]) -> str | None:
    """Describe the first option that differs from the run's; None if all agree. Options that are None are skipped."""
    for name, value in options.items():
        if name != "paths" and value is not None and getattr(run, name) != value:
            return f"{name} is {value} here and {getattr(run, name)} in the run"
    return None

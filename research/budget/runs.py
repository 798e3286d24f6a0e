"""Runs: their options, lists of them, their records, and which process trains which."""

from __future__ import annotations

import fcntl
import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from onepass.train.commands import files
from onepass.train.commands.errors import UserError, doing

Record = dict[str, Any]
# the options that each family has beside `COMMON`
FAMILIES = {
    "dense": ("hidden", "chosen"),
    "windows": ("hidden", "window"),
    "global": ("hidden", "window", "every", "chosen"),
    "experts": ("hidden", "window", "every", "chosen", "experts", "top_k", "shared"),
    "routed": ("window", "share", "light"),
}
COMMON = ("task", "n", "batch", "width", "depth", "seconds", "rate", "seed", "stream", "weights", "compile", "grams")
WORDS = {"task": ("next", "hidden"), "stream": ("fp32", "bf16"), "weights": ("fp32", "bf16"), "compile": ("no", "yes")}
HEAD = 64  # channels of a head, in every family
SIDE = 128  # keys of a block that `chosen` counts
TOKENS = 16384  # of a step


@dataclass(frozen=True)
class Run:
    """One training: a model, a task, and its seconds.

    Multiples of the width: `hidden` of the feed-forward or of one expert (0: 4, experts 2), `shared` of the experts'
    shared feed-forward, `light` of the routed block's light one. One block in `every` is global. `share`: part of the
    tokens that a routed block's heavy branches get. `grams`: rows of each of two hashed tables of the 2 and 3 last
    bytes, added to the embedding. `chosen`: blocks of 128 keys that a global block reads; 0: all. `stream` and
    `weights`: dtypes of the residual stream and of the parameters, bf16 ones with Lion's remainders. `compile`: the
    feed-forwards go through torch.compile.
    """

    family: str
    task: str = "next"
    n: int = 8192
    batch: int = 0
    width: int = 256
    depth: int = 4
    window: int = 128
    every: int = 4
    chosen: int = 0
    hidden: float = 0.0
    experts: int = 32
    top_k: int = 2
    shared: float = 0.0
    share: float = 0.125
    light: float = 2.0
    grams: int = 0
    stream: str = "fp32"
    weights: str = "fp32"
    compile: str = "yes"
    seconds: float = 60.0
    rate: float = 4e-4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n", "width", "depth", "window", "every", "experts", "top_k", "seconds", "rate", "share", "light"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        for name in ("batch", "chosen", "hidden", "shared", "grams", "seed"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} must be 0 or above, got {getattr(self, name)}")
        for name, known in WORDS.items():
            if getattr(self, name) not in known:
                raise UserError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.width % HEAD:
            raise UserError(f"width must be a multiple of {HEAD}, the channels of a head, got {self.width}")
        if self.family != "dense" and self.window >= self.n:
            raise UserError(f"window must be smaller than n = {self.n}, got {self.window}")
        if self.top_k > self.experts:
            raise UserError(f"top_k must be at most experts = {self.experts}, got {self.top_k}")
        if self.chosen and (self.n % SIDE or self.task == "hidden"):
            raise UserError(f"chosen needs task=next and an n that is a multiple of {SIDE}, got {self.task}, {self.n}")
        if self.grams and self.task == "hidden":
            raise UserError("grams needs task=next: tables of hidden bytes would hold their places")

    @property
    def rows(self) -> int:
        """Return the sequences of a step."""
        return self.batch or max(1, TOKENS // self.n)

    @property
    def inner(self) -> int:
        """Return the hidden units of the feed-forward, or of one expert."""
        return int((self.hidden or (2 if self.family == "experts" else 4)) * self.width)

    def words(self) -> list[str]:
        """Return the options that the family has and that are not the defaults, as a list has them."""
        own = (*COMMON, *FAMILIES[self.family])
        some = [(f, getattr(self, f.name)) for f in fields(Run) if f.name in own]
        changed = [(f.name, value) for f, value in some if value != f.default]
        return [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in changed]

    @property
    def name(self) -> str:
        """Return the name of the run's files."""
        return "_".join([self.family, *self.words()])


def parse(line: str) -> list[Run]:
    """Return the runs of ``family=global width=256,512 rate=2e-4,4e-4``: every combination, in this order."""
    choices: dict[str, list[Any]] = {}
    kinds = {f.name: {"int": int, "float": float}.get(str(f.type), str) for f in fields(Run)}
    for word in line.split():
        key, _, values = word.partition("=")
        if key not in kinds:
            raise UserError(f"{line!r}: {key!r} is no option of a run; there are {', '.join(kinds)}")
        try:
            choices[key] = [kinds[key](value) for value in values.split(",")]
        except ValueError:
            raise UserError(f"{line!r}: {key} takes numbers with commas between them, got {values!r}") from None
    runs = []
    for family in choices.pop("family", list[Any]()):
        if family not in FAMILIES:
            raise UserError(f"{line!r}: family must be one of {', '.join(FAMILIES)}, got {family!r}")
        if other := [key for key in choices if key not in (*COMMON, *FAMILIES[family])]:
            has = ", ".join(FAMILIES[family])
            raise UserError(f"{line!r}: {other[0]} is no option of {family}, which has {has}; give it its own line")
        for combination in itertools.product(*choices.values()):
            try:
                runs.append(Run(family, **dict(zip(choices, combination, strict=True))))
            except UserError as error:
                raise UserError(f"{line!r}: {error}") from None
    if not runs:
        raise UserError(f"{line!r}: give a family, as in family=dense; there are {', '.join(FAMILIES)}")
    return runs


def read_list(path: Path) -> list[Run]:
    """Read a file with runs in every line; # begins a comment."""
    try:
        with doing(f"read {path}"):
            lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path} is no list of runs: it is not UTF-8") from None
    return [run for line in lines if (own := line.partition("#")[0].strip()) for run in parse(own)]


def load(folder: Path) -> list[tuple[Run, Record]]:
    """Return the records of a folder: each line of its files *.json and *.jsonl is one."""
    records = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.jsonl")]):
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                records.append((Run(**record["run"]), record))
        except (OSError, ValueError, KeyError, TypeError, UserError):
            raise UserError(f"{path} is no record of `research.budget`; move it away") from None
    return records


def save(folder: Path, run: Run, record: Record) -> None:
    """Write a run's record atomically."""
    files.write(folder / f"{run.name}.json", json.dumps({"run": asdict(run), **record}) + "\n")


@contextmanager
def claim(folder: Path, run: Run) -> Iterator[bool]:
    """Yield whether this process may train the run in this block: no other process does, and it has no record.

    The claim is a lock of the system on a file, so that it ends with its process, however that ends.
    """
    place = folder / "claims"
    place.mkdir(parents=True, exist_ok=True)
    with (place / run.name).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield run not in (done for done, _ in load(folder))


def cut(folder: Path, run: Run) -> Path:
    """Return where the state of a run that was cut off lies."""
    return folder / f"{run.name}.cut"


def best(records: Iterable[tuple[Run, Record]]) -> dict[tuple[str, int, float], dict[str, list[tuple[Run, Record]]]]:
    """Return task, n, seconds → family → the runs of the model with the fewest mean bits."""
    models: dict[tuple[str, int, float], dict[str, dict[Run, list[tuple[Run, Record]]]]] = {}
    for run, record in records:
        if "bits" in record:
            model = Run(**{**asdict(run), "seed": 0})
            families_of = models.setdefault((run.task, run.n, run.seconds), {}).setdefault(run.family, {})
            families_of.setdefault(model, []).append((run, record))
    return {
        key: {
            family: min(models_of.values(), key=lambda pairs: sum(r["bits"] for _, r in pairs) / len(pairs))
            for family, models_of in sorted(families.items(), key=lambda item: list(FAMILIES).index(item[0]))
        }
        for key, families in sorted(models.items(), key=lambda item: (item[0][0] == "hidden", *item[0][1:]))
    }

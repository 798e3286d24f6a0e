"""Files byte by byte: a damaged run, record or text is refused in one line, or does no harm; nothing is lost."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from .engine import Case, Property, SkipCase, require
from .here import call, call_apart, contents, manners, scratch
from .tensors import SEEDS

TINY = ("--dim", "16", "--blocks", "1", "--seq", "16", "--batch", "2", "--device", "cpu")
PARTS = ("config.json", "checkpoint.safetensors", "data.json", "metrics.jsonl")
DAMAGES = ("flip", "bit", "cut", "insert", "double", "zeros", "swap", "empty", "letter", "junk")


@functools.cache
def unfinished_run() -> Path:
    """A run that stands at step 4 of 6, as after a kill, with the text that it learns from; made once per process."""
    from onepass.train import checkpoint

    home = Path(tempfile.mkdtemp(prefix="onepass-fuzz-run-"))
    (home / "texts").mkdir()
    for i in range(4):
        (home / "texts" / f"{i}.txt").write_text(" ".join(f"{i} route {j * i} heavy" for j in range(20)))
    save, kept = checkpoint.save, {}

    def keep(path: Path, *rest: Any, **named: Any) -> None:
        save(path, *rest, **named)
        kept[named["step"]] = path.read_bytes()

    with mock.patch.object(checkpoint, "save", keep), no_pictures():
        answer = call(["train", "texts", *TINY, "--steps", "6", "--checkpoint-every", "4", "--out", "run"], home)
    require(answer.code == 0, "train", answer.err + answer.trace)
    (home / "run" / "checkpoint.safetensors").write_bytes(kept[4])
    for name in ("loss.png", "routing.html", "routing.png"):
        (home / "run" / name).unlink()
    return home


def no_pictures() -> contextlib.AbstractContextManager[object]:
    """Draw and do not encode: the pixels take most of a small run's time."""
    from onepass.train import pictures

    return mock.patch.object(pictures, "_png", return_value=b"")


@functools.cache
def result() -> dict[str, bytes]:
    """The weights that the undamaged run ends with."""
    with scratch() as place:
        home = place / "copy"
        shutil.copytree(unfinished_run(), home)
        with no_pictures():
            answer = call(["train", "texts", "--resume", "--out", "run"], home)
        require(answer.code == 0, "resume", answer.err + answer.trace)
        return weights(home / "run")


def weights(run: Path) -> dict[str, bytes]:
    """The tensors of a run's checkpoint, as bytes."""
    import safetensors.torch

    tensors = safetensors.torch.load((run / "checkpoint.safetensors").read_bytes())
    return {name: t.numpy().tobytes() for name, t in tensors.items()}


def damage(content: bytes, how: str, seed: int) -> bytes:
    """Content with one thing wrong."""
    draw = random.Random(seed)
    at = draw.randrange(len(content)) if content else 0
    # headers and structure are at the beginning
    at = min(at, draw.choice((16, 200, 2000, len(content)))) % max(1, len(content))
    until = min(len(content), at + draw.choice((1, 2, 8, 64)))
    if how == "flip":
        return content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
    if how == "bit":
        return (
            content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :] if content else content
        )
    if how == "cut":
        return content[:at]
    if how == "insert":
        return content[:at] + draw.randbytes(draw.choice((1, 4, 50))) + content[at:]
    if how == "double":
        return content[:until] + content[at:until] + content[until:]
    if how == "zeros":
        return content[:at] + bytes(until - at) + content[until:]
    if how == "swap":
        return content[at:] + content[:at]
    if how == "empty":
        return b""
    if how == "letter":
        return (
            content[:at]
            + draw.choice((b"}", b"{", b'"', b",", b"9", b"-", b"\n", b"null", b"1e999", b"["))
            + content[at + 1 :]
        )
    return draw.randbytes(draw.choice((1, 8, 9, 100, 1000)))


def _damaged(device: str) -> st.SearchStrategy[Case]:
    return st.fixed_dictionaries(
        {
            "op": st.just("resume"),
            "part": st.sampled_from(PARTS),
            "how": st.sampled_from(DAMAGES),
            "seed": SEEDS,
            "command": st.sampled_from(("resume", "resume", "resume", "show")),
            "apart": st.integers(0, 60).map(lambda i: i == 60),
        }
    )


def check_run(case: Case, device: str) -> None:
    """A damaged run is refused in one line and left as it is, or goes on to the weights of the undamaged one."""
    expected = result()
    with scratch() as place:
        home = place / "copy"
        shutil.copytree(unfinished_run(), home)
        victim = home / "run" / case["part"]
        before = victim.read_bytes()
        victim.write_bytes(damage(before, case["how"], case["seed"]))
        if victim.read_bytes() == before:
            raise SkipCase
        kept = contents(home)
        run = call_apart if case["apart"] else call
        hurry = contextlib.nullcontext() if case["apart"] else no_pictures()
        what = f"{case['command']} with a damaged {case['part']}"
        if case["command"] == "show":
            with hurry:
                answer = run(["show", "run", "texts/1.txt", "--out", "pictures"], home)
            manners(answer, what)
            after = contents(home)
            require(all(after.get(name) == content for name, content in kept.items()), what, "show changed the run")
            return
        with hurry:
            answer = run(["train", "texts", "--resume", "--out", "run"], home)
        manners(answer, what)
        if answer.code == 2:
            after = contents(home)
            changed = sorted(name for name, content in kept.items() if after.get(name) != content)
            require(not changed, f"{what} loses", f"refused ({answer.err.strip()[:120]}), but {changed} changed")
            return
        require(weights(home / "run") == expected, f"{what} goes on", "accepted, and the weights are others")


def _links(device: str) -> st.SearchStrategy[Case]:
    names = (
        "config.json",
        "data.json",
        "metrics.jsonl",
        "checkpoint.safetensors",
        "loss.png",
        "routing.png",
        "routing.html",
        ".lock",
    )
    return st.fixed_dictionaries(
        {
            "op": st.just("links"), "name": st.sampled_from(names), "partial": st.booleans(), "dangling": st.booleans(),
            "command": st.sampled_from(("resume", "force", "show")),
        }
    )  # fmt: skip


def check_links(case: Case, device: str) -> None:
    """A symbolic link planted in a run's directory: whatever the command answers, the link's target stays as it was."""
    with scratch() as place:
        home = place / "copy"
        shutil.copytree(unfinished_run(), home)
        victim = place / "victim"
        name = case["name"] + (".partial" if case["partial"] else "")
        if case["command"] == "show":
            name = f"1.txt.{name}"
        link = home / "run" / name
        content = link.read_bytes() if link.exists() else b"keep me"
        if not case["dangling"]:
            victim.write_bytes(content)
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
        arguments = {
            "resume": ["train", "texts", "--resume", "--out", "run"], "show": ["show", "run", "texts/1.txt"],
            "force": ["train", "texts", *TINY, "--steps", "2", "--force", "--out", "run"],
        }[case["command"]]  # fmt: skip
        with no_pictures():
            answer = call(arguments, home)
        what = f"{case['command']} beside a link" + (" of a partial file" if case["partial"] else "")
        manners(answer, what)
        if case["dangling"]:
            require(not victim.exists(), what, f"{name}: the target was made")
        else:
            require(victim.read_bytes() == content, what, f"{name}: the target was written to")


def _records(device: str) -> st.SearchStrategy[Case]:
    return st.fixed_dictionaries(
        {
            "op": st.just("report"), "command": st.sampled_from(("bench --report", "bench --merge", "ablate report")),
            "how": st.sampled_from((*DAMAGES, "value", "value", "value")), "seed": SEEDS,
        }
    )  # fmt: skip


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e400,
    float("nan"),
    "",
    "x\x1b[31m\n",
    [],
    {},
    [None],
    {"a": 1},
    "1",
    10**400,
)


@functools.cache
def records(kind: str) -> tuple[bytes, ...]:
    """Committed records of a kind: what a report is built from."""
    found = sorted(RESULTS.rglob("*.json"), key=lambda p: p.stat().st_size)
    chosen = []
    for path in found:
        content = path.read_bytes()
        if len(content) > 400_000:
            continue
        if (b'"arm"' in content) == (kind == "ablate report") and (
            b'"records"' in content or b'"arm"' in content or b'"stage"' in content
        ):
            chosen.append(content)
    return tuple(chosen[:4])


def _exchange(content: bytes, seed: int) -> bytes:
    """One value of a JSON document replaced by another, or a key left out."""
    draw, document = random.Random(seed), json.loads(content)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            places.append((node, key))
            walk(value)

    walk(document)
    if not places:
        return b"null"
    # what is nearer to the root is drawn more often
    node, key = places[int(len(places) * draw.random() ** 3)]
    if draw.random() < 0.25:
        del node[key]
    else:
        node[key] = draw.choice(VALUES)
    return json.dumps(document).encode()


def check_records(case: Case, device: str) -> None:
    """Reports of damaged records: exit code 0 or 2, one line, the records untouched."""
    kinds = records(case["command"])
    if not kinds:
        raise SkipCase
    content = kinds[case["seed"] % len(kinds)]
    bad = _exchange(content, case["seed"]) if case["how"] == "value" else damage(content, case["how"], case["seed"])
    with scratch() as home:
        folder = home / "records"
        folder.mkdir()
        (folder / "a.json").write_bytes(bad)
        (folder / "b.json").write_bytes(content)
        before = contents(folder)
        if case["command"] == "bench --report":
            arguments = ["bench", "--report", "records"]
        elif case["command"] == "bench --merge":
            arguments = ["bench", "--merge", "out.json", "records/a.json", "records/b.json"]
        else:
            arguments = ["ablate", "report", "records"]
        answer = call(arguments, home)
        what = f"{case['command']} of a damaged record"
        manners(answer, what)
        after = contents(folder)
        require(all(after.get(name) == data for name, data in before.items()), what, "a record changed")


def _texts(device: str) -> st.SearchStrategy[Case]:
    name = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=20)
    return st.fixed_dictionaries(
        {
            "op": st.just("texts"),
            "command": st.sampled_from(("train", "show")),
            "seed": SEEDS,
            "files": st.lists(
                st.tuples(
                    name,
                    st.one_of(
                        st.binary(max_size=300), st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace"))
                    ).map(bytes.hex),
                    st.integers(1, 30),
                ),
                min_size=1,
                max_size=4,
            ),
        }
    )


def check_texts(case: Case, device: str) -> None:
    """Any file names and bytes as text: exit code 0 or 2, one line, no raw control characters, inputs untouched."""
    with scratch() as home:
        folder = home / "in"
        folder.mkdir()
        for name, content, times in case["files"]:
            if name in (".", "..") or len(name.encode()) > 200:
                raise SkipCase
            (folder / name).write_bytes(bytes.fromhex(content) * times)
        before = contents(folder)
        if case["command"] == "train":
            paths = ["in"] if case["seed"] % 2 else [f"in/{name}" for name, *_ in case["files"]]
            answer = call(["train", *TINY, "--steps", "1", "--out", "out", "--", *paths], home)
        else:
            shutil.copytree(unfinished_run() / "run", home / "run")
            answer = call(["show", "--out", "out", "--", "run", f"in/{case['files'][0][0]}"], home)
        manners(answer, f"{case['command']} of any text")
        require(contents(folder) == before, f"{case['command']} of any text", "an input changed")


PROPERTIES = [
    Property("a damaged run", _damaged, check_run, ("cpu",), share=1.5, burst=8),
    Property("a planted link", _links, check_links, ("cpu",), share=0.3, burst=8),
    Property("a damaged record", _records, check_records, ("cpu",), burst=8),
    Property("any text", _texts, check_texts, ("cpu",), burst=8),
]

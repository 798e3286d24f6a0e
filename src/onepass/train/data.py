"""Text to learn from: find the files, part them by a hash of their path, hide bytes of a sequence."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onepass.core.errors import UserError, reason
from onepass.train import files

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

MASK = 256  # the token that stands where a byte was hidden
VOCABULARY = 257  # 256 bytes and MASK
VALIDATION = 0.1  # share of the files that are only read to measure
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# the purposes that random numbers are drawn for; each has streams of its own
TRAINING, MEASURING = 1, 2


@dataclass
class Source:
    """One file: the name its part is decided by, its bytes, and what it takes to see that it changed."""

    name: str
    content: bytes
    digest: str
    validation: bool = False


@dataclass
class Corpus:
    """Everything a run reads: both parts as one long text each, and the list of their files."""

    sources: list[Source]
    training: Bytes
    validation: Bytes
    digest: str
    notes: list[str] = field(default_factory=list)

    def manifest(self) -> str:
        """Write the list of files, one per line, so that a later reader can see which one changed."""
        rows = [[s.name, len(s.content), s.digest, "validation" if s.validation else "training"] for s in self.sources]
        return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def standard_library() -> Path:
    """Return where the running Python keeps its own sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def why_no_text(content: bytes) -> str | None:
    """Say why these bytes are no text, or None when they are.

    Text is anything but white space, without a NUL byte, of which at least nine tenths are valid UTF-8 (which lets
    Latin-1 prose pass and archives, pictures and programs not).
    """
    if not content.strip():
        return "it is empty" if not content else "it is only white space"
    nul = content.find(b"\0")
    if nul >= 0:
        return f"it is binary: byte {nul} is NUL"
    wrong = len(content) - len(content.decode("utf-8", "ignore").encode())
    if wrong * 10 > len(content):
        return f"it is binary: {100 * wrong // len(content)} % of its bytes are no UTF-8"
    return None


def read_text(path: Path) -> bytes:
    """Read one file that the user named and refuse it when it is no text."""
    content = files.read(path)
    if why := why_no_text(content):
        raise UserError(f"{path} is no text ({why}); give files of text")
    return content


def _walk(root: Path, *, library: bool) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"can't read {error.filename}: {reason(error)}")

    for folder, folders, names in os.walk(root, onerror=refuse):
        hidden = SKIPPED if library else {"__pycache__"}
        folders[:] = sorted(name for name in folders if name not in hidden and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            # a pipe or a socket in a directory would keep the reader waiting for ever
            if not name.startswith(".") and (not library or name.endswith(".py")) and path.is_file():
                yield path


def package(name: str) -> Path:
    """Return where an installed package keeps its sources; it is looked up, not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"there is no installed package {name!r} to read")
    return Path(next(iter(spec.submodule_search_locations)))


def _gather(paths: Sequence[str], packages: Sequence[str]) -> tuple[list[Source], list[str]]:
    found: list[tuple[str, Path, bool]] = []
    for given in paths:
        root = Path(given)
        if root.is_dir():
            found += [(path.relative_to(root).as_posix(), path, False) for path in _walk(root, library=False)]
        else:
            found.append((root.name, root, True))
    if not paths:
        roots = [("", standard_library()), *((f"{name}/", package(name)) for name in packages)]
        for prefix, root in roots:
            found += [(prefix + path.relative_to(root).as_posix(), path, False) for path in _walk(root, library=True)]
    sources: list[Source] = []
    seen: set[str] = set()
    no_text, doubles = 0, 0
    for name, path, named in found:
        content = read_text(path) if named else files.read(path)
        if not named and why_no_text(content):
            no_text += 1
            continue
        digest = hashlib.sha256(content).hexdigest()
        # the same text under two names could be learned from in one part and measured on in the other
        if digest in seen:
            doubles += 1
            continue
        seen.add(digest)
        sources.append(Source(name, content, digest))
    notes = [f"{no_text:,} files are no text and were left out"] * bool(no_text)
    notes += [f"{doubles:,} files were left out: their text is in another file"] * bool(doubles)
    if not sources:
        where = ", ".join(paths) if paths else str(standard_library())
        raise UserError(f"there is no text in {where:.200}; give files or directories of text")
    return sources, notes


def position(name: str) -> float:
    """Place a file between 0 and 1 by the hash of its path alone: below VALIDATION it is only measured on."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64


def load(paths: Sequence[str], packages: Sequence[str] = ()) -> Corpus:
    """Read the files, and all text files of the directories, and part them into training and validation.

    Without paths: the Python sources of the standard library and of the installed `packages`.

    A whole file goes to one part, by the hash of its path below the directory that was given. So that neither part
    is empty, a set of a few files gives at least the one with the smallest hash to validation and keeps at least the
    one with the largest for training. A single file can't be parted: its last tenth is the validation text.
    """
    sources, notes = _gather(paths, packages)
    if len(sources) == 1:
        only = sources[0]
        cut = len(only.content) - len(only.content) // 10
        parts = [only.content[:cut]], [only.content[cut:]]
        notes.append("there is one file: its last tenth is the validation text")
    else:
        order = sorted(sources, key=lambda source: (position(source.name), source.name, source.digest))
        for place, source in enumerate(order):
            source.validation = place == 0 or (position(source.name) < VALIDATION and place < len(order) - 1)
        parts = [s.content for s in sources if not s.validation], [s.content for s in sources if s.validation]
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.name!r} {len(source.content)} {source.digest}\n".encode("utf-8", "backslashreplace"))
    training, validation = (np.frombuffer(b"".join(part), dtype=np.uint8) for part in parts)
    return Corpus(sources, training, validation, digest.hexdigest(), notes)


def changed(corpus: Corpus, manifest: Path) -> str:
    """Say what differs between the data of a run, as its manifest tells, and the data that is there now."""
    try:
        rows = json.loads(manifest.read_bytes())
        old = {str(row[0]): (int(row[1]), str(row[2])) for row in rows}
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return "its files are not the same"
    new = {source.name: (len(source.content), source.digest) for source in corpus.sources}
    gone, come = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    other = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    for names, what in ((other, "changed"), (gone, "is gone"), (come, "is new")):
        if names:
            more = len(gone) + len(come) + len(other) - 1
            return f"{names[0]!r} {what}" + (f", and {more} more differ" if more else "")
    return "the order of its files is not the same"


def damaged(corpus: Corpus, manifest: Path) -> bool:
    """Say whether a run's manifest is anything but the list of this data, which is the run's."""
    try:
        return files.read(manifest) != corpus.manifest().encode()
    except UserError:
        return True


def generator(seed: int, purpose: int, step: int) -> np.random.Generator:
    """Return the random numbers of one step: a function of its number, so a resumed run draws the same ones."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, purpose << 48 | step], dtype=np.uint64)))


@dataclass
class Batch:
    """Sequences with bytes to guess: `tokens` (b, n) as a model sees them, `hidden` (b, m) where, `bytes` what."""

    tokens: Ints
    hidden: Ints
    bytes: Ints
    draw: int  # names the random choices of a random router


def hide(windows: Ints, share: float, draws: np.random.Generator, draw: int) -> Batch:
    """Hide round(share·n) bytes of every sequence, at least one, all of them behind MASK.

    As in BERT, but none of the chosen positions keeps its byte or shows a random one: what is measured is then only
    what the model can't see, and may be compared with the entropy of the text.
    """
    count = min(max(1, round(share * windows.shape[1])), windows.shape[1])
    places = draws.random(windows.shape).argpartition(count - 1, axis=1)[:, :count]
    places.sort(axis=1)
    tokens = windows.copy()
    np.put_along_axis(tokens, places, MASK, axis=1)
    return Batch(tokens, places, np.take_along_axis(windows, places, axis=1), draw)


def shift(windows: Ints, draw: int) -> Batch:
    """Ask for every byte of a sequence, shown the one before it: MASK, a byte of no text, where a sequence begins."""
    tokens = np.roll(windows, 1, axis=1)
    tokens[:, :1] = MASK
    return Batch(tokens, np.broadcast_to(np.arange(windows.shape[1]), windows.shape).copy(), windows, draw)


def ask(windows: Ints, share: float | None, draws: np.random.Generator, draw: int) -> Batch:
    """Hide a share of the bytes, or ask for each next one (None)."""
    return shift(windows, draw) if share is None else hide(windows, share, draws, draw)


def training_batch(text: Bytes, batch: int, seq: int, share: float | None, seed: int, step: int) -> Batch:
    """Draw the sequences of one training step, anywhere in the text; `share` as in `ask`."""
    draws = generator(seed, TRAINING, step)
    starts = draws.integers(0, len(text) - seq + 1, size=(batch, 1))
    return ask(text[starts + np.arange(seq)].astype(np.int64), share, draws, step)


def validation_starts(text: Bytes, seq: int, count: int) -> Ints:
    """Spread at most `count` sequences over the text, none overlapping another."""
    count = min(count, len(text) // seq)
    return np.linspace(0, len(text) - seq, count).astype(np.int64)


def validation_batches(text: Bytes, batch: int, seq: int, share: float | None, count: int) -> Iterator[Batch]:
    """Give the sequences that measure a model. They and what they hide are the same for every seed and every run."""
    starts = validation_starts(text, seq, count)
    # one stream for all of them: what is hidden does not depend on the batch size
    draws = generator(0, MEASURING, 0)
    for first in range(0, len(starts), batch):
        windows = text[starts[first : first + batch, None] + np.arange(seq)].astype(np.int64)
        yield ask(windows, share, draws, first)


def unigram_entropy(text: Bytes, seq: int, count: int) -> float:
    """Bits per byte of the best guess that knows how often each byte occurs in these sequences and nothing else."""
    windows = text[validation_starts(text, seq, count)[:, None] + np.arange(seq)]
    share = np.bincount(windows.ravel(), minlength=256) / windows.size
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())

"""Training data: split files by a hash of their path, make batches with bytes to guess."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onepass.train.sources import LeftOut, Source, gather

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

MASK = 256  # token in place of a hidden byte
VOCABULARY = 257  # 256 bytes and MASK
VALIDATION = 0.1  # share of the files that validate
# purposes of random numbers; each has its own streams
TRAINING, MEASURING = 1, 2


@dataclass
class Corpus:
    """The data of a run: the training and validation parts, each one long text, and the list of files."""

    sources: list[Source]
    training: Bytes
    validation: Bytes
    digest: str
    left_out: list[LeftOut] = field(default_factory=list)

    def manifest(self) -> str:
        """Return the list of files as JSON, one per line: name, bytes, SHA-256, part."""
        rows = [[s.name, len(s.content), s.digest, "validation" if s.validation else "training"] for s in self.sources]
        return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def position(name: str) -> float:
    """Return a number between 0 and 1 from the hash of a path; below VALIDATION the file belongs to validation."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64


def load(paths: Sequence[str]) -> Corpus:
    """Read the files, and all text files of the directories, and split them into training and validation.

    Without paths: the Python sources of the standard library.

    The hash of a file's path below the given directory decides its part, always for the whole file. Both parts get a
    file: the smallest hash always validates, the largest always trains. A single file is cut: its last tenth validates.
    """
    sources, left_out = gather(paths)
    if len(sources) == 1:
        only = sources[0]
        cut = len(only.content) - len(only.content) // 10
        parts = [only.content[:cut]], [only.content[cut:]]
    else:
        order = sorted(sources, key=lambda source: (position(source.name), source.name, source.digest))
        for place, source in enumerate(order):
            source.validation = place == 0 or (position(source.name) < VALIDATION and place < len(order) - 1)
        parts = [s.content for s in sources if not s.validation], [s.content for s in sources if s.validation]
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.name!r} {len(source.content)} {source.digest}\n".encode("utf-8", "backslashreplace"))
    training, validation = (np.frombuffer(b"".join(part), dtype=np.uint8) for part in parts)
    return Corpus(sources, training, validation, digest.hexdigest(), left_out)


def generator(seed: int, purpose: int, step: int) -> np.random.Generator:
    """Return the random generator of one step; it depends on the arguments alone, so a resumed run draws the same."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, purpose << 48 | step], dtype=np.uint64)))


@dataclass
class Batch:
    """Sequences with bytes to guess: model input `tokens` (b, n), positions `hidden` (b, m), answers `bytes` (b, m)."""

    tokens: Ints
    hidden: Ints
    bytes: Ints


def hide(windows: Ints, share: float, draws: np.random.Generator) -> Batch:
    """Replace round(share·n) bytes of every sequence, at least one, by MASK.

    BERT keeps or randomises some of the chosen bytes; here MASK replaces all of them. The loss then measures only bytes
    that are hidden from the model, and can be compared with the entropy of the text.
    """
    count = min(max(1, round(share * windows.shape[1])), windows.shape[1])
    places = draws.random(windows.shape).argpartition(count - 1, axis=1)[:, :count]
    places.sort(axis=1)
    tokens = windows.copy()
    np.put_along_axis(tokens, places, MASK, axis=1)
    return Batch(tokens, places, np.take_along_axis(windows, places, axis=1))


def shift(windows: Ints) -> Batch:
    """Shift sequences by one byte, so that each position guesses the byte after its input; the first input is MASK."""
    tokens = np.roll(windows, 1, axis=1)
    tokens[:, :1] = MASK
    return Batch(tokens, np.broadcast_to(np.arange(windows.shape[1]), windows.shape).copy(), windows)


def ask(windows: Ints, share: float | None, draws: np.random.Generator) -> Batch:
    """Return a batch with a share of the bytes hidden, or, with None, one that asks for each next byte."""
    return shift(windows) if share is None else hide(windows, share, draws)


def training_batch(text: Bytes, batch: int, seq: int, share: float | None, seed: int, step: int) -> Batch:
    """Draw the sequences of one training step, anywhere in the text; `share` as in `ask`."""
    draws = generator(seed, TRAINING, step)
    starts = draws.integers(0, len(text) - seq + 1, size=(batch, 1))
    return ask(text[starts + np.arange(seq)].astype(np.int64), share, draws)


def validation_starts(text: Bytes, seq: int, count: int) -> Ints:
    """Return the starts of at most `count` sequences, spread over the text without overlap."""
    count = min(count, len(text) // seq)
    return np.linspace(0, len(text) - seq, count).astype(np.int64)


def validation_batches(text: Bytes, batch: int, seq: int, share: float | None, count: int) -> Iterator[Batch]:
    """Yield the validation batches; sequences and hidden bytes are the same for every seed and run."""
    starts = validation_starts(text, seq, count)
    # one stream for all batches, so that the hidden bytes don't depend on the batch size
    draws = generator(0, MEASURING, 0)
    for first in range(0, len(starts), batch):
        windows = text[starts[first : first + batch, None] + np.arange(seq)].astype(np.int64)
        yield ask(windows, share, draws)


def unigram_entropy(text: Bytes, seq: int, count: int) -> float:
    """Return the entropy of single bytes in the validation sequences, in bits: the best loss without any context."""
    windows = text[validation_starts(text, seq, count)[:, None] + np.arange(seq)]
    share = np.bincount(windows.ravel(), minlength=256) / windows.size
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())

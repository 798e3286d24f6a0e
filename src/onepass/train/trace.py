"""A trace of a trained model over a text: the bytes that got each block's heavy branch, and the guesses."""

from __future__ import annotations

import string
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from onepass.train import data
from onepass.train.config import Config
from onepass.train.model import Model


@dataclass
class Trace:
    """One text, byte by byte. All arrays are (n,) for n bytes; `routed` is (blocks, n)."""

    name: str
    content: bytes
    total: int  # bytes of the whole file, of which `content` is the beginning
    config: Config
    routed: NDArray[np.bool_]
    hidden: NDArray[np.bool_]
    guess: NDArray[np.int64]  # most likely byte, −1 where the model was not asked
    chance: NDArray[np.float64]  # the model's probability of the true byte, 0 where it was not asked

    @property
    def counts(self) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = self.routed.sum(axis=0, dtype=np.int64)
        return counts


@torch.no_grad()
def trace(model: Model, config: Config, name: str, content: bytes, limit: int) -> Trace:
    """Run the model over the first `limit` bytes in sequences of the configured length, with the task of training."""
    text = np.frombuffer(content[:limit], dtype=np.uint8).astype(np.int64)
    n = len(text)
    routed = np.zeros((config.blocks, n), dtype=bool)
    hidden = np.zeros(n, dtype=bool)
    guess, chance = np.full(n, -1, dtype=np.int64), np.zeros(n)
    device = next(model.parameters()).device
    draws = data.generator(0, data.MEASURING, 1)
    for start in range(0, n, config.seq):
        batch = data.ask(text[None, start : start + config.seq], config.hides, draws)
        tokens, asked = torch.from_numpy(batch.tokens).to(device), torch.from_numpy(batch.hidden).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            found = model(tokens, asked)
        logits = found.logits
        for block, chosen in enumerate(found.chosen):
            indices = chosen[0].cpu().numpy()
            routed[block, start + indices[indices >= 0]] = True
        places = start + batch.hidden[0]
        # a language model has no hidden bytes
        hidden[places] = config.hides is not None
        guess[places] = logits[0].argmax(-1).cpu().numpy()
        likely = logits[0].double().softmax(-1).cpu().gather(-1, torch.from_numpy(batch.bytes[0])[:, None])
        chance[places] = likely[:, 0].numpy()
    return Trace(name, content[:limit], len(content), config, routed, hidden, guess, chance)


def kinds(trace: Trace) -> list[tuple[str, float, float]]:
    """Return each kind of byte in the text: its name, its share of the text, and the mean of `counts` over it.

    Hidden bytes are a kind of their own, as the model does not see what they are.
    """
    value = np.frombuffer(trace.content, dtype=np.uint8)
    # dtype object: names of any length
    names = np.array([_kind_of(v) for v in range(256)], dtype=object)[value]
    names[trace.hidden] = "hidden from the model"
    found = []
    for name in (*_KINDS, "other bytes", "hidden from the model"):
        those = names == name
        if those.any():
            found.append((name, float(those.mean()), float(trace.counts[those].mean())))
    return found


_KINDS = {
    "letters": string.ascii_letters,
    "digits": string.digits,
    "whitespace": string.whitespace,
    "punctuation": string.punctuation,
}


def _kind_of(value: int) -> str:
    return next((name for name, characters in _KINDS.items() if chr(value) in characters), "other bytes")


def cells(content: bytes) -> list[str]:
    """Return a text for every byte: its character, or "" for the later bytes of a character of several bytes.

    A line feed stays; a tab becomes ⇥; other characters that are not printable, and bytes that are not UTF-8, become a
    middle dot.
    """
    shown: list[str] = []
    place = 0
    while place < len(content):
        first = content[place]
        length = 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
        try:
            character = content[place : place + length].decode()
        except UnicodeDecodeError:
            character, length = "·", 1
        if character == "\t":
            character = "⇥"
        elif character != "\n" and not character.isprintable():
            character = "·"
        shown += [character] + [""] * (length - 1)
        place += length
    return shown


def name_of(value: int) -> str:
    """Return a readable name of a byte: 'e' or 0x0a."""
    return f"'{chr(value)}'" if 0x20 < value < 0x7F else f"0x{value:02x}"

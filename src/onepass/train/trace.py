"""A trace of a trained model over a text: what each block's router chose for the bytes, and the guesses."""

from __future__ import annotations

import string
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from onepass.train import data
from onepass.train.config import Config
from onepass.train.language import ByteModel


@dataclass
class Trace:
    """One text, byte by byte. All arrays are (n,) for n bytes; `chosen` is (blocks, n, top_k)."""

    name: str
    content: bytes
    total: int  # bytes of the whole file, of which `content` is the beginning
    config: Config
    chosen: NDArray[np.int64]  # experts of a byte, best first; of routed blocks 0 for the heavy branch, else −1
    hidden: NDArray[np.bool_]
    guess: NDArray[np.int64]  # most likely byte, −1 where the model did not guess
    chance: NDArray[np.float64]  # the model's probability of the true byte, 0 where it did not guess


@torch.no_grad()
def trace(model: ByteModel, config: Config, name: str, content: bytes, limit: int) -> Trace:
    """Run the model over the first `limit` bytes in sequences of the configured length, with the task of training."""
    text = np.frombuffer(content[:limit], dtype=np.uint8).astype(np.int64)
    n = len(text)
    experts = config.model == "transformer"
    chosen = np.full((config.blocks, n, config.top_k if experts else 1), -1)
    hidden = np.zeros(n, dtype=bool)
    guess, chance = np.full(n, -1, dtype=np.int64), np.zeros(n)
    device = next(model.parameters()).device
    draws = data.generator(0, data.MEASURING, 1)
    for start in range(0, n, config.seq):
        batch = data.ask(text[None, start : start + config.seq], config.hides, draws)
        tokens, positions = torch.from_numpy(batch.tokens).to(device), torch.from_numpy(batch.hidden).to(device)
        logits, routings = model(tokens, positions)
        for block, routing in enumerate(routings if config.experts or not experts else ()):
            indices = (routing if experts else routing.feed_forward).indices[0].cpu().numpy()
            if experts:
                chosen[block, start : start + len(indices)] = indices
            else:
                chosen[block, start + indices[indices >= 0]] = 0
        places = start + batch.hidden[0]
        # a language model has no hidden bytes
        hidden[places] = config.hides is not None
        guess[places] = logits[0].argmax(-1).cpu().numpy()
        chances = logits[0].double().softmax(-1).cpu().gather(-1, torch.from_numpy(batch.bytes[0])[:, None])
        chance[places] = chances[:, 0].numpy()
    return Trace(name, content[:limit], len(content), config, chosen, hidden, guess, chance)


def kinds(trace: Trace, *, hidden_apart: bool = True) -> list[tuple[str, NDArray[np.bool_]]]:
    """Return each kind of byte in the text: its name, and where it is.

    With `hidden_apart` the bytes hidden from the model are a kind of their own.
    """
    value = np.frombuffer(trace.content, dtype=np.uint8)
    # dtype object: names of any length
    names = np.full(256, "other bytes", dtype=object)
    for name, characters in _KINDS.items():
        names[[*map(ord, characters)]] = name
    kinds = names[value]
    kinds[trace.hidden & hidden_apart] = "hidden from the model"
    masks = [(name, kinds == name) for name in (*_KINDS, "other bytes", "hidden from the model")]
    return [(name, mask) for name, mask in masks if mask.any()]


_KINDS = {
    "letters": string.ascii_letters,
    "digits": string.digits,
    "whitespace": string.whitespace,
    "punctuation": string.punctuation,
}

"""A folder's text as one file: a line of JSON, the bytes that train, then the bytes that measure."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.train import data
from onepass.train.commands.errors import UserError, doing


class Text(NamedTuple):
    """What every run of a comparison reads, as bytes on a device; `digest` is that of the files' names and bytes."""

    training: Tensor
    validation: Tensor
    digest: str


def write(folder: Path, out: Path) -> str:
    """Write the text files of a folder, split by file as `onepass train` splits them; return a line about it.

    A name that ends in .xz is compressed.
    """
    corpus = data.load([str(folder)])
    head = {"digest": corpus.digest, "training": len(corpus.training), "validation": len(corpus.validation)}
    with doing(f"write {out}"), _open(out, "wb") as file:
        file.write(json.dumps(head).encode() + b"\n")
        file.write(corpus.training.tobytes())
        file.write(corpus.validation.tobytes())
    return f"{len(corpus.sources):,} files, {head}"


def read(path: Path, device: torch.device) -> Text:
    """Read what `write` wrote."""
    try:
        with doing(f"read {path}"), _open(path, "rb") as file:
            head = json.loads(file.readline(1000))
            content = bytearray(file.read())
        training, validation = int(head["training"]), int(head["validation"])
        if len(content) != training + validation:
            raise ValueError(f"{len(content):,} bytes, {training + validation:,} are named")
        whole = torch.frombuffer(content, dtype=torch.uint8).to(device)
        return Text(whole[:training], whole[training:], str(head["digest"]))
    except (ValueError, KeyError, TypeError, EOFError, lzma.LZMAError) as error:
        raise UserError(
            f"{path} is no text of `research.budget text DIR FILE` ({error!s:.60}); write it again"
        ) from None


def _open(path: Path, mode: str) -> Any:
    return lzma.open(path, mode) if path.suffix == ".xz" else path.open(mode)

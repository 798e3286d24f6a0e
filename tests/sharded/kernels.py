"""Spread layers by their kernels, under Triton's interpreter: a batch, uneven parts, padding."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard

from sharded.compare import mesh, same_layer
from sharded.modules import ATTENTIONS, DIM, LAYERS
from sharded.processes import Case, main

MAKES = {**LAYERS, **ATTENTIONS}


def _alike(layer: str) -> Case:
    def run() -> None:
        mask = torch.arange(33) < torch.tensor([[33], [16]])
        same_layer(MAKES[layer](), torch.randn(2, 33, DIM), mask, mesh(), [Shard(1)])

    return run


if __name__ == "__main__":
    main({layer: _alike(layer) for layer in ("feed-forward", "attention", "causal attention")})

"""The models of both tasks, which guess hidden bytes or each next byte: transformer blocks with experts, or routed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from onepass.nn import RoutedBlock, TransformerBlock
from onepass.train.commands.errors import UserError
from onepass.train.config import Config
from onepass.train.language import ByteModel


def blocks(config: Config) -> Iterator[nn.Module]:
    """Yield the blocks of a configuration."""
    dim, heads, window, causal = config.dim, config.heads, min(config.window, config.seq), config.task == "causal"
    if config.model == "transformer":
        for place in range(1, config.blocks + 1):
            yield TransformerBlock(
                dim, heads=heads, dim_head=dim // heads, window=None if place % config.global_every == 0 else window,
                causal=causal, num_experts=config.experts, top_k=config.top_k,
                hidden_dim=max(1, round(config.hidden_mult * dim)),
            )  # fmt: skip
    else:
        for _ in range(config.blocks):
            yield RoutedBlock(
                dim, config.routed, heads=heads, dim_head=dim // heads, window=window, causal=causal,
                light_mult=config.light_mult, heavy_mult=config.heavy_mult,
            )  # fmt: skip


def new(config: Config) -> ByteModel:
    """Return the model of a configuration with initial weights, in bf16 if `precision` is: Lion keeps the lower bits.

    torch's global random state stays as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = ByteModel(config.dim, blocks(config), causal=config.task == "causal")
    return model.bfloat16() if config.precision == "bf16" else model


def words(config: Config) -> str:
    """Describe the blocks of a configuration."""
    if config.model == "routed":
        return f"heavy branch for {100 * config.routed:g} % of the bytes"
    near = f"windows of {config.window} bytes, every {config.global_every}th block global"
    experts = f", {config.experts} experts of which a byte takes {config.top_k}" * (config.experts > 0)
    return ("attention to all bytes" if config.global_every == 1 else near) + experts


def parameter_groups(model: nn.Module, weight_decay: float, outside: float = 1.0) -> list[dict[str, object]]:
    """Return groups with a weight decay and a `scale` of the learning rate: 1 in the blocks, `outside` elsewhere.

    Only matrices that multiply tokens decay; embeddings, convolution, gains, biases and routing vectors don't.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        no_decay = parameter.dim() < 2 or name.startswith(("embedding", "neighbours")) or "router" in name
        scale = 1.0 if name.startswith("blocks.") else outside
        groups.setdefault((scale, 0.0 if no_decay else weight_decay), []).append(parameter)
    return [{"params": params, "scale": scale, "weight_decay": decay} for (scale, decay), params in groups.items()]


def pick_device(wanted: str | None) -> str:
    """Return cuda if there is one and `wanted` is not cpu, else cpu; raise UserError if a wanted cuda is absent."""
    cuda = torch.cuda.is_available()
    if wanted == "cuda" and not cuda:
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return "cuda" if cuda and wanted != "cpu" else "cpu"

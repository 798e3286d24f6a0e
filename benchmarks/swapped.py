"""What `onepass.swap` does for a training step of a Llama, a GPT-2 and a ViT of transformers, in bf16.

    python benchmarks/swapped.py --json benchmarks/results/h200/raw/swapped.json

Each model is built from a configuration with random weights, as it is and with its norms exchanged. First loss and
gradients of one step are compared with those of the model as it is and with fp32; then forward and backward are timed
in eager and compiled programs, as `onepass bench program` does it. About three minutes on an H200, most of them for the
compiler; the file is written after each measurement.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import onepass
from onepass.bench import records
from onepass.bench.program import measure
from onepass.bench.programs import Program
from onepass.core.about import device_name, settings, versions

WAYS = ("as it is", "swapped")
VOCABULARY, CLASSES = 32000, 1000


class Model(NamedTuple):
    """A model by its configuration, and a batch for it."""

    name: str
    case: str
    build: Callable[[], nn.Module]
    batch: Callable[[str], Tensor]  # on a device


class Loss(nn.Module):
    """A model as a module of its batch: returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.is_text = isinstance(model, (transformers.LlamaForCausalLM, transformers.GPT2LMHeadModel))

    def forward(self, batch: Tensor) -> Tensor:
        if self.is_text:
            return self.model(input_ids=batch, labels=batch, use_cache=False).loss  # type: ignore[no-any-return]
        labels = torch.arange(len(batch), device=batch.device) % CLASSES
        return self.model(pixel_values=batch, labels=labels).loss  # type: ignore[no-any-return]


def models(small: bool) -> Iterator[Model]:
    """Yield the three models; dropout is off, so that ways can be compared."""
    dim, layers, heads = (64, 2, 4) if small else (1536, 8, 12)
    tokens = (2, 64) if small else (4, 2048)

    def text(device: str) -> Tensor:
        generator = torch.Generator(device).manual_seed(1)
        return torch.randint(0, VOCABULARY, tokens, device=device, generator=generator)

    def llama() -> nn.Module:
        config = transformers.LlamaConfig(
            hidden_size=dim, intermediate_size=4 * dim, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads // 4, vocab_size=VOCABULARY, max_position_embeddings=tokens[1],
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]

    yield Model("Llama", f"{layers} layers, d {dim}, {tokens[0]} x {tokens[1]} tokens", llama, text)
    dim, layers, heads = (64, 2, 4) if small else (1024, 12, 16)

    def gpt2() -> nn.Module:
        config = transformers.GPT2Config(
            n_embd=dim, n_layer=layers, n_head=heads, n_positions=tokens[1], vocab_size=VOCABULARY,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]

    yield Model("GPT-2", f"{layers} layers, d {dim}, {tokens[0]} x {tokens[1]} tokens", gpt2, text)
    images, side = (2, 32) if small else (64, 224)

    def pixels(device: str) -> Tensor:
        generator = torch.Generator(device).manual_seed(1)
        return torch.randn(images, 3, side, side, device=device, generator=generator).bfloat16()

    def vit() -> nn.Module:
        config = transformers.ViTConfig(
            hidden_size=dim, intermediate_size=4 * dim, num_hidden_layers=layers, num_attention_heads=heads,
            image_size=side, num_labels=CLASSES,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]

    yield Model("ViT", f"{layers} layers, d {dim}, {images} images of {side} x {side}", vit, pixels)


def build(model: Model, device: str, way: str) -> nn.Module:
    """Return the model in bf16 on the device in training mode, with the same weights whatever the way."""
    torch.manual_seed(0)
    with torch.device(device):
        made = model.build().to(torch.bfloat16).train()
    if way != "as it is":
        report = onepass.swap(made)
        print(f"{model.name}, {way}:\n{report}\n")
    return Loss(made)


def step(loss: nn.Module, batch: Tensor) -> tuple[float, list[Tensor]]:
    """Return the loss and the gradients of one step."""
    found = loss(batch)
    return float(found.detach()), list(torch.autograd.grad(found, list(loss.parameters())))


def apart(a: list[Tensor], b: list[Tensor]) -> float:
    """Return |a − b| / |b| over all tensors together."""
    error = sum(float((x.float() - y.float()).square().sum()) for x, y in zip(a, b, strict=True))
    return float(error / sum(float(y.float().square().sum()) for y in b)) ** 0.5


def check(model: Model, device: str) -> Iterator[dict[str, Any]]:
    """Yield how far loss and gradients of each way are from the model as it is, and from the same weights in fp32."""
    batch = model.batch(device)
    plain = build(model, device, "as it is")
    wide = copy.deepcopy(plain).float()
    wide_loss, wide_gradients = step(wide, batch if batch.dtype == torch.int64 else batch.float())
    del wide
    base_loss, base = step(plain, batch)
    for way in WAYS:
        loss, gradients = step(build(model, device, way), batch)
        yield {
            "check": True, "model": model.name, "case": model.case, "way": way, "loss": loss,
            "loss_as_it_is": base_loss, "loss_fp32": wide_loss, "gradients_from_as_it_is": apart(gradients, base),
            "gradients_from_fp32": apart(gradients, wide_gradients),
            "finite": all(bool(torch.isfinite(g).all()) for g in gradients),
        }  # fmt: skip


def main() -> None:
    """Run the checks, then the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where records go")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=15, help="steps that are timed")
    parser.add_argument("--model", choices=["Llama", "GPT-2", "ViT"], nargs="*", help="these alone")
    parser.add_argument("--mode", choices=["eager", "compiled"], nargs="*", default=["eager", "compiled"])
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    chosen = [m for m in models(args.device == "cpu") if not args.model or m.name in args.model]
    header = {
        "header": True, **versions(), "transformers": transformers.__version__, "device": args.device,
        "gpu": device_name(torch.device(args.device)), "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "settings": settings(),
    }  # fmt: skip
    found: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        found.append(record)
        print(record, flush=True)
        if args.json is not None:
            records.write(args.json, [header, *found])
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()

    for model in chosen:
        for record in check(model, args.device):
            keep(record)
    for mode in args.mode:
        for model in chosen:
            for way in WAYS:
                base = None if way == "as it is" else f"{model.name}, as it is"
                made = partial(build, model, way=way)
                program = Program(f"{model.name}, {way}", model.case, made, model.batch, autocast=False, base=base)
                keep(measure(program, args.device, mode, args.calls))


if __name__ == "__main__":
    main()

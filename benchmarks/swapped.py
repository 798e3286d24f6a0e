"""What `onepass.swap` does for a training step of Llama 3.2 1B, a GPT-2 and a ViT of transformers, in bf16.

    python -m benchmarks.swapped --json benchmarks/results/h200/raw/swapped.json

Each model is built from a configuration with random weights, as it is and with its norms exchanged; the Llama also with
Liger's norms, and with all that Liger exchanges (rotary, SwiGLU, loss) if it is installed. Loss and gradients of one
step are compared with those of the model as it is and with fp32, and forward and backward are timed in eager and
compiled programs. About three minutes on an H200, most of them for the
compiler; the file is written after each measurement.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import gc
import importlib.util
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import onepass
from benchmarks.bench import records
from benchmarks.bench.program import measure
from benchmarks.bench.programs import Program
from onepass.core.about import device_name, settings, versions

# Liger patches whole modules, so its ways come last
WAYS = ("as it is", "swapped", "Liger's norms", "Liger")
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
    tokens = (2, 64) if small else (1, 4096)

    def text(device: str) -> Tensor:
        generator = torch.Generator(device).manual_seed(1)
        return torch.randint(0, VOCABULARY, tokens, device=device, generator=generator)

    def llama() -> nn.Module:
        # the published configuration of Llama 3.2 1B
        size = (64, 256, 2, 4, 2, VOCABULARY) if small else (2048, 8192, 16, 32, 8, 128256)
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        config = transformers.LlamaConfig(
            **dict(zip((*names, "vocab_size"), size, strict=True)), rms_norm_eps=1e-5,
            max_position_embeddings=tokens[1], tie_word_embeddings=True, head_dim=size[0] // size[3],
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]

    yield Model("Llama 3.2 1B" if not small else "Llama", f"{tokens[0]} x {tokens[1]} tokens", llama, text)
    tokens = (2, 64) if small else (4, 2048)
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


def ways(model: Model) -> tuple[str, ...]:
    """Return what the model is measured as."""
    liger = "Llama" in model.name and importlib.util.find_spec("liger_kernel") is not None
    return WAYS if liger else WAYS[:2]


def build(model: Model, device: str, way: str) -> nn.Module:
    """Return the model in bf16 on the device in training mode, with the same weights whatever the way."""
    torch.manual_seed(0)
    with torch.device(device):
        made = model.build().to(torch.bfloat16).train()
    if way.startswith("Liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        rest = {} if way == "Liger" else dict.fromkeys(("rope", "swiglu", "fused_linear_cross_entropy"), False)
        apply_liger_kernel_to_llama(rms_norm=True, model=made, **rest)
    elif way != "as it is":
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


class Reference(NamedTuple):
    """Loss and gradients of a model as it is, in bf16 and with the same weights in fp32; gradients on the CPU."""

    loss: float
    gradients: list[Tensor]
    wide_loss: float
    wide_gradients: list[Tensor]


def reference(model: Model, device: str) -> Reference:
    """Return what the model as it is gives; nothing may be patched yet."""
    batch, plain = model.batch(device), build(model, device, "as it is")
    loss, gradients = step(plain, batch)
    wide = step(plain.float(), batch if batch.dtype == torch.int64 else batch.float())
    return Reference(loss, [g.cpu() for g in gradients], wide[0], [g.cpu() for g in wide[1]])


def check(model: Model, device: str, way: str, base: Reference) -> dict[str, Any]:
    """Return how far loss and gradients of this way are from the model as it is, and from the same weights in fp32."""
    loss, gradients = step(build(model, device, way), model.batch(device))
    gradients = [g.cpu() for g in gradients]
    return {
        "check": True, "model": model.name, "case": model.case, "way": way, "loss": loss, "loss_as_it_is": base.loss,
        "loss_fp32": base.wide_loss, "gradients_from_as_it_is": apart(gradients, base.gradients),
        "gradients_from_fp32": apart(gradients, base.wide_gradients),
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
    chosen = [m for m in models(args.device == "cpu") if not args.model or m.name.partition(" ")[0] in args.model]
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

    # way by way, Liger last: what it patches stays patched in this process
    references = {model.name: reference(model, args.device) for model in chosen}
    for way in WAYS:
        for model in (m for m in chosen if way in ways(m)):
            keep(check(model, args.device, way, references[model.name]))
            base = None if way == "as it is" else f"{model.name}, as it is"
            made = partial(build, model, way=way)
            program = Program(f"{model.name}, {way}", model.case, made, model.batch, autocast=False, base=base)
            for mode in args.mode:
                keep(measure(program, args.device, mode, args.calls))


if __name__ == "__main__":
    main()

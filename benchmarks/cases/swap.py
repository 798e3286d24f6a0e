"""A training step of Llama 3.2 1B of transformers with random weights: as it is, swapped, with Liger's norms.

Loss and gradients of the first layer are compared with those of the model as it is, in fp32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Definition, Impl, Prepared
from onepass.swapping import swap

RIVALS = {"transformers": "transformers", "liger_kernel": "liger-kernel"}
# width, feed-forward, layers, heads, key and value heads, vocabulary
LLAMA, SMALL = (2048, 8192, 16, 32, 8, 128256), (64, 256, 2, 4, 2, 512)
NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"
)  # fmt: skip


def _model(sizes: tuple[int, ...], way: str, device: str, dtype: torch.dtype) -> Any:
    """Return the model, with the same weights whatever the way."""
    llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(**dict(zip(NAMES, sizes, strict=True)), tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(device):
        model = llama.LlamaForCausalLM(config).bfloat16().to(dtype).train()
    if way == "onepass":
        swap(model)
    elif way == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        plain = llama.LlamaRMSNorm
        rest = dict.fromkeys(("rope", "swiglu", "fused_linear_cross_entropy"), False)
        apply_liger_kernel_to_llama(rms_norm=True, model=model, **rest)
        llama.LlamaRMSNorm = plain  # it also exchanges the class, for models to come
    return model


def _compared(results: list[Tensor]) -> list[Tensor]:
    """Return the loss and the gradients of the first layer, after those of the embedding, as one tensor."""
    return [results[0].float()[None], torch.cat([g.flatten().float() for g in results[2:11]])]


def _case(compiled: bool, sizes: tuple[int, ...], tokens: int, device: str = "cuda") -> Case:
    def make() -> Mapping[str, Impl]:
        batch = torch.randint(0, min(32000, sizes[-1]), (1, tokens), device=device)

        def build(way: str, dtype: torch.dtype = torch.bfloat16) -> Callable[[], Any]:
            model = _model(sizes, way, device, dtype)
            run = torch.compile(model) if compiled and dtype == torch.bfloat16 else model
            leaves = list(model.parameters())

            def call() -> list[Tensor]:
                loss = run(input_ids=batch, labels=batch, use_cache=False).loss
                return [loss.detach(), *torch.autograd.grad(loss, leaves)]

            return call

        mode = ", torch.compile" if compiled else ""
        impls: dict[str, Impl] = {
            "definition": Definition(lambda: _compared(build("as it is", torch.float32)())),
            "onepass": Prepared(lambda: build("onepass"), _compared),
            f"as it is{mode}": Prepared(lambda: build("as it is"), _compared),
        }
        if device == "cuda" and not compiled:
            impls["liger"] = Prepared(lambda: build("liger"), _compared)
        return impls

    d, hidden, layers, heads, kv, vocabulary = sizes
    weights = vocabulary * d + layers * (2 * d * d + 2 * d * d // heads * kv + 3 * d * hidden)
    params = {"model": "Llama", "dim": d, "layers": layers, "tokens": tokens} | (
        {"mode": "compiled"} if compiled else {}
    )
    return Case("swap", "forward+backward", params, torch.bfloat16, 4 * weights, make, 0.1, device)


CASES = [_case(False, LLAMA, 4096), _case(True, LLAMA, 4096), _case(False, SMALL, 64, "cpu")]

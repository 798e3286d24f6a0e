"""`onepass.swap` on models of transformers, built from small configurations with random weights."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import swap

transformers = pytest.importorskip("transformers")
# transformers documents neither the names of its classes and attributes nor the bits of its forwards
pytestmark = pytest.mark.peer

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
TWICE = "RMSNorm(rounding='twice')"
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# class of the model, of its configuration, options, class of its norms, how many, ours
MODELS: dict[str, tuple[str, str, dict[str, Any], str, int, str]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, "LlamaRMSNorm", 5, TWICE),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER, "Qwen2RMSNorm", 5, TWICE),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}, "Qwen3RMSNorm", 9, TWICE),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 8}, "GemmaRMSNorm", 5, "RMSNorm(offset=1)"),
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, "vocab_size": 64}, "LayerNorm", 6, "LayerNorm"),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SIZES, "image_size": 16, "patch_size": 4}, "LayerNorm", 5,
            "LayerNorm"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, "LayerNorm",
             5, "LayerNorm"),
}  # fmt: skip
FP32 = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@functools.cache
def built(name: str) -> nn.Module:
    cls, config, options, *_ = MODELS[name]
    special = {} if name == "vit" else SPECIAL
    model = getattr(transformers, cls)(getattr(transformers, config)(**options, **special)).eval()
    with torch.no_grad():
        for m in model.modules():
            if "norm" in type(m).__name__.lower():
                for p in m.parameters(recurse=False):
                    p.add_(torch.rand_like(p) - 0.5)
    return model


def build(name: str) -> nn.Module:
    """The model in eval mode; its norms' weights and biases are random, as after training."""
    return copy.deepcopy(built(name))


def inputs(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64).to(dtype)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 64, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids}


def same_gradients(ours: nn.Module, theirs: nn.Module) -> int:
    """Compare them; return how many there are."""
    compared = 0
    for (key, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), key
        if a.grad is not None and b.grad is not None:
            compared += 1
            atol = 64 * 30 * FP32 * max(1.0, float(b.grad.abs().max()))
            torch.testing.assert_close(a.grad, b.grad, rtol=0.0, atol=atol, msg=key)
    return compared


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name: str) -> None:
    """In fp32, within the rounding of two layers: the longest sum has 64 numbers, and there are some thirty of them."""
    theirs = build(name)
    ours = copy.deepcopy(theirs)
    *_, kind, count, becomes = MODELS[name]
    report = swap(ours, strict=True)
    found = [(layer.kind.rpartition(".")[2], layer.becomes) for layer in report.layers]
    assert found == [(kind, f"onepass.nn.{becomes}")] * count
    batch = inputs(name)
    results = [model(**batch) for model in (ours, theirs)]
    torch.testing.assert_close(results[0].logits, results[1].logits, rtol=0.0, atol=64 * 30 * FP32)
    for result in results:
        result.loss.backward()
    same_gradients(ours, theirs)
    report.undo()
    assert torch.equal(ours(**batch).logits, results[1].logits)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]


@pytest.mark.parametrize("name", ["llama", "gemma", "bert"])
@pytest.mark.parametrize("first", ["swap", "lora"])
def test_lora(name: str, first: str, tmp_path) -> None:
    """Adapters go on before or after; the norms that peft copies to train them are exchanged too."""
    peft = pytest.importorskip("peft")
    base = build(name)
    linear, norm = {"bert": (["query"], "LayerNorm")}.get(name, (["q_proj", "v_proj"], "norm"))
    config = peft.LoraConfig(r=2, target_modules=linear, modules_to_save=[norm] if name == "llama" else None,
                             init_lora_weights=False)  # fmt: skip
    twin = peft.get_peft_model(copy.deepcopy(base), config)
    if first == "swap":
        report = swap(base, strict=True)
        model = peft.get_peft_model(base, config)
    else:
        model = peft.get_peft_model(base, config)
        report = swap(model, strict=True)
    model.load_state_dict(twin.state_dict())
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        n for n, p in twin.named_parameters() if p.requires_grad
    ]
    batch = inputs(name)
    a, b = model.eval()(**batch), twin.eval()(**batch)
    torch.testing.assert_close(a.logits, b.logits, rtol=0.0, atol=64 * 30 * FP32)
    a.loss.backward()
    b.loss.backward()
    assert same_gradients(model, twin) >= 4
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build(name), tmp_path)
    mine, theirs = (peft.get_peft_model_state_dict(m) for m in (loaded, twin))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    report.undo()


def t5() -> nn.Module:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=64, **SPECIAL)
    return transformers.T5ForConditionalGeneration(config).eval()


def test_t5_and_others_by_what_they_compute() -> None:
    """T5's LayerNorm is an RMS norm; a layer norm with channels first, and a gated norm, are left alone."""
    found = {(layer.kind.rpartition(".")[2], layer.becomes) for layer in swap(t5(), strict=True).layers}
    assert found == {("T5LayerNorm", f"onepass.nn.{TWICE}")}
    convnext = transformers.ConvNextModel(
        transformers.ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], patch_size=2)
    )
    report = swap(convnext)
    for layer in report.layers:
        first = getattr(convnext.get_submodule(layer.names[0]), "data_format", "") == "channels_first"
        assert first == (not layer.becomes)
        assert first == ("its forward raises on random input in float32: RuntimeError: " in layer.reason)
    assert report.exchanged
    assert report.left_alone


def test_the_example_of_the_page(capsys) -> None:
    """docs/norms.md: the code above its report prints it."""
    page = (Path(__file__).parents[2] / "docs" / "norms.md").read_text()
    ((code, printed),) = re.findall(r"^```python\n(.*?)^```\n```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, "docs/norms.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_mixed_dtypes() -> None:
    """Weight and input of two dtypes: the result has the dtype and the bits of transformers'; fp64 rounds x less."""
    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    for name in ("llama", "gemma", "t5"):
        for of_x, of_weight in ((bf16, fp32), (fp32, bf16), (fp32, fp64), (bf16, fp64)):
            norm = t5().encoder.final_layer_norm if name == "t5" else build(name).model.norm
            norm.to(of_weight)
            x = torch.randn(2, 32).to(of_x)
            want = norm(x)
            swap(norm, strict=True)
            assert norm(x).dtype == want.dtype
            rtol = 4 * torch.finfo(of_x).eps if of_weight == fp64 else torch.finfo(want.dtype).eps
            torch.testing.assert_close(norm(x), want, rtol=rtol, atol=0.0)
    with pytest.raises(TypeError, match="hidden_states"):
        norm(hidden_states=x)

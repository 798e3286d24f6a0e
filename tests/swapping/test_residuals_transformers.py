"""`onepass.swap(residuals=True)` on models of transformers, built from small configurations with random weights."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import onepass
from onepass import swap
from swapping.test_swap_transformers import FP32, MODELS, build, inputs

transformers = pytest.importorskip("transformers")

# class of the layers that add, and the norm that does
LAYERS = {
    "llama": {"LlamaDecoderLayer": "post_attention_layernorm"},
    "qwen2": {"Qwen2DecoderLayer": "post_attention_layernorm"},
    "qwen3": {"Qwen3DecoderLayer": "post_attention_layernorm"},
    "gemma": {"GemmaDecoderLayer": "post_attention_layernorm"},
    "bert": {"BertSelfOutput": "LayerNorm", "BertOutput": "LayerNorm"},
    "vit": {"ViTLayer": "layernorm_after"},
    "gpt2": {"GPT2Block": "ln_2"},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """The model with its norms exchanged, and a copy with its additions fused as well."""
    plain = build(name).to(dtype)
    fused = copy.deepcopy(plain)
    swap(plain, strict=True)
    swap(fused, strict=True, residuals=True)
    return plain, fused


def fused_layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(type(m), "_onepass_class")]


def compare_gradients(a: nn.Module, b: nn.Module) -> None:
    """In fp32: the longest sum has 64 numbers, and there are some thirty of them."""
    compared = 0
    for (key, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), key
        if p.grad is not None and q.grad is not None:
            compared += 1
            atol = 64 * 30 * FP32 * max(1.0, float(q.grad.abs().max()))
            torch.testing.assert_close(p.grad, q.grad, rtol=0.0, atol=atol, msg=key)
    assert compared


@pytest.mark.parametrize("name", MODELS)
def test_report_and_way_back(name: str) -> None:
    model = build(name)
    kinds = [type(m) for m in model.modules()]
    keys = list(model.state_dict())
    report = swap(model, residuals=True, strict=True)
    found = {(layer.kind, layer.becomes) for layer in report.exchanged if "sums in" in layer.becomes}
    assert found == {(kind, f"{kind}(sums in {norm})") for kind, norm in LAYERS[name].items()}
    assert len(fused_layers(model)) == 2 * len(LAYERS[name])
    assert list(model.state_dict()) == keys
    report.undo()
    assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name: str, dtype: torch.dtype, training: bool) -> None:
    """Logits and loss have the same bits, with dropout too; the gradient of a sum is rounded once instead of twice."""
    plain, fused = pair(name, dtype)
    results = []
    for model in (plain, fused):
        torch.manual_seed(1)
        result = model.train(training)(**inputs(name, dtype))
        result.loss.backward()
        results.append(result)
    assert torch.equal(results[0].logits, results[1].logits)
    assert torch.equal(results[0].loss, results[1].loss)
    if dtype == torch.float32:
        compare_gradients(fused, plain)


@pytest.mark.parametrize("name", MODELS)
def test_the_closer_gradient(name: str) -> None:
    """In bf16 the gradients of all parameters together are as far from fp32's as those of a call without residuals."""
    plain, fused = pair(name, torch.bfloat16)
    wide = copy.deepcopy(plain).float()
    for model, dtype in ((plain, torch.bfloat16), (fused, torch.bfloat16), (wide, torch.float32)):
        model(**inputs(name, dtype)).loss.backward()
    errors = []
    for model in (plain, fused):
        pairs = [(p.grad.float(), q.grad) for p, q in zip(model.parameters(), wide.parameters(), strict=True)
                 if p.grad is not None and q.grad is not None]  # fmt: skip
        errors.append(sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5)
    # both are sums of many random roundings; a wrong gradient is farther off by orders
    assert errors[1] <= 1.25 * errors[0]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "vit"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    """The layer's own class saves no activations; the exchanged one neither, and its modules run again in backward."""
    plain, fused = pair(name)
    calls = [0, 0]
    for i, model in enumerate((plain, fused)):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        norms = [m for m in model.modules() if isinstance(m, (onepass.nn.LayerNorm, onepass.nn.RMSNorm))]

        def count(m: nn.Module, args: object, i: int = i) -> None:
            calls[i] += 1

        for layer in [m for m in model.modules() if type(m).__name__ in LAYERS[name]]:
            next(m for m in layer.modules() if isinstance(m, nn.Linear) or "Conv1D" in type(m).__name__
                 ).register_forward_pre_hook(count)  # fmt: skip
        assert norms
        torch.manual_seed(1)
        model(**inputs(name)).loss.backward()
    assert calls == [4, 4]
    compare_gradients(fused, plain)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma", "gpt2"])
def test_generate(name: str) -> None:
    plain, fused = pair(name)
    prompt = inputs(name)["input_ids"][:, :4]
    for options in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 2}):
        tokens = []
        for model in (plain, fused):
            torch.manual_seed(3)
            tokens.append(model.generate(prompt, max_new_tokens=8, pad_token_id=0, eos_token_id=None, **options))
        assert torch.equal(*tokens)


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_attentions(name: str) -> None:
    """What transformers collects with hooks on layers and attentions."""
    plain, fused = pair(name)
    for model in (plain, fused):
        model.set_attn_implementation("eager")
    options = {"output_hidden_states": True, "output_attentions": True}
    a, b = (model(**inputs(name), **options) for model in (plain, fused))
    assert len(a.hidden_states) == len(b.hidden_states) == 3
    assert len(a.attentions) == len(b.attentions) == 2
    for mine, theirs in zip((*a.hidden_states, *a.attentions), (*b.hidden_states, *b.attentions), strict=True):
        assert torch.equal(mine, theirs)


def test_cross_attention_of_gpt2() -> None:
    """With an encoder's states a GPT-2 block does more; it runs its own forward then."""
    name, config, options, *_ = MODELS["gpt2"]
    model = getattr(transformers, name)(getattr(transformers, config)(**options, add_cross_attention=True)).eval()
    batch = {**inputs("gpt2"), "encoder_hidden_states": torch.randn(2, 5, 32)}
    with swap(model, strict=True):
        want = [model(**batch).logits, model(**inputs("gpt2")).logits]
    swap(model, strict=True, residuals=True)
    assert len(fused_layers(model)) == 2
    assert torch.equal(model(**batch).logits, want[0])
    assert torch.equal(model(**inputs("gpt2")).logits, want[1])


@pytest.mark.parametrize("name", MODELS)
def test_save_and_load(name: str, tmp_path) -> None:
    model = build(name)
    want = model(**inputs(name)).logits
    swap(model, strict=True, residuals=True)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert not fused_layers(loaded)
    assert torch.equal(loaded(**inputs(name)).logits, want)
    swap(loaded, strict=True, residuals=True)
    assert torch.equal(loaded(**inputs(name)).logits, model(**inputs(name)).logits)


@pytest.mark.parametrize("name", ["llama", "gemma", "bert"])
@pytest.mark.parametrize("first", ["swap", "lora"])
def test_lora(name: str, first: str) -> None:
    """Adapters before or after, also around the norm that adds."""
    peft = pytest.importorskip("peft")
    linear, norm = {"bert": (["query"], "LayerNorm")}.get(name, (["q_proj", "down_proj"], "post_attention_layernorm"))
    linear = ["q_proj", "mlp.up_proj"] if name == "llama" else linear
    config = peft.LoraConfig(r=2, target_modules=linear, modules_to_save=[norm] if name == "llama" else None,
                             init_lora_weights=False)  # fmt: skip
    base = build(name)
    plain = peft.get_peft_model(copy.deepcopy(base), config)
    swap(plain, strict=True)
    if first == "swap":
        swap(base, strict=True, residuals=True)
        model = peft.get_peft_model(base, config)
    else:
        model = peft.get_peft_model(base, config)
        swap(model, strict=True, residuals=True)
    model.load_state_dict(plain.state_dict())
    results: list[Tensor] = []
    for m in (model.eval(), plain.eval()):
        result = m(**inputs(name))
        result.loss.backward()
        results.append(result.logits)
    assert torch.equal(*results)
    compare_gradients(model, plain)


@pytest.mark.parametrize("name", MODELS)
def test_compiled(name: str) -> None:
    """One graph where the model without fused additions is one, with the same numbers."""
    plain, fused = pair(name)
    batch = inputs(name)
    graphs = []
    for model in (plain, fused):
        torch._dynamo.reset()
        counter = CompileCounter()
        torch.testing.assert_close(torch.compile(model, backend=counter)(**batch).logits, plain(**batch).logits)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Logits have the bits of a call without residuals; gradients are as close."""
    plain, fused = (model.cuda() for model in pair(name, dtype))
    batch = {key: value.cuda() for key, value in inputs(name, dtype).items()}
    results = []
    for model in (plain, fused):
        result = model(**batch)
        result.loss.backward()
        results.append(result.logits)
    assert torch.equal(*results)
    if dtype == torch.float32:
        compare_gradients(fused, plain)


# docs/swap.md names them: model, layer, the norms that add; none where the layer is left alone
OTHERS = [
    ("mistral", "MistralDecoderLayer", ["post_attention_layernorm"]),
    ("mixtral", "MixtralDecoderLayer", ["post_attention_layernorm"]),
    ("qwen3_moe", "Qwen3MoeDecoderLayer", ["post_attention_layernorm"]),
    ("gemma2", "Gemma2DecoderLayer", ["pre_feedforward_layernorm"]),
    ("gemma3", "Gemma3DecoderLayer", ["pre_feedforward_layernorm"]),
    ("phi3", "Phi3DecoderLayer", ["post_attention_layernorm"]),
    ("smollm3", "SmolLM3DecoderLayer", ["post_attention_layernorm"]),
    ("deepseek_v3", "DeepseekV3DecoderLayer", ["post_attention_layernorm"]),
    ("glm4", "Glm4DecoderLayer", ["post_attention_layernorm"]),
    ("starcoder2", "Starcoder2DecoderLayer", ["post_attention_layernorm"]),
    ("gpt_oss", "GptOssDecoderLayer", ["post_attention_layernorm"]),
    ("helium", "HeliumDecoderLayer", ["post_attention_layernorm"]),
    ("modernbert", "ModernBertEncoderLayer", ["mlp_norm"]),
    ("deit", "DeiTLayer", ["layernorm_after"]),
    ("dinov2", "Dinov2Layer", ["norm2"]),
    ("clip", "CLIPEncoderLayer", ["layer_norm2"]),
    ("siglip", "SiglipEncoderLayer", ["layer_norm2"]),
    ("granite", "GraniteDecoderLayer", []),
    ("whisper", "WhisperEncoderLayer", []),
    ("bart", "BartEncoderLayer", []),
    ("opt", "OPTDecoderLayer", []),
    ("bloom", "BloomBlock", []),
    ("cohere", "CohereDecoderLayer", []),
    ("phi", "PhiDecoderLayer", []),
    ("olmo2", "Olmo2DecoderLayer", []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind", "norms"), OTHERS)
def test_layers_of_other_models(model: str, kind: str, norms: list[str]) -> None:
    """One layer by itself, from its default configuration, on the meta device."""
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    configs = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    layer = None
    for config in vars(configs).values():
        if not isinstance(config, type) or not config.__name__.endswith("Config"):
            continue
        for index in ((), (0,)):
            with contextlib.suppress(Exception), torch.device("meta"):
                layer = layer or getattr(modeling, kind)(config(), *index)
    assert layer is not None
    line = next(x for x in swap(layer, residuals=True).layers if x.kind == kind)
    assert line.becomes == (f"{kind}(sums in {', '.join(norms)})" if norms else ""), line.reason

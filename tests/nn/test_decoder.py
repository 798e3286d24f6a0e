"""`Decoder`: tokens and logits of the full forward, draws of given probabilities, graphs that are never out of date."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass.core.launch import INTERPRET
from onepass.nn import Decoder, RoutedBlock, TransformerBlock

DIM, WINDOW, VOCABULARY = 16, 8, 64
pytestmark = pytest.mark.skipif(INTERPRET, reason="steps run no kernel of their own")


class Codes(Tensor):
    """A weight as torchao's and bitsandbytes': it knows products and `to` alone, and its dtype may be that of codes."""

    own: Any
    __tensor_flatten__ = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return func(*(getattr(a, "own", a) for a in args))
        assert func in (Tensor.to, Tensor.is_floating_point) or func.__name__ == "__get__", func
        return args[0] if func is Tensor.to else super().__torch_function__(func, types, args, kwargs or {})


class Model(nn.Module):
    def __init__(self, device: str = "cpu", kind: str = "routed", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        blocks: list[nn.Module] = [
            TransformerBlock(DIM, dim_head=8, window=window, causal=True, num_experts=experts, **options)
            for window, experts in ((WINDOW, 0), (None, 0), (2 * WINDOW, 4)) if kind != "routed"
        ]  # fmt: skip
        if kind != "transformer":
            blocks += [
                RoutedBlock(DIM, 1 / 4, heads=2, dim_head=8, window=window, causal=True, **options)
                for window in (WINDOW, 2 * WINDOW)
            ]
        self.blocks = nn.ModuleList(blocks)
        # graphs repeat the kernels, which compute in fp32
        self.to(device, torch.float64 if device == "cpu" else torch.float32).eval()
        codes = {"torchao": torch.float64, "bitsandbytes": torch.int8}.get(kind)
        for m in [m for m in self.blocks.modules() if codes and isinstance(m, nn.Linear)]:
            own, m._parameters["weight"] = m.weight, torch.empty_like(m.weight, dtype=codes).as_subclass(Codes)
            m.weight.own, m.__class__ = own, type(m) if kind == "torchao" else type("Linear4bit", (nn.Linear,), {})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def decoder(self, batch: int = 3, max_tokens: int = 60, **options: Any) -> Decoder:
        with torch.device("meta"):  # Decoder computes where its blocks are
            return Decoder(self.blocks, self.embedding, self.head, batch=batch, max_tokens=max_tokens, **options)


def _prompt(batch: int = 3, n: int = 60, device: str = "cpu") -> Tensor:
    return torch.randint(VOCABULARY, (batch, n), generator=torch.Generator().manual_seed(1)).to(device)


def _near(device: str) -> dict[str, float]:
    tolerance = 1e-9 if device == "cpu" else 1e-4
    return {"rtol": tolerance, "atol": tolerance}


LENGTHS = [20, WINDOW, 13]


def _steps_are_the_full_forward(model: Model, decoder: Decoder, device: str) -> None:
    """After prompts of unequal lengths."""
    x = _prompt(device=device)
    logits = [decoder.prefill(x[:, :20], LENGTHS).clone()]
    for i in range(40):
        logits.append(decoder.step(torch.stack([x[row, n + i] for row, n in enumerate(LENGTHS)])).clone())
    for row, n in enumerate(LENGTHS):
        expected = model(x[row : row + 1, : n + 40])[0, n - 1 :]
        torch.testing.assert_close(torch.stack([y[row] for y in logits]), expected, **_near(device))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["routed", "transformer", "both"])
def test_steps_equal_the_full_forward(device: str, kind: str) -> None:
    """Twice with the same decoder: nothing of the first prompt is left."""
    model = Model(device, kind)
    decoder = model.decoder()
    for _ in range(2):
        _steps_are_the_full_forward(model, decoder, device)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["routed", "transformer", "both", "torchao", "bitsandbytes"])
def test_what_graphs_repeat_equals_the_full_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph knows of the host's counts only whether some sequence begins a window."""
    model = Model(kind=kind)
    decoder = model.decoder()
    step = decoder._step

    def repeated() -> None:
        decoder.clock.forced = decoder.clock.any_turns()
        step()
        decoder.clock.forced = None

    monkeypatch.setattr(decoder, "_step", repeated)
    _steps_are_the_full_forward(model, decoder, "cpu")


@torch.no_grad()
def test_the_likeliest_tokens_until_each_sequence_stops(device: str) -> None:
    model, x = Model(device), _prompt(device=device)[:, :20]
    free = model.decoder(temperature=0).generate(x, 30, LENGTHS)
    for row, n in enumerate(LENGTHS):
        tokens = x[row, :n]
        for token in free[row]:
            assert token == model(tokens[None])[0, -1].argmax()
            tokens = torch.cat((tokens, token[None]))
    stop = int(free[1, 4])
    cut = model.decoder(temperature=0, stop=stop).generate(x, 30, LENGTHS)
    for found, expected in zip(cut.tolist(), free.tolist(), strict=True):
        end = expected.index(stop) if stop in expected else len(expected)
        assert found == expected[:end] + [stop] * (len(expected) - end)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.3}]
)
def test_draws_have_the_models_probabilities(options: dict[str, Any]) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    likely, order = (logits / options.get("temperature", 1)).softmax(0).sort(descending=True)
    likely[options.get("top_k", VOCABULARY) :] = 0
    likely /= likely.sum()
    likely[likely.cumsum(0) - likely >= options.get("top_p", 1)] = 0
    expected = torch.zeros_like(likely).scatter(0, order, likely / likely.sum())
    model = Model()
    nn.init.zeros_(model.head.weight)
    model.head.bias.data.copy_(logits)
    first = model.decoder(4000, 2, **options).generate(torch.zeros(4000, 1, dtype=torch.int64), 1)
    found = torch.bincount(first[:, 0], minlength=VOCABULARY) / 4000
    assert not found[expected == 0].any()
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()


def test_the_seed_decides_the_draws_but_at_the_smallest_temperatures() -> None:
    def texts(count: int, **options: Any) -> Any:
        return Model().decoder(**options).generate(_prompt()[:, :9], count).tolist()

    assert texts(20, seed=1) == texts(20, seed=1) != texts(20, seed=2)
    likeliest = texts(4, temperature=0.0)
    assert all(texts(4, temperature=t) == likeliest for t in (5e-324, 1e-308, 1e-30))


@pytest.mark.parametrize("kind", ["routed", "transformer"])
def test_bytes_kept(kind: str) -> None:
    """Two windows of keys and values, and a share of the rest; of a global block every token."""
    short, long = (Model(kind=kind).decoder(1, n).nbytes for n in (1024, 2048))
    if kind == "routed":
        assert long - short <= 1024 * 2 * 2 * DIM * 8 * 0.51
    else:
        assert (long - short, short) == (1024 * 2 * DIM * 8, (1024 + 2 * WINDOW + 4 * WINDOW) * 2 * DIM * 8)


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temperature": -1}, ValueError, "temperature must be a finite number ≥ 0, got -1"),
    ({"temperature": "1"}, TypeError, "temperature must be a number"),
    ({"top_p": 0}, ValueError, "top_p must be a number in .0, 1."),
    ({"top_k": 0}, ValueError, "top_k must be ≥ 1"), ({"batch": 0}, ValueError, "batch must be ≥ 1"),
    *(({name: wrong}, error, f"Decoder: {name} must be ") for name in ("stop", "seed", "lookback")
      for wrong, error in ((1.5, TypeError), (-1, ValueError))),
    ({"stop": True}, TypeError, "Decoder: stop must be "), ({"stop": VOCABULARY}, ValueError, "Decoder: stop must be "),
]  # fmt: skip
NINE = _prompt()[:, :9]
CALLS: list[tuple[Any, type[Exception], str]] = [
    (lambda d: d.prefill(_prompt(2)), ValueError, r"batch = 3, got \(2, 60\)"),
    (lambda d: d.prefill(NINE, [9, 9]), ValueError, "lengths must be 3 numbers"),
    (lambda d: d.prefill(NINE, [9, 0, 9]), ValueError, "from 1 to n = 9"),
    (lambda d: d.prefill(_prompt(3, 61)), ValueError, "= 60 tokens, got a prompt of 61"),
    (lambda d: d.generate(_prompt()[:, :50], 12), ValueError, "a prompt of 50 and count = 12"),
    *((lambda d, wrong=wrong: d.prefill(wrong), TypeError, "Decoder: prompt must be a tensor of int64")
      for wrong in ([[1]] * 3, torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int32))),
    *((lambda d, m=m: d.prefill(NINE, m), TypeError, "Decoder: lengths must be 3 ints, got ")
      for m in ([1, 2, 3.0], 5, torch.ones(3))),
    (lambda d: d.generate(NINE, 3, 5), TypeError, "Decoder: lengths must be 3 ints, got "),
    (lambda d: d.generate(NINE, 3, [1, 2, "3"]), TypeError, "Decoder: lengths must be 3 ints, got "),
    (lambda d: d.step(torch.zeros(3)), TypeError, "Decoder: tokens must be a tensor of int64"),
    (lambda d: d.step(torch.zeros(2, dtype=torch.int64)), ValueError, r"batch = 3, got \(2,\)"),
    (lambda d: d.step(torch.tensor([1, 2, VOCABULARY])), IndexError, "index out of range"),
    (lambda d: d.prefill(torch.full((3, 2), VOCABULARY)), IndexError, "index out of range"),
    (lambda d: Decoder(d.blocks[0], d.embed, d.head, batch=1, max_tokens=1), TypeError, r"list of .* got \w+Block$"),
    (lambda d: Decoder([nn.ReLU()], d.embed, d.head, batch=1, max_tokens=1), TypeError, r"list of .* got \W*ReLU"),
    (lambda d: Model(dropout=0.1).train().decoder().prefill(NINE), ValueError, r"call eval\(\) on the model"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "match"), OPTIONS)
def test_options_that_are_refused(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Model().decoder(**options)


@torch.no_grad()
def test_what_changed_of_a_decoder_since_a_capture_is_refused() -> None:
    """All attributes that a step reads, before a prompt takes the place of the last one."""
    model = Model()
    for name, value in {
        "temperature": 0.0, "top_k": 1, "top_p": 0.1, "stop": 4, "lookback": 1, "embed": nn.Embedding(VOCABULARY, DIM),
        "head": print, "numbers": torch.zeros(61, 3), "logits": torch.zeros(3, VOCABULARY),
    }.items():  # fmt: skip
        decoder = model.decoder(stop=3, top_k=5, top_p=0.9)
        decoder.prefill(_prompt()[:, :9])
        decoder.graphs, decoder.captured = {True: None}, decoder._settings()
        tokens = decoder.tokens.clone()
        setattr(decoder, name, value)
        with pytest.raises(ValueError, match=rf"Decoder: {name} was .* since the capture"):
            decoder.prefill(_prompt()[:, 9:20])
        assert torch.equal(decoder.tokens, tokens)
    moved = model.decoder()
    moved.graphs, moved.captured = {True: None}, moved._settings()
    moved.caches[1].float()
    with pytest.raises(ValueError, match=r"caches\.1\..* was replaced"):
        moved.step()


def _state(decoder: Decoder) -> list[Any]:
    """All that tokens change."""
    of_caches = [t for _, t in decoder.buffers]
    held = decoder.tokens, decoder.logits, decoder.ended, decoder.failed, decoder.clock.position, *of_caches
    return [decoder.clock.counts, *(t.tolist() for t in held)]


@torch.no_grad()
@pytest.mark.parametrize(("run", "error", "match"), CALLS)
def test_a_refused_call_changes_nothing(run: Any, error: type[Exception], match: str) -> None:
    decoder = Model().decoder()
    decoder.prefill(NINE, torch.tensor([9, 4, 7]))
    before = _state(decoder)
    with pytest.raises(error, match=match):
        run(decoder)
    assert _state(decoder) == before


@torch.no_grad()
def test_a_full_decoder_and_damaged_weights_are_refused() -> None:
    model = Model()
    decoder = model.decoder(max_tokens=9)
    decoder.prefill(NINE)
    before = _state(decoder)
    with pytest.raises(ValueError, match="max_tokens = 9 tokens, got token 10"):
        decoder.step(torch.tensor([1, 2, 3]))
    assert _state(decoder) == before
    decoder.prefill(NINE[:, :8])
    calls = decoder.step, decoder.step, lambda: decoder.prefill(NINE)
    with model.blocks[-1].register_forward_hook(lambda *_: 1 / 0):
        for call, words in zip(calls, ("by zero", "a step raised halfway", "by zero"), strict=True):
            with pytest.raises((ZeroDivisionError, ValueError), match=words):
                call()
    assert decoder.step(NINE[:, 0]).equal(model.decoder().step(NINE[:, 0]))
    nn.init.constant_(model.head.bias, torch.nan)
    with pytest.raises(ValueError, match="logits are not finite"):
        decoder.generate(NINE, 1)


@torch.no_grad()
def test_the_token_that_is_read_stops_a_sequence_not_the_one_that_was_drawn() -> None:
    model = Model()

    def written(row: Tensor, stop: int | None, first: int | None) -> list[int]:
        decoder = model.decoder(1, seed=2, stop=stop)
        decoder.prefill(row)
        drawn = [int(decoder._drawn())]
        for given in (first, *[None] * 9):
            decoder.step(None if given is None else torch.tensor([given]))
            drawn.append(int(decoder._drawn()))
        return drawn

    for row in _prompt(8)[:, None, :20]:
        drawn = written(row, None, None)[0]
        read = (drawn + 1) % VOCABULARY
        text, ended = (written(row, stop, read)[1:] for stop in (None, drawn))
        end = text.index(drawn) if drawn in text else len(text)
        assert ended == text[:end] + [drawn] * (len(text) - end)
        assert written(row, read, read)[1:] == [read] * 10


@pytest.mark.gpu
def test_graphs_see_new_weights_and_refuse_other_ones() -> None:
    model, x = Model("cuda"), _prompt(device="cuda")
    decoder = model.decoder()
    decoder.prefill(x[:, :20])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
        decoder.prefill(x[:, :20])
        torch.testing.assert_close(decoder.step(x[:, 20]), model(x[:, :21])[:, -1], **_near("cuda"))
    model.blocks[0].feed_forward.heavy.register_forward_hook(lambda m, i, y: y * 2)
    with pytest.raises(ValueError, match="_forward_hooks was None, is now"):
        decoder.step()
    # captured with the hook, a graph runs the modules that it is in
    hooked = model.decoder()
    hooked.prefill(x[:, :20])
    with torch.no_grad():
        for i in range(20, 40):
            torch.testing.assert_close(hooked.step(x[:, i]), model(x[:, : i + 1])[:, -1], **_near("cuda"))


@pytest.mark.gpu
def test_both_devices_draw_alike() -> None:
    texts = [
        Model(d).decoder(top_k=9, seed=3).generate(_prompt(device=d)[:, :20], 30).tolist() for d in ("cpu", "cuda")
    ]
    assert texts[0] == texts[1]

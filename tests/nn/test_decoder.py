"""`Decoder`: tokens and logits of the full forward, draws of given probabilities, graphs that are never out of date."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from onepass.core.launch import INTERPRET
from onepass.fused import attention
from onepass.nn import Decoder, RoutedBlock, TransformerBlock, cache
from onepass.ops.span_attention import op

DIM, WINDOW, VOCABULARY = 16, 8, 64
pytestmark = pytest.mark.skipif(INTERPRET, reason="steps run no kernel of their own")


class Model(nn.Module):
    def __init__(self, device: str = "cpu", kind: str = "routed", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        blocks: list[nn.Module] = [
            TransformerBlock(DIM, dim_head=8, window=window, causal=True, **options)
            for window in (WINDOW, None, 2 * WINDOW) if kind != "routed"
        ]  # fmt: skip
        if kind != "transformer":
            blocks += [
                RoutedBlock(DIM, 1 / 4, heads=2, dim_head=8, window=window, causal=True, **options)
                for window in (WINDOW, 2 * WINDOW)
            ]
        self.blocks = nn.ModuleList(blocks)
        # graphs repeat the kernels, which compute in fp32
        self.to(device, torch.float64 if device == "cpu" else torch.float32).eval()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def decoder(self, batch: int = 3, max_tokens: int = 60, **options: Any) -> Decoder:
        return Decoder(self.blocks, self.embedding, self.head, batch=batch, max_tokens=max_tokens, **options)


def _prompt(batch: int = 3, n: int = 60, device: str = "cpu") -> Tensor:
    return torch.randint(VOCABULARY, (batch, n), generator=torch.Generator().manual_seed(1)).to(device)


def _near(device: str) -> dict[str, float]:
    tolerance = 1e-9 if device == "cpu" else 1e-4
    return {"rtol": tolerance, "atol": tolerance}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [20, WINDOW, 13]
of_every_kind = pytest.mark.parametrize("kind", ["routed", "transformer", "both"])


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
@pytest.mark.parametrize("device", DEVICES)
@of_every_kind
def test_steps_equal_the_full_forward(device: str, kind: str) -> None:
    """Twice with the same decoder: nothing of the first prompt is left."""
    model = Model(device, kind)
    decoder = model.decoder()
    for _ in range(2):
        _steps_are_the_full_forward(model, decoder, device)


@torch.no_grad()
@of_every_kind
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
@pytest.mark.parametrize("device", DEVICES)
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


def _shares(options: dict[str, Any], logits: Tensor) -> Tensor:
    """How often each token is the first after the prompt, in 4,000 draws."""
    model = Model()
    nn.init.zeros_(model.head.weight)
    with torch.no_grad():
        model.head.bias.copy_(logits)
    first = model.decoder(4000, 2, **options).generate(torch.zeros(4000, 1, dtype=torch.int64), 1)
    return torch.bincount(first[:, 0], minlength=VOCABULARY) / 4000


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
    found = _shares(options, logits)
    assert not found[expected == 0].any()
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()


def test_the_seed_decides_the_draws_but_at_the_smallest_temperatures() -> None:
    def texts(count: int, **options: Any) -> Any:
        return Model().decoder(**options).generate(_prompt()[:, :9], count).tolist()

    assert texts(20, seed=1) == texts(20, seed=1) != texts(20, seed=2)
    likeliest = texts(4, temperature=0.0)
    assert all(texts(4, temperature=t) == likeliest for t in (5e-324, 1e-308, 1e-30))


@of_every_kind
def test_a_state_is_saved_and_continued(kind: str) -> None:
    model, x = Model(kind=kind), _prompt()
    decoder, other = model.decoder(), model.decoder()
    decoder.prefill(x[:, :20], LENGTHS)
    other.load_state_dict({name: t.clone() for name, t in decoder.state_dict().items()})
    for _ in range(20):
        assert torch.equal(decoder.step(), other.step())
    assert torch.equal(decoder.tokens, other.tokens)


class _Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher, views left out; what `apart` wraps counts as one operation."""

    count, inside = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func is torch.ops.aten._unsafe_view.default or self.inside)
        return func(*args, **(kwargs or {}))

    def apart(self, function: Any) -> Any:
        def run(*args: Any) -> Any:
            self.count, self.inside = self.count + 1, True
            out = function(*args)
            self.inside = False
            return out

        return run


@torch.no_grad()
def test_a_prompt_fills_caches_by_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block, two are the forward's. The host takes longer to call a small one than a GPU to run it."""
    model, counts = Model(), []
    forward, rotate = attention.forward, op.apply_rotary
    for blocks in (1, 4):
        decoder = Decoder([model.blocks[0]] * blocks, model.embedding, model.head, batch=3, max_tokens=60)
        with _Operations() as operations:
            monkeypatch.setattr(attention, "forward", operations.apart(forward))
            monkeypatch.setattr(cache, "apply_rotary", operations.apart(rotate))
            decoder.prefill(_prompt(), [60, 8, 13])
        counts.append(operations.count)
    assert counts[1] - counts[0] <= 3 * (8 + 2)
    assert counts[0] <= 104


def test_bytes_kept() -> None:
    """Two windows of keys and values, and a share of the rest: half of what dense attention keeps, and less."""
    short, long = (Model().decoder(1, n).nbytes for n in (1024, 2048))
    assert long - short <= 1024 * 2 * 2 * DIM * 8 * 0.51


def test_bytes_kept_of_windows_and_of_all_tokens() -> None:
    """Two windows of a block with windows, whatever the length, and every token of a global one."""
    short, long = (Model(kind="transformer").decoder(1, n).nbytes for n in (1024, 2048))
    assert long - short == 1024 * 2 * DIM * 8
    assert short == (1024 + 2 * WINDOW + 4 * WINDOW) * 2 * DIM * 8


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temperature": -1}, ValueError, "temperature must be a finite number ≥ 0, got -1"),
    ({"temperature": "1"}, TypeError, "temperature must be a number"),
    ({"top_p": 0}, ValueError, "top_p must be a probability"),
    ({"top_k": 0}, ValueError, "top_k must be ≥ 1"),
    ({"batch": 0}, ValueError, "batch must be ≥ 1"),
    *(({name: wrong}, error, f"Decoder: {name} must be ") for name in ("stop", "seed", "lookback")
      for wrong, error in ((1.5, TypeError), (-1, ValueError))),
    ({"stop": True}, TypeError, "Decoder: stop must be "),
    ({"stop": VOCABULARY}, ValueError, "Decoder: stop must be "),
]  # fmt: skip
NINE = _prompt()[:, :9]
CALLS: list[tuple[Any, type[Exception], str]] = [
    (lambda d: d.prefill(_prompt(2)), ValueError, r"batch = 3, got \(2, 60\)"),
    (lambda d: d.prefill(NINE, [9, 9]), ValueError, "lengths must be 3 numbers"),
    (lambda d: d.prefill(NINE, [9, 0, 9]), ValueError, "from 1 to n = 9"),
    (lambda d: d.prefill(_prompt(3, 61)), ValueError, "= 60 tokens, got a prompt of 61"),
    (lambda d: d.generate(_prompt()[:, :50], 12), ValueError, "a prompt of 50 and count = 12"),
    (lambda d: (d.prefill(_prompt()), d.step()), ValueError, "max_tokens = 60 tokens, got token 61"),
    (lambda d: (nn.init.constant_(d.head.bias, torch.nan), d.generate(NINE, 2)), ValueError, "logits are not finite"),
    *((lambda d, wrong=wrong: d.prefill(wrong), TypeError, "Decoder: prompt must be a tensor of int64")
      for wrong in ([[1]] * 3, torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int32))),
    *((lambda d, m=m: d.prefill(NINE, m), TypeError, "Decoder: lengths must be 3 ints, got ")
      for m in ([1, 2, 3.0], 5, torch.ones(3))),
    (lambda d: d.generate(NINE, 3, 5), TypeError, "Decoder: lengths must be 3 ints, got "),
    (lambda d: d.load_state_dict({}), ValueError, "tokens must be"),
    (lambda d: Decoder(nn.ReLU(), d.embed, d.head, batch=1, max_tokens=1), TypeError, r"list of .* got \W*ReLU"),
    (lambda d: Decoder([nn.ReLU()], d.embed, d.head, batch=1, max_tokens=1), TypeError, r"list of .* got \W*ReLU"),
    (lambda d: Model(dropout=0.1).train().decoder().prefill(NINE), ValueError, r"call eval\(\) on the model"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "match"), OPTIONS)
def test_options_that_are_refused(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Model().decoder(**options)


@pytest.mark.parametrize(("run", "error", "match"), CALLS)
def test_what_is_refused(run: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        run(Model().decoder())


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


def _same_as(decoder: Decoder) -> Any:
    """A call that tells whether all that tokens change is still as it is now."""
    before, counts = {name: t.clone() for name, t in decoder.state_dict().items()}, list(decoder.clock.counts)
    return lambda: (
        all(torch.equal(before[n], t) for n, t in decoder.state_dict().items()) and counts == decoder.clock.counts
    )


@torch.no_grad()
def test_a_refused_call_changes_nothing() -> None:
    decoder = Model().decoder(max_tokens=20)
    decoder.prefill(_prompt()[:, :9], torch.tensor([9, 4, 7]))
    own = decoder.state_dict()
    for error, run in (
        (TypeError, lambda: decoder.step(torch.zeros(3))),
        (TypeError, lambda: decoder.step(torch.zeros(3, dtype=torch.int32))),
        (ValueError, lambda: decoder.step(torch.zeros(2, dtype=torch.int64))),
        (IndexError, lambda: decoder.step(torch.tensor([1, 2, VOCABULARY]))),
        (IndexError, lambda: decoder.prefill(torch.full((3, 2), VOCABULARY))),
        (ValueError, lambda: decoder.prefill(_prompt())),
        (ValueError, lambda: decoder.generate(_prompt()[:, :9], 13)),
        (TypeError, lambda: decoder.generate(_prompt()[:, :9], 3, [1, 2, "3"])),
        *((ValueError, lambda wrong=wrong: decoder.load_state_dict(own | wrong))
          for wrong in ({"1.attention.heavy.keys": torch.zeros(2)}, {"ended": None})),
    ):  # fmt: skip
        same = _same_as(decoder)
        with pytest.raises(error):
            run()
        assert same()
    for _ in range(11):
        decoder.step()
    full = _same_as(decoder)
    with pytest.raises(ValueError, match="got token 21"):
        decoder.step(torch.tensor([1, 2, 3]))
    assert full()


@torch.no_grad()
def test_the_token_that_is_read_stops_a_sequence_not_the_one_that_was_drawn() -> None:
    model = Model()
    for row in _prompt(8)[:, None, :20]:
        free = model.decoder(1, seed=2)
        free.prefill(row)
        drawn = int(free._drawn())
        read = (drawn + 1) % VOCABULARY
        for stop, first in ((drawn, read), (read, drawn)):
            texts = []
            for s in (None, stop):
                decoder = model.decoder(1, seed=2, stop=s)
                decoder.prefill(row)
                decoder.step(torch.tensor([first]))
                texts.append([int(decoder._drawn()), *(int((decoder.step(), decoder._drawn())[1]) for _ in range(9))])
            text, ended = texts
            end = text.index(stop) if stop in text else len(text)
            assert ended == text[:end] + [stop] * (len(text) - end)
        decoder = model.decoder(1, seed=2, stop=read)
        decoder.prefill(row)
        decoder.step(torch.tensor([read]))
        assert all(int((decoder._drawn(), decoder.step())[0]) == read for _ in range(9))


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
    hook = model.blocks[0].feed_forward.heavy.register_forward_hook(lambda m, i, y: y * 2)
    with pytest.raises(ValueError, match=r"Decoder: blocks\.0\.feed_forward\.heavy\._forward_hooks was None, is now"):
        decoder.step()
    # captured with the hook, a graph runs the modules that it is in
    hooked = model.decoder()
    hooked.prefill(x[:, :20])
    with torch.no_grad():
        for i in range(20, 40):
            torch.testing.assert_close(hooked.step(x[:, i]), model(x[:, : i + 1])[:, -1], **_near("cuda"))
    hook.remove()
    decoder.step()
    model.cpu()
    with pytest.raises(ValueError, match="was replaced since the capture"):
        decoder.step()


@pytest.mark.gpu
def test_both_devices_draw_alike() -> None:
    texts = [
        Model(d).decoder(top_k=9, seed=3).generate(_prompt(device=d)[:, :20], 30).tolist() for d in ("cpu", "cuda")
    ]
    assert texts[0] == texts[1]

"""`Decoder`: a stack of causal blocks writes after prompts, on a GPU with one CUDA graph per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from onepass.core.garbage import collected
from onepass.core.launch import uses_triton
from onepass.ops.topk.op import topk

from .block import RoutedBlock
from .cache import BlockCache, Clock, clear
from .count import check_int, check_number
from .graphed import refuse_changed, settings
from .transformer import TransformerBlock

# tokens that a GPU writes before the host looks at them
CHUNK = 32


class Decoder:
    r"""Write tokens after prompts: the full forward reads a prompt, then each token takes one step of all blocks.

    Steps make the choices of the full forward and equal it to rounding. On a CUDA device a step is one CUDA graph, and
    the host reads nothing per token; routed blocks have a second one, for tokens that begin a window. On a CPU, and in
    float64, the same steps run without graphs. A token is drawn from ``softmax(logits / temperature)`` at a number that
    the CPU draws from the seed, so all devices draw alike.

    Args:
        blocks: `TransformerBlock` or `RoutedBlock` modules, causal, every k a share (see `RoutedBlock.new_cache`); in
            evaluation mode.
        embed: called with tokens ``(batch, n)`` int64, gives ``(batch, n, dim)``.
        head: called with ``(batch, n, dim)``, gives logits ``(batch, n, vocabulary)``.
        batch: how many sequences are written side by side. They may have prompts of unequal lengths.
        max_tokens: how many tokens of a sequence the caches hold, prompt included. One more raises.
        lookback: in steps, embed gets each token with this many before it; −1 before the first.
        temperature: 0 takes the likeliest token, the first of equals.
        top_k: draw from the k likeliest tokens alone.
        top_p: draw from the fewest likeliest tokens alone whose probabilities reach this sum.
        seed: of the draws, an int ≥ 0.
        stop: a token that ends a sequence: after it, it alone is written there, while other sequences go on.

    Attributes:
        caches: the blocks' `BlockCache`; ``nbytes`` is their size.
        tokens: ``(batch, max_tokens + 1)`` int64: all that was read or drawn.
        logits: ``(batch, vocabulary)`` fp32 or wider: of the next token; overwritten by the next step.

    Raises:
        TypeError: a block can't be decoded, or an argument has another type.
        ValueError: an argument is out of range. In a call: more tokens than the caches hold, or another batch; on a GPU
            a setting, parameter or hook changed since the graphs were captured (weights may change in place).

    Example:
        >>> import torch
        >>> from onepass.nn import Decoder, TransformerBlock
        >>> embedding, head = torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256)
        >>> blocks = [TransformerBlock(32, dim_head=16, window=w, causal=True).eval() for w in (8, 8, None)]
        >>> decoder = Decoder(blocks, embedding, head, batch=2, max_tokens=100, top_p=0.9)
        >>> decoder.generate(torch.randint(256, (2, 30)), 50, lengths=[30, 7]).shape
        torch.Size([2, 50])
    """

    def __init__(
        self, blocks: Sequence[RoutedBlock | TransformerBlock] | nn.ModuleList, embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor], *, batch: int, max_tokens: int, lookback: int = 0, temperature: float = 1.0,
        top_k: int | None = None, top_p: float | None = None, seed: int = 0, stop: int | None = None,
    ) -> None:  # fmt: skip
        self.blocks: list[Any] = list(blocks) if hasattr(blocks, "__iter__") else []
        if not self.blocks or not all(isinstance(block, RoutedBlock | TransformerBlock) for block in self.blocks):
            got = [type(b).__name__ for b in self.blocks] if hasattr(blocks, "__iter__") else type(blocks).__name__
            raise TypeError(f"Decoder: blocks must be a list of TransformerBlock or RoutedBlock modules, got {got}")
        for name, size in (("batch", batch), ("max_tokens", max_tokens), ("top_k", 1 if top_k is None else top_k)):
            check_int("Decoder", name, size)
        check_int("Decoder", "lookback", lookback, 0)
        check_int("Decoder", "seed", seed, 0)
        check_number("Decoder", "temperature", temperature, "a finite number ≥ 0", lambda t: 0 <= t < math.inf)
        check_number("Decoder", "top_p", 1 if top_p is None else top_p, "a number in (0, 1]", lambda p: 0 < p <= 1)
        self.embed, self.head, self.lookback = embed, head, lookback
        self.temperature, self.top_k, self.top_p, self.stop = temperature, top_k, top_p, stop
        weight = next(self.blocks[0].attention.parameters())
        self.clock, device = Clock(batch, max_tokens, weight.device), weight.device
        self.caches: list[BlockCache] = [b.new_cache(batch, max_tokens, clock=self.clock) for b in self.blocks]
        self.buffers = [buffer for cache in self.caches for buffer in cache.named_buffers()]
        self.tokens = torch.zeros(batch, max_tokens + 1, dtype=torch.int64, device=device)
        self.ended, self.failed = (torch.zeros(shape, dtype=torch.bool, device=device) for shape in ((batch,), ()))
        with torch.no_grad():
            logits = head(weight.new_zeros(batch, 1, self.blocks[0].attention.dim))
        check_int("Decoder", "stop", 0 if stop is None else stop, 0, logits.shape[-1] - 1)
        self.logits = logits.new_zeros(batch, logits.shape[-1], dtype=torch.promote_types(logits.dtype, torch.float32))
        draws: Any = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64, "device": "cpu"}
        self.numbers = torch.rand(max_tokens + 1, batch, **draws).to(device)
        # in float64 the host reads which keys were chosen, which no graph can repeat
        self.repeats = weight.is_cuda and uses_triton(weight)
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self.captured: dict[str, Any] = {}
        # embed or head may be a bound method: its module is `__self__`
        parts: dict[str, Any] = {"blocks": nn.ModuleList(self.blocks), "caches": nn.ModuleList(self.caches)}
        parts |= {n: getattr(f, "__self__", f) for n, f in (("embed", embed), ("head", head))}
        self.modules = nn.ModuleDict({name: m for name, m in parts.items() if isinstance(m, nn.Module)})

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks' caches."""
        return sum(cache.nbytes for cache in self.caches)

    @torch.no_grad()
    def prefill(self, prompt: Tensor, lengths: Sequence[int] | Tensor | None = None) -> Tensor:
        """Forget all tokens, read prompts (batch, n) int64; return `logits`, which the next call overwrites.

        lengths: how many tokens of each prompt count, the first ones; ints or a tensor, default: all n.
        """
        counts, n, device = self._counts(prompt, lengths), prompt.shape[1], self.tokens.device
        if n > self.clock.max_tokens:
            raise ValueError(f"Decoder: caches hold max_tokens = {self.clock.max_tokens} tokens, got a prompt of {n}")
        self._check_settings()
        last = torch.tensor(counts, device=device)
        # a prompt of one token is a step
        mask = None if lengths is None or n == 1 else torch.arange(n, device=device) < last[:, None]
        x = self.embed(prompt)
        self._clear()
        self.clock.begin(x, mask)
        for block, cache in zip(self.blocks, self.caches, strict=True):
            x = block(x, mask, cache=cache)
        self.clock.end()
        self.tokens[:, :n] = prompt
        self.logits.copy_(self.head(x.gather(1, (last - 1)[:, None, None].expand(-1, 1, x.shape[-1])))[:, 0])
        self._draw()
        return self.logits

    @torch.no_grad()
    def step(self, tokens: Tensor | None = None) -> Tensor:
        """Read a token (batch,) of each sequence, default: those drawn; return `logits`, which calls overwrite."""
        if tokens is not None:
            self._check_tokens("tokens", tokens, "(batch,)")
        self.clock.check_room(1)
        if self.repeats and not self.graphs:
            self._clear()
        self._check_settings()
        drawn = self._drawn()
        if tokens is not None:
            self.tokens.scatter_(1, self.clock.position[:, None], tokens[:, None])
        try:
            self._advance()
        except Exception:
            # an embedding may refuse a token: put back what was drawn
            self.tokens.scatter_(1, self.clock.position[:, None], drawn)
            raise
        return self.logits

    @torch.no_grad()
    def stream(self, prompt: Tensor, count: int, lengths: Sequence[int] | Tensor | None = None) -> Iterator[Tensor]:
        """Yield the tokens of :meth:`generate`, (batch, m), as they are written; ends early once all sequences ended.

        m is 1 on a CPU and at most 32 on a GPU, where the host waits once per yield.
        """
        check_int("Decoder", "count", count)
        longest, room = max(self._counts(prompt, lengths)), self.clock.max_tokens
        if longest + count - 1 > room:
            raise ValueError(
                f"Decoder: the caches hold max_tokens = {room} tokens, got a prompt of {longest} and count = {count}: "
                "make a decoder with a larger max_tokens"
            )
        self.prefill(prompt, lengths)
        chunk = CHUNK if self.tokens.is_cuda else 1
        for done in range(0, count, chunk):
            written = [self._drawn()]
            self._check_settings()
            for _ in range(1, min(chunk, count - done)):
                self._advance()
                written.append(self._drawn())
            if bool(self.failed):
                raise ValueError("Decoder: the logits are not finite: the weights are damaged or diverged")
            yield torch.cat(written, 1)
            ended = self.ended if self.stop is None else self.ended | (written[-1][:, 0] == self.stop)
            if done + chunk >= count or bool(ended.all()):
                return
            self._advance()

    def generate(self, prompt: Tensor, count: int, lengths: Sequence[int] | Tensor | None = None) -> Tensor:
        """Return the tokens (batch, count) that follow prompts (batch, n) int64; after `stop` comes `stop`.

        lengths: how many tokens of each prompt count, the first ones; ints or a tensor, default: all n.
        """
        written = torch.cat(list(self.stream(prompt, count, lengths)), 1)
        missing = count - written.shape[1]
        return torch.cat((written, written[:, -1:].expand(-1, missing)), 1)

    def _advance(self) -> None:
        clock = self.clock
        clock.check_room(1)
        if self.repeats:
            self.graphs[clock.any_turns()].replay()
        else:
            self._step()
        clock.counts, clock.read = [n + 1 for n in clock.counts], []

    def _step(self) -> None:
        """Read the drawn tokens and draw the next ones; only operations that a CUDA graph can repeat."""
        at = self.clock.position[:, None]
        if self.lookback:
            at = at + torch.arange(-self.lookback, 1, device=at.device)
        tokens = torch.where(at >= 0, self.tokens.gather(1, at.clamp_min(0)), -1)
        x = self.embed(tokens)[:, -1:]
        self.clock.lengths, self.clock.read = None, [1]  # `check_room` refuses caches of a step that raises after this
        if self.stop is not None:
            self.ended |= tokens[:, -1] == self.stop
        for block, cache in zip(self.blocks, self.caches, strict=True):
            x = block(x, cache=cache)
        self.logits.copy_(self.head(x)[:, 0])
        self.clock.position += 1
        self._draw()

    def _draw(self) -> None:
        """Draw the next token from the logits."""
        max_logit, likeliest = self.logits.max(-1, keepdim=True)
        self.failed |= ~max_logit.isfinite().all()
        at = self.clock.position[:, None]
        if self.temperature:
            # the largest logit becomes 0, so that no temperature is too small to divide by
            probs = ((self.logits - max_logit).double() / self.temperature).softmax(-1)
            if self.top_k is not None:
                top = topk(probs, min(self.top_k, probs.shape[-1]), sorted=False)
                probs = torch.zeros_like(probs).scatter_(1, top.indices, top.values)
            if self.top_p is not None:
                descending, order = probs.sort(dim=-1, descending=True, stable=True)
                preceding = descending.cumsum(-1) - descending
                descending = descending.masked_fill(preceding >= self.top_p * probs.sum(-1, keepdim=True), 0)
                probs = torch.zeros_like(probs).scatter_(1, order, descending)
            cumulative = probs.cumsum(-1)
            uniform = self.numbers.gather(0, at.mT).mT
            drawn = (cumulative <= uniform * cumulative[:, -1:]).sum(-1, keepdim=True).clamp_max(probs.shape[-1] - 1)
        else:
            drawn = likeliest
        if self.stop is not None:
            drawn = torch.where(self.ended[:, None], self.stop, drawn)
        self.tokens.scatter_(1, at, drawn)

    def _drawn(self) -> Tensor:
        return self.tokens.gather(1, self.clock.position[:, None])

    def _clear(self) -> None:
        if self.repeats and not self.graphs:
            self._capture()
        clear(self.buffers)
        self.clock.clear()
        self.ended.zero_()
        self.failed.zero_()

    @torch.no_grad()
    def _capture(self) -> None:
        """Capture a step; with routed blocks a second one, for tokens that begin a window of some sequence."""
        stream = torch.cuda.Stream(self.tokens.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with collected(), torch.cuda.device(self.tokens.device):
            for turns in (False, True) if self.clock.periods else (False,):
                self.clock.forced, graph = turns, torch.cuda.CUDAGraph()
                # the first pass compiles kernels and makes the libraries' workspaces
                with torch.cuda.stream(stream):
                    self._step()
                with torch.cuda.graph(graph, stream=stream):
                    self._step()
                self.graphs[turns] = graph
            self.clock.forced = None
        torch.cuda.current_stream().wait_stream(stream)
        self.captured = self._settings()

    def _settings(self) -> dict[str, Any]:
        return settings(self.modules, self.tokens.device, self)

    def _check_settings(self) -> None:
        if any(block.training and block.dropout for block in self.blocks):
            raise ValueError("Decoder: blocks in training mode drop what they add: call eval() on the model first")
        if self.graphs:
            refuse_changed(self.captured, self._settings(), "Decoder")

    def _check_tokens(self, name: str, tokens: Tensor, shape: str) -> None:
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64:
            got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(
                f"Decoder: {name} must be a tensor of int64, got {got}; write torch.as_tensor({name}).long()"
            )
        if tokens.dim() != len(shape.split(", ")) or len(tokens) != len(self.tokens) or not tokens.numel():
            raise ValueError(
                f"Decoder: {name} must be {shape} with batch = {len(self.tokens)}, got {tuple(tokens.shape)}"
            )

    def _counts(self, prompt: Tensor, lengths: Sequence[int] | Tensor | None) -> list[int]:
        """Check a prompt; return how many of its tokens count in each sequence."""
        self._check_tokens("prompt", prompt, "(batch, n ≥ 1)")
        batch, n = prompt.shape
        counts: Any = lengths.tolist() if isinstance(lengths, Tensor) else [n] * batch if lengths is None else lengths
        if not isinstance(counts, Sequence) or not all(isinstance(m, Integral) for m in counts):
            raise TypeError(f"Decoder: lengths must be {batch} ints, got {lengths!r:.80}")
        if len(counts) != batch or not all(1 <= m <= n for m in counts):
            raise ValueError(f"Decoder: lengths must be {batch} numbers from 1 to n = {n}, got {list(counts)}")
        return list(counts)

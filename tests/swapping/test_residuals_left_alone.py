"""Layers that `onepass.swap(residuals=True)` leaves alone, and the reason that it reports."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onepass import swap
from swapping.layers import Block, PostNorm


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.n2(x + 0.5 * self.mix(x)[0]))


class Branching(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        return self.n2(x + self.mlp(x)) if self.first else x


class ByMode(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.n2(x + self.mlp(x)) if self.training else self.n2(x)


class Peeks(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.n2(x + self.mlp(x)) + self.mlp.weight.sum()


class ByShape(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.n2(x + self.mlp(x)) if x.shape[0] > 1 else x


class NoSum(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.n2(x))


class Constant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.n2(x + self.mix(x, scale=2.0)[0])


class Starred(Block):
    def forward(self, *x: Tensor) -> Tensor:
        return self.n2(x[0] + self.mlp(x[0]))


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(x)
        h += x
        return self.n2(h)


class Weighted(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.n2(torch.add(x, self.mlp(x), alpha=2))


class Numbered(Block):
    def forward(self, x: Tensor, which: int = 2) -> Tensor:
        return self.n2(x + self.mlp(x)) if which == 2 else x


def on_instance() -> nn.Module:
    model = Block()
    model.forward = model.forward
    return model


def on_its_own() -> nn.Module:
    model = Block()
    model.compile(backend="eager")
    return model


def shouting(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def shout(self: nn.Module, x: Tensor) -> Tensor:
        return forward(self, x)

    return shout


class Decorated(Block):
    @shouting
    def forward(self, x: Tensor) -> Tensor:
        return self.n2(x + self.mlp(x))


class Final(Block):
    def __init_subclass__(cls) -> None:
        raise TypeError("Final is final")


class Graceless(Block):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.n2(x + self.mlp(x))


class InAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = self.mlp(x)
        return self.n2(x + h)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.n2(x + checkpoint(self.mlp, x, use_reentrant=False))


class OnCpu(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            h = self.mlp(x)
        return self.n2(x + h)


class ByGradMode(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.n2(x + self.mlp(x)) if torch.is_grad_enabled() else x


class ByAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x if torch.is_autocast_enabled("cpu") else self.n2(x + self.mlp(x))


class Skipping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0 else self.n2(x + self.mlp(x))


class SkippingByNumPy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x if np.random.rand() < 0 else self.n2(x + self.mlp(x))


class Seeded(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return self.n2(x + self.drop(self.mlp(x)))


class Keeping(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.sum = x + self.mlp(x)
        return self.n2(self.sum)


class Trying(Block):
    """Its branch returns one tensor, and a pair fits the first arm as well."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            h = self.mlp(x)
            h = h if isinstance(h, Tensor) else h[0]
            h.shape  # noqa: B018
        except Exception:
            h = x
        return self.n2(x + h)


class TupleOrNot(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        if isinstance(h, tuple):
            h = h[0]
        return self.n2(x + h)


class Offloading(Block):
    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.mlp, x, use_reentrant=False) if self.gradient_checkpointing else self.mlp(x)
        return self.n2(x + h)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (InAutocast, "its forward calls mlp in a context of its own"),
        (OnCpu, "its forward calls mlp in a context of its own"),
        (Checkpointed, "its forward reads a tensor's device"),
        (ByGradMode, "its forward does something else in another of torch's modes"),
        (ByAutocast, "its forward does something else in another of torch's modes"),
        (Skipping, "its forward draws random numbers, or sets their seed"),
        (SkippingByNumPy, "its forward draws random numbers, or sets their seed"),
        (Seeded, "its forward draws random numbers, or sets their seed"),
        (Keeping, "its forward sets the attribute sum"),
        (Trying, "its forward reads a tensor's shape"),
        (TupleOrNot, "its forward asks for the type of a tensor"),
        (Offloading, "its forward reads the attribute gradient_checkpointing"),
        (Scaled, "its forward calls r?mul"),
        (Branching, "its forward reads the attribute first"),
        (ByMode, "its forward does something else in training mode"),
        (Peeks, "its forward reads mlp.weight"),
        (ByShape, "its forward reads a tensor's shape"),
        (NoSum, "no sum of two tensors goes straight into one of its norms"),
        (Constant, "its forward makes a float of its own"),
        (Starred, "its forward takes \\*x by position"),
        (InPlace, "its forward calls add_"),
        (Weighted, "its forward calls add with alpha"),
        (Numbered, "what its forward does depends on which"),
        (on_instance, "its forward is overwritten on the instance"),
        (on_its_own, "it is compiled on its own"),
        (Decorated, "its forward is decorated"),
        (Final, "it can't be run on stand-ins: TypeError: Final is final"),
        (Graceless, "its forward calls _set_grad_enabled"),
    ],
)
def test_left_alone(make: Callable[[], nn.Module], reason: str) -> None:
    model = nn.ModuleDict({"a": make()})
    kind = type(model["a"])
    states = random.getstate(), torch.get_rng_state(), repr(np.random.get_state())
    report = swap(model, residuals=True, strict=True)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert repr(np.random.get_state()) == states[2]
    assert type(model["a"]) is kind
    (line,) = report.left_alone
    assert line.names == ("a",)
    assert line.kind == kind.__name__
    assert re.fullmatch(reason, line.reason), line.reason


def test_a_scripted_layer() -> None:
    model = nn.ModuleDict({"a": torch.jit.script(PostNorm())})
    assert not swap(model, residuals=True).exchanged


def test_a_norm_that_is_left_out() -> None:
    model = Block()
    report = swap(model, exclude="n2", residuals=True)
    assert type(model) is Block
    assert report.left_alone[-1].reason == "no sum of two tensors goes straight into one of its norms"
    assert not any(layer.kind == "Block" for layer in swap(Block(), include="n2").layers)

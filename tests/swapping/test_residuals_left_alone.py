"""Layers that `onepass.swap(residuals=True)` leaves alone, and the reason that it reports."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
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
    report = swap(model, residuals=True, strict=True)
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

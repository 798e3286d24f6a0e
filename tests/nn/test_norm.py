"""The norm modules stand in for torch's: constructor, state_dict, results; and what they add."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import onepass.nn
from onepass import layer_norm

LAYER_NORM_CASES = [
    ((8,), {}),
    (8, {"eps": 1e-3}),
    ([3, 8], {}),
    ((2, 3, 8), {"bias": False}),
    (8, {"bias": False}),
    (8, {"elementwise_affine": False}),
    ([3, 8], {"elementwise_affine": False}),
]


def _shuffle(module: nn.Module) -> None:
    for p in module.parameters():
        nn.init.normal_(p)


@pytest.mark.parametrize(("shape", "options"), LAYER_NORM_CASES)
def test_layer_norm_is_torchs(shape, options: dict) -> None:
    theirs, ours = nn.LayerNorm(shape, **options), onepass.nn.LayerNorm(shape, **options)
    assert isinstance(ours, nn.LayerNorm)
    assert repr(ours) == repr(theirs)
    _shuffle(theirs)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 2, 3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        (ga,) = torch.autograd.grad(ours(x).square().sum(), a)
        (gb,) = torch.autograd.grad(theirs(x).square().sum(), b)
        assert ga.shape == gb.shape
        torch.testing.assert_close(ga, gb, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [8, [3, 8]])
@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"elementwise_affine": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_norm_is_torchs(shape, options: dict, dtype: torch.dtype) -> None:
    theirs, ours = (m(shape, **options, dtype=dtype) for m in (nn.RMSNorm, onepass.nn.RMSNorm))
    assert isinstance(ours, nn.RMSNorm)
    assert repr(ours) == repr(theirs)
    _shuffle(theirs)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 2, 3, 8).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x))


def test_stable() -> None:
    norm = onepass.nn.LayerNorm(16, eps=0.1, stable=True)
    assert "stable=True" in repr(norm)
    x = torch.randn(3, 16)
    torch.testing.assert_close(norm(x), layer_norm(x, eps=0.1, stable=True))
    assert copy.deepcopy(norm).stable


def test_half_precision_activations_with_full_precision_weights() -> None:
    x = torch.randn(4, 16).bfloat16()
    assert onepass.nn.LayerNorm(16)(x).dtype == torch.bfloat16
    assert onepass.nn.RMSNorm(16)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_a_wrong_shape_is_named(name: str) -> None:
    norm = getattr(onepass.nn, name)((3, 8))
    for shape in [(8,), (2, 3, 7), (2, 4, 8)]:
        with pytest.raises(ValueError, match=rf"{name}: x must end in normalized_shape \(3, 8\), got"):
            norm(torch.randn(shape))
    for shape in [(3, 8), (2, 8, 3), (2, 24), (24,)]:
        with pytest.raises(ValueError, match=r"residual must have the shape of x \(2, 3, 8\); got"):
            norm(torch.randn(2, 3, 8), torch.randn(shape))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("shape", [(8,), (3, 8)])
def test_what_is_no_tensor_is_named(name: str, shape: tuple[int, ...]) -> None:
    norm = getattr(onepass.nn, name)(shape)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        norm([1.0] * 8)
    with pytest.raises(TypeError, match="residual must be a tensor, got list"):
        norm(torch.randn(2, 3, 8), [1.0] * 8)


def test_on_the_meta_device() -> None:
    norm = onepass.nn.LayerNorm(8, device="meta", dtype=torch.bfloat16)
    assert norm.weight.is_meta
    assert norm.weight.dtype == torch.bfloat16


def test_rounding_twice_is_llamas() -> None:
    """Round, multiply, round; also after a pickle of a module that did not know the option."""
    norm = onepass.nn.RMSNorm(64, eps=1e-6, rounding="twice").bfloat16()
    _shuffle(norm)
    x = torch.randn(5, 64).bfloat16()
    f = x.float()
    normed = (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(norm(x), norm.weight * normed)
    assert "rounding='twice'" in repr(norm)
    old = onepass.nn.RMSNorm(64)
    del old.__dict__["rounding"]
    assert old(torch.ones(64)).shape == (64,)
    with pytest.raises(ValueError, match="rounding must be 'once' or 'twice', got 'never'"):
        onepass.nn.RMSNorm(8, rounding="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes no offset"):
        onepass.nn.RMSNorm(8, rounding="twice", offset=1.0)


def test_a_layer_with_another_rounding_is_not_fused() -> None:
    """The fused node rounds once."""
    from onepass.nn.feed_forward import FeedForward

    layer = FeedForward(8, 16)
    assert layer.is_plain()
    layer.norm.rounding = "twice"
    assert not layer.is_plain()


@pytest.mark.parametrize("cls", [onepass.nn.LayerNorm, onepass.nn.RMSNorm])
@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ("a", TypeError, "must be an int or a sequence of ints, got 'a'"),
        (4.0, TypeError, "must be an int or a sequence of ints, got 4.0"),
        (None, TypeError, "must be an int or a sequence of ints, got None"),
        ((), TypeError, r"must be an int or a sequence of ints, got \(\)"),
        ([4, "a"], TypeError, r"must be an int or a sequence of ints, got \[4, 'a'\]"),
        (-1, ValueError, "must be ≥ 0, got -1"),
        ((3, -8), ValueError, r"must be ≥ 0, got \(3, -8\)"),
    ],
)
def test_wrong_shapes_are_refused(cls: type, shape: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"{cls.__name__}: normalized_shape {message}"):
        cls(shape)


def test_an_offset_is_a_number() -> None:
    with pytest.raises(TypeError, match="RMSNorm: offset must be a number, got str"):
        onepass.nn.RMSNorm(4, offset="one")
    assert torch.equal(onepass.nn.RMSNorm(4, offset=1).weight, torch.zeros(4))
    x = torch.randn(2, 4)
    for function in (onepass.layer_norm, onepass.rms_norm):
        with pytest.raises(TypeError, match=f"{function.__name__}: offset must be a number, got str"):
            function(x, x[0], offset="one")
        assert torch.equal(function(x, x[0], offset=1), function(x, x[0], offset=1.0))

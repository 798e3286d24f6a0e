"""`clip_grad_norm`, whose factor the next step applies, and `release_gradients`, which steps inside backward."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lion_params import assert_same, clones, make_params, set_grads
from onepass.optim import Lion, clip_grad_norm, release_gradients

# has the class and the fields of the optimizer inside, which steps, as Lightning's
WRAPPED = type("Wrapped", (Lion,), {"__init__": lambda self, inside: vars(self).update(vars(inside), optimizer=inside)})


def test_nan_norm_reaches_the_weights() -> None:
    p, q = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = Lion([p, q])
    p.grad, q.grad = torch.tensor([1.0, float("nan"), 1.0]), torch.ones(2)
    assert clip_grad_norm([p, q], 1.0).isnan()
    optimizer.step()
    assert all(t.isnan().all() for t in (p, q))


def test_whose_gradients_are_clipped() -> None:
    a = make_params(shapes=[(3, 4), (5000,), (0,), ()])
    b = clones(a)
    first, second = Lion(a), Lion(b)
    set_grads(a, b)
    sgd: Any = torch.optim.SGD(a)
    for params, max_norm, optimizer, error, words in (
        ([*a, *b], 1.0, None, ValueError, r"2 onepass\.optim\.Lion have these parameters"),
        ([torch.ones(2, requires_grad=True)], 1.0, None, ValueError, r"no onepass\.optim\.Lion has these"),
        ([*a, *b], 1.0, first, ValueError, "not the optimizer's"),
        (b[:1], 1.0, None, ValueError, "more parameters with gradients than given"),
        (a, 1.0, sgd, TypeError, r"optimizer must be an onepass\.optim\.Lion, got SGD"),
        (a, -1.0, None, ValueError, "max_norm must be ≥ 0, got -1"),
        (a, "1", None, TypeError, "max_norm must be a number ≥ 0, got str"),
    ):
        with pytest.raises(error, match=words):
            clip_grad_norm(params, max_norm, optimizer=optimizer)
    with pytest.raises(TypeError, match="grad_scale must be a tensor, got float"):
        clip_grad_norm(a, 1.0, grad_scale=2.0)  # type: ignore[arg-type]
    assert first.clip_coefficient is None
    clip_grad_norm(b, 1.0, optimizer=WRAPPED(second))
    assert second.clip_coefficient is not None
    second.zero_grad()
    assert clip_grad_norm(b, 1.0) == 0.0
    gone = weakref.ref(second)
    del second
    assert gone() is None, "the registry must not keep optimizers alive"


def test_an_owner_is_found_while_other_optimizers_come_and_go() -> None:
    p = torch.ones(2, requires_grad=True)
    Lion([p])
    optimizer = Lion([p])
    p.grad = torch.ones(2)
    others: list[Lion] = []

    def parameters(owner: Lion) -> list[Tensor]:
        others.append(Lion([torch.ones(1, requires_grad=True)]))  # as another thread may
        return [*owner.param_groups[0]["params"]]

    with patch("onepass.optim.clip._parameters", parameters):
        clip_grad_norm([p], 1.0)
    assert optimizer.clip_coefficient is not None


def models(**options: Any) -> list[tuple[nn.Module, Lion]]:
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        tied = nn.Linear(16, 16)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), tied, nn.Tanh(), tied, nn.Tanh(), nn.Linear(16, 300))
        decayed = [p for p in model.parameters() if p.dim() > 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}]
        made.append((model, Lion(groups, lr=1e-2, **options)))
    return made


@pytest.mark.parametrize("bucket_bytes", [0, 1000, 1 << 30])
@pytest.mark.parametrize("options", [{}, {"cautious": True}, {"state_dtype": "int8"}], ids=str)
def test_released_is_the_normal_step(bucket_bytes: int, options: dict[str, Any], closure: bool) -> None:
    def backward(m: nn.Module, o: Lion, x: Tensor) -> Tensor:
        o.zero_grad()
        loss: Tensor = m(x).square().sum()
        loss.backward()
        return loss

    (model, optimizer), (twin, normal) = models(**options)
    handle = release_gradients(model, optimizer, bucket_bytes=bucket_bytes)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, normal)]
    for i in range(4):
        x = torch.randn(5, 8)
        if closure:
            optimizer.step(lambda x=x: backward(model, optimizer, x))
        else:
            backward(model, optimizer, x)
            freed = {0: all, 1000: any}.get(bucket_bytes)
            assert freed is None or freed(p.grad is None for p in model.parameters())
            optimizer.step()
        assert all(p.grad is None for p in model.parameters()), "a second backward would add to what is left"
        backward(twin, normal, x)
        normal.step()
        for scheduler in schedulers:
            scheduler.step()
        if i == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        assert_same([*model.parameters()], [*twin.parameters()])
    handle.remove()
    x = torch.randn(5, 8)
    for m, o in ((model, optimizer), (twin, normal)):
        backward(m, o, x)
        assert all(p.grad is not None for p in m.parameters())
        o.step()
    assert_same([*model.parameters()], [*twin.parameters()])


def test_released_accumulation_updates_with_the_sum() -> None:
    (model, optimizer), (twin, normal) = models()
    with release_gradients(model, optimizer, bucket_bytes=0) as handle:
        for _ in range(3):
            xs = torch.randn(3, 5, 8)
            with handle.accumulate():
                for x in xs[:2]:
                    model(x).square().sum().backward()
            model(xs[2]).square().sum().backward()
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            normal.zero_grad()
            for x in xs:
                twin(x).square().sum().backward()
            normal.step()
    assert_same([*model.parameters()], [*twin.parameters()])
    assert not optimizer.releasing


def test_a_compiled_training_step_releases() -> None:
    (model, optimizer), (twin, normal) = models()
    release_gradients(model, optimizer, bucket_bytes=1000)

    def train(m: nn.Module, o: Lion, x: Tensor) -> None:
        o.zero_grad()
        m(x).square().sum().backward()
        o.step()

    compiled = torch.compile(train, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(5, 8)
        compiled(model, optimizer, x)
        train(twin, normal, x)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
        assert torch.allclose(optimizer.state[p]["exp_avg"], normal.state[q]["exp_avg"], rtol=1e-4, atol=1e-7)


def test_released_steps_leave_no_gradient_that_did_not_arrive() -> None:
    held, late, usual, added = (nn.Parameter(torch.ones(3)) for _ in range(4))
    late.requires_grad_(False)
    optimizer = Lion([held, late, usual], lr=0.25)
    handle = release_gradients(nn.ParameterList([held, late, usual]), optimizer, bucket_bytes=0)
    late.requires_grad_(True)
    optimizer.add_param_group({"params": [added]})
    with handle.accumulate():
        held.sum().backward()
    (late + usual + added).sum().backward()
    optimizer.step()
    for p in (held, late, usual, added):
        assert p.grad is None
        assert torch.equal(p, torch.full((3,), 0.75))


def test_gradients_die_during_backward() -> None:
    alive: list[int] = []
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    optimizer = Lion(layers.parameters())
    release_gradients(layers, optimizer, bucket_bytes=2 * 64 * 64 * 4)
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in layers.parameters()))
        )
    layers(torch.randn(2, 64)).sum().backward()
    assert max(alive) <= 2


def test_release_refuses() -> None:
    (model, optimizer), (other, _) = models()
    with pytest.raises(TypeError, match=r"must be an onepass\.optim\.Lion, got SGD"):
        release_gradients(model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none of the model's parameters"):
        release_gradients(other, optimizer)
    with pytest.raises(ValueError, match="bucket_bytes must be ≥ 0, got -1"):
        release_gradients(model, optimizer, bucket_bytes=-1)
    handle = release_gradients(model, WRAPPED(optimizer))
    with pytest.raises(ValueError, match="releases already"):
        release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match="steps inside backward"):
        clip_grad_norm(model.parameters(), 1.0)
    handle.remove()
    release_gradients(model, optimizer)
    handle.remove()
    assert optimizer.releasing, "removed for a second time, a handle has nothing to say"

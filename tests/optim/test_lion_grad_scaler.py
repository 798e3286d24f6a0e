"""Lion under `torch.amp.GradScaler`: who unscales, what a skipped step leaves, beside torch's AdamW."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from lion_params import assert_same, assert_same_states, clones, make_params
from onepass.compat.lion_pytorch import Lion as CompatLion
from onepass.optim import Lion, clip_grad_norm

AdamW = torch.optim.AdamW
SHAPES = [(3, 4), (5,), (), (70, 60)]
# for each step: what gradients hold besides numbers; growth and back-off both happen on the way
EVENTS = [None, None, "inf", None, None, None, "nan", "-inf", None, "everywhere", None, None, None, None, "last", None]


def handed_over(optimizer: torch.optim.Optimizer) -> bool:
    """Whether GradScaler gives this optimizer its scale and found_inf, as it decides itself."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def new_scaler(device: str = "cpu", scale: float = 2.0**12) -> Any:
    """A scaler whose scale exists, as after the first `scaler.scale(loss)`."""
    scaler = torch.amp.GradScaler(device, init_scale=scale, growth_interval=3)
    scaler.scale(torch.ones((), device=device))
    return scaler


@pytest.mark.parametrize("fused", [None, False, True])
def test_only_an_explicit_fused_takes_the_scale(fused: bool | None) -> None:
    """As torch's AdamW does: Lightning refuses to clip gradients that stay scaled."""
    p = torch.ones(3, requires_grad=True)
    ours, theirs = Lion([p], fused=fused), AdamW([p], fused=fused)
    assert handed_over(ours) == handed_over(theirs) == (fused is True)
    assert handed_over(copy.deepcopy(ours)) == (fused is True)
    assert handed_over(pickle.loads(pickle.dumps(ours))) == (fused is True)
    # a checkpoint of a run with the other setting doesn't change what the constructor was asked for
    ours.load_state_dict(Lion([p], fused=not fused).state_dict())
    assert handed_over(ours) == (fused is True)
    assert not handed_over(CompatLion([p]))


@pytest.mark.parametrize("fused", [None, False, True])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"state_dtype": "int8"}),
     (torch.float32, {"cautious": True})],
    ids=["fp32", "remainder", "remainder-int8", "cautious"],
)  # fmt: skip
def test_many_steps_with_infinite_gradients(
    dtype: torch.dtype, options: dict[str, Any], fused: bool | None, device: str
) -> None:
    """Bit for bit the run that leaves out what AdamW's scaler skips, with unscaled gradients and no scaler.

    Scales are powers of two, so that scaling rounds nothing.
    """
    if device == "cuda" and dtype == torch.bfloat16:
        pytest.skip("torch looks for infinities in bf16 gradients on a CPU alone")
    ours = make_params(dtype, SHAPES, device)
    by_hand, theirs = clones(ours), clones(ours)
    scaled, plain = (Lion(x, lr=1e-2, weight_decay=0.1, fused=fused, **options) for x in (ours, by_hand))
    adamw = AdamW(theirs, fused=fused)
    scalers = [new_scaler(device) for _ in range(2)]
    skipped = []
    for step, event in enumerate(EVENTS):
        scale = scalers[0].get_scale()
        for i, (p, q, r) in enumerate(zip(ours, by_hand, theirs, strict=True)):
            q.grad = torch.randn_like(q)
            p.grad = q.grad * scale
            if event == "everywhere":
                p.grad.fill_(float("inf"))
            elif event == "last" and i == len(ours) - 1:
                p.grad.view(-1)[-1] = float("inf")
            elif event in ("inf", "-inf", "nan") and i == step % len(ours):
                p.grad.view(-1)[0] = float(event)
            r.grad = p.grad.clone()
        their_before = clones(theirs)
        scalers[0].step(scaled)
        scalers[1].step(adamw)
        for scaler in scalers:
            scaler.update()
        if all(map(torch.equal, theirs, their_before)):
            skipped.append(step)
        else:
            plain.step()
        assert_same(ours, by_hand)
        assert_same_states(scaled, ours, plain, by_hand)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert not hasattr(scaled, "grad_scale")
        assert not hasattr(scaled, "found_inf")
    assert skipped == [step for step, event in enumerate(EVENTS) if event is not None]


def test_clipping_of_scaled_gradients(unscale: bool, device: str) -> None:
    """The norm is that of unscaled gradients, whether the scaler or the step divides by the scale."""
    a = make_params(shapes=SHAPES, device=device)
    b, c = clones(a), clones(a)
    optimizers = [Lion(a, fused=False), Lion(b, fused=True), Lion(c)]
    scalers = [new_scaler(device, 32.0) for _ in range(2)]
    for _ in range(3):
        grads = [torch.randn(p.shape, device=device) for p in a]
        norms = []
        for params, optimizer, scaler in zip((a, b), optimizers, scalers, strict=False):
            scale = scaler.scale(torch.ones((), device=device))
            for p, g in zip(params, grads, strict=True):
                p.grad = g * 32.0
            if unscale:
                scaler.unscale_(optimizer)
                norms.append(clip_grad_norm(params, 0.5))
            else:
                norms.append(clip_grad_norm(params, 0.5, grad_scale=scale))
            scaler.step(optimizer)
            scaler.update()
        for p, g in zip(c, grads, strict=True):
            p.grad = g.clone()
        norms.append(torch.nn.utils.clip_grad_norm_(c, 0.5))
        optimizers[2].step()
        for norm in norms[:2]:
            torch.testing.assert_close(norm, norms[2])
        for i, p in enumerate(c):
            for params, optimizer in zip((a, b), optimizers, strict=False):
                m = optimizer.state[params[i]]["exp_avg"]
                torch.testing.assert_close(m, optimizers[2].state[p]["exp_avg"], rtol=1e-5, atol=1e-7)

"""Samples and bad calls of `layer_norm` and `rms_norm`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import BadCall, Sample, Spec

from . import definition
from .op import layer_norm, rms_norm


def _shared_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    yield Sample("vector", (make(33), make(33)))
    yield Sample("rows, no weight", (make(6, 10),))
    yield Sample("rows, weight", (make(6, 10), make(10)))
    yield Sample("one row", (make(1, 10), make(10)))
    yield Sample("one row, residual", (make(10), make(10)), {"residual": make(10)})
    yield Sample("one column", (make(5, 1), make(1)))
    yield Sample("one element", (make(1, 1), make(1)))
    yield Sample("3-d, odd width", (make(2, 3, 33), make(33)))
    yield Sample("many narrow rows", (make(300, 5), make(5)))
    yield Sample("width of several chunks", (make(5, 700), make(700)))
    yield Sample("one row per program", (make(2, 3000), make(3000)))
    yield Sample("residual", (make(4, 40), make(40)), {"residual": make(4, 40)})
    yield Sample("residual, no weight", (make(2, 3, 7),), {"residual": make(2, 3, 7)})
    yield Sample("no rows", (make(0, 4), make(4)))
    yield Sample("no rows, residual", (make(2, 0, 4), make(4)), {"residual": make(2, 0, 4)})
    yield Sample("no columns", (make(3, 0), make(0)))
    yield Sample("weights per head", (make(2, 3, 4, 6), make(4, 6)))
    yield Sample("weights per head, chunks", (make(5, 2, 300), make(2, 300)))
    yield Sample("one head, one column", (make(2, 1, 1), make(1, 1)))


def _ties(make: Callable[..., Tensor], rows: int, cols: int) -> Tensor:
    """Return whole numbers with ties at the top: rows of either sign, rows whose maximum is 0, rows of zeros.

    Samples with ties are larger than gradcheck takes (300 elements): finite differences are wrong at a tie.
    """
    x = (2 * make(rows, cols)).round()
    x[1::4] = -x[1::4].abs() - 1
    x[2::4] = -x[2::4].abs()
    x[3::4] = 0
    return x


def _layer_norm_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    yield from _shared_samples(make)
    yield Sample("weight and bias", (make(6, 10), make(10), make(10)))
    yield Sample("bias alone", (make(6, 10), None, make(10)))
    yield Sample("all, residual", (make(2, 3, 100), make(100), make(100)), {"residual": make(2, 3, 100), "eps": 0.1})
    yield Sample("backward in tiles", (make(2, 8200), make(8200), make(8200)))
    yield Sample("adaptive", (make(2, 3, 10), make(2, 1, 10), make(2, 1, 10)), {"offset": 1.0})
    yield Sample("adaptive, chunks", (make(3, 5, 300), make(3, 1, 300), make(3, 1, 300)), {"offset": 1.0})
    yield Sample("adaptive, one row", (make(1, 10), make(1, 10), make(1, 10)), {"offset": 1.0})
    yield Sample("bias per head, stable", (make(4, 2, 33), None, make(2, 33)), {"stable": True, "eps": 0.1})
    for eps in (1e-5, 0.1):
        options = {"stable": True, "eps": eps}
        yield Sample(f"stable, eps={eps}", (make(6, 33), make(33), make(33)), options)
        yield Sample(f"stable, ties, eps={eps}", (_ties(make, 9, 40), make(40), make(40)), options)
    residual = _ties(make, 8, 20)
    yield Sample("stable, residual", (_ties(make, 8, 20), make(20)), {"stable": True, "eps": 0.1, "residual": residual})


def _rms_norm_all(make: Callable[..., Tensor]) -> Iterator[Sample]:
    yield from _shared_samples(make)
    yield Sample("groups", (make(3, 12), make(12)), {"groups": 3})
    yield Sample("gate", (make(4, 10), make(10)), {"gate": make(4, 10)})
    options = {"gate": make(3, 700), "residual": make(3, 700), "gate_act": "sigmoid"}
    yield Sample("gate by sigmoid, chunks, residual", (make(3, 700), make(700)), options)
    yield Sample("gate first", (make(4, 10), make(10)), {"gate": make(4, 10), "gate_first": True})
    options = {"gate": make(5, 330), "gate_first": True, "groups": 2, "residual": make(5, 330)}
    yield Sample("gate first, groups, residual", (make(5, 330), make(330)), options | {"gate_act": "sigmoid"})
    yield Sample("no rows, gate, weights per head", (make(0, 2, 4), make(2, 4)), {"gate": make(0, 2, 4)})
    yield Sample("gate, bias per head", (make(4, 2, 6), make(2, 6), make(2, 6)), {"gate": make(4, 2, 6)})
    yield Sample("offset", (make(6, 10), make(10)), {"offset": 1.0, "eps": 1e-3})
    yield Sample("offset, residual", (make(3, 130), make(130)), {"offset": 1.0, "residual": make(3, 130)})
    yield Sample("backward in tiles", (make(2, 8200), make(8200)))
    yield Sample("bias", (make(6, 10), make(10), make(10)))
    yield Sample("rounded twice", (make(6, 33), make(33)), {"rounding": "twice"})
    options = {"rounding": "twice", "gate": make(5, 24), "gate_first": True, "groups": 2}
    yield Sample("rounded twice, gate first, groups", (make(5, 24), make(24)), options)


def _rms_norm_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    # the default is the machine epsilon of fp32 or fp64: the definition in float64 has another
    for sample in _rms_norm_all(make):
        yield sample._replace(kwargs={"eps": 1e-6, **sample.kwargs})


def _bad_calls(op: Callable[..., Any], name: str) -> Iterator[BadCall]:
    x, w = torch.ones(2, 3), torch.ones(3)
    yield BadCall("width", lambda: op(x, torch.ones(4)), ValueError, rf"{name}: weight must be \(3,\).*\(4,\)")
    yield BadCall("2-d weight", lambda: op(x, torch.ones(4, 3)), ValueError, r"weight must be \(3,\).*\(4, 3\)")
    nest = partial(torch.nested.nested_tensor, [x])  # torch warns when it makes one
    yield BadCall("nested weight", lambda: op(x, x.shape, nest()), TypeError, "weight must be dense, got a nested")
    deep = torch.ones(2, 5, 4, 3)
    yield BadCall("apart", lambda: op(deep, torch.ones(2, 1, 4, 3)), ValueError, r"neighbouring.*\(2, 1, 4, 3\)")
    yield BadCall("two tables", lambda: op(x, w, torch.ones(2, 3)), ValueError, r"bias must have the shape of weight")
    yield BadCall("dtype", lambda: op(x, out_dtype=torch.int8), ValueError, "out_dtype must be float32.*int8")
    yield BadCall("float64", lambda: op(x, out_dtype=torch.float64), ValueError, "out_dtype must be float32.*float64")
    yield BadCall("0-d x", lambda: op(torch.ones(())), ValueError, "at least one dimension")
    yield BadCall("integer x", lambda: op(torch.ones(2, 3, dtype=torch.int64)), TypeError, "x must be float.*int64")
    yield BadCall("list", lambda: op([1.0]), TypeError, "x must be a tensor, got list")
    yield BadCall("nested x", lambda: op(nest()), TypeError, "x must be dense, got a nested")
    yield BadCall("residual", lambda: op(x, w, residual=w), ValueError, r"residual must .* \(2, 3\); got \(3,\)")
    yield BadCall("eps", lambda: op(x, w, eps=-1.0), ValueError, "eps must be ≥ 0, got -1.0")
    yield BadCall("eps nan", lambda: op(x, w, eps=math.nan), ValueError, "eps must be ≥ 0, got nan")
    yield BadCall("shape", lambda: op(x, (3, 3), w), ValueError, r"normalized_shape \(3, 3\), got \(2, 3\)")
    yield BadCall("no shape", lambda: op(x, ()), ValueError, r"x must end in normalized_shape \(\)")
    yield BadCall("flat weight", lambda: op(x, x.shape, x.view(6)), ValueError, r"weight must.*\(2, 3\); got \(6,\)")
    yield BadCall("eps tensor", lambda: op(x, 3, eps=w), TypeError, "eps must be a number, got Tensor")
    yield BadCall("eps by place", lambda: op(x, w, None, 1e-5), TypeError, r"write \w+\(x, weight, bias, eps=1e-05\)")
    yield BadCall("real n", lambda: op(x, 3.0, w, w), TypeError, r"eps=\.\.\.\), or as.* weight is of type float$")
    yield BadCall("weight list", lambda: op(x, [1.0] * 3), TypeError, "weight must be a tensor, got list")
    yield BadCall("device", lambda: op(x, w.to("meta")), ValueError, "weight is on meta but x is on cpu")


def _layer_norm_bad() -> Iterator[BadCall]:
    yield from _bad_calls(layer_norm, "layer_norm")
    x = torch.ones(2, 3)
    call: Any = partial(layer_norm, x)
    yield BadCall("eps None", lambda: call(eps=None), TypeError, "number ≥ 0, got NoneType")
    for name, value in {"gate": x, "groups": 3, "quantize": "row"}.items():
        message = f"there is no {name}=; .*write rms_norm's other options as torch's operations"
        yield BadCall(f"no {name}", partial(call, **{name: value}), TypeError, message)
    yield BadCall("bias", lambda: call(bias=torch.ones(2)), ValueError, r"bias must be \(3,\).*\(2,\)")


def _rms_norm_bad() -> Iterator[BadCall]:
    yield from _bad_calls(rms_norm, "rms_norm")
    x, w = torch.ones(2, 3), torch.ones(3)
    op: Any = rms_norm
    yield BadCall("eps as bias", lambda: op(w, w, 1e-5), TypeError, r"write rms_norm\(.*eps=1e-05\)")
    yield BadCall("gate", lambda: op(x, gate=w), ValueError, r"gate must have the shape of x \(2, 3\); got \(3,\)")
    yield BadCall("gate dtype", lambda: op(x, gate=x.int()), TypeError, "gate must be float.*int32")
    yield BadCall("gate first", lambda: op(x, gate_first=True), ValueError, "gate_first needs a gate")
    yield BadCall("act", lambda: op(x, gate=x, gate_act="relu"), ValueError, "gate_act must be 'silu' or 'sigmoid'")
    yield BadCall("gate, 8 bits", lambda: op(x, gate=x, quantize="row"), ValueError, "quantize takes no gate")
    yield BadCall("quantize", lambda: op(x, quantize="int8"), ValueError, "quantize must be 'row', 'block' or None")
    yield BadCall("blocks", lambda: op(x, quantize="block"), ValueError, "blocks of 128 columns, got 3 columns")
    yield BadCall("groups", lambda: op(x, groups=2), ValueError, "groups must divide the 3 columns of x, got 2")
    yield BadCall("no groups", lambda: op(x, groups=0), ValueError, "groups must be ≥ 1, got 0")
    yield BadCall("half groups", lambda: op(x, groups=1.5), TypeError, "groups must be an int, got float")
    yield BadCall("groups, 8 bits", lambda: op(x, groups=3, quantize="row"), ValueError, "quantize takes no groups")
    yield BadCall("groups, weights", lambda: op(x, torch.ones(2, 3), groups=3), ValueError, "with groups, weight must")
    yield BadCall("rounding", lambda: op(w, rounding="never"), ValueError, "rounding must be 'once' or 'twice'")
    yield BadCall("twice, offset", lambda: op(w, w, rounding="twice", offset=1.0), ValueError, "takes no offset")
    yield BadCall("twice, bias", lambda: op(w, bias=w, rounding="twice"), ValueError, "rounding='twice' takes no bias")


def _in_8_bits(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, scales = rms_norm(x, w, quantize="row")
    # codes have no gradient, without which a checkpoint computes nothing again
    return values.view(torch.uint8), scales, x.square()


def _layer_norm_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    w, b = make(n), make(n)
    # on a GPU torch computes wider rows of `stable`
    stable = {} if w.is_cuda and n > 16384 else {"layer_norm, stable": lambda x: layer_norm(x, w, b, stable=True)}
    return stable | {
        "layer_norm": lambda x: layer_norm(x, w, b),
        "layer_norm, no vectors": layer_norm,
        "layer_norm, fp32 vectors": lambda x: layer_norm(x, w.float(), b.float()),
        "layer_norm, residual": lambda x: layer_norm(x, w, b, residual=x.flip(-1)),
    }


def _rms_norm_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    w = make(n)
    return {
        "rms_norm": lambda x: rms_norm(x, w),
        "rms_norm, no weight": rms_norm,
        "rms_norm, offset": lambda x: rms_norm(x, w, offset=1.0),
        "rms_norm, residual": lambda x: rms_norm(x, w, residual=x.flip(-1)),
        "rms_norm, gate first": lambda x: rms_norm(x, w, gate=x.flip(-1), gate_first=True),
        "rms_norm, 8 bits": lambda x: _in_8_bits(x, w),
        "rms_norm, rounded twice, gate": lambda x: rms_norm(x, w, rounding="twice", gate=x.flip(-1)),
    }


SPECS = [
    Spec("layer_norm", layer_norm, definition.layer_norm, _layer_norm_samples, tuple(_layer_norm_bad()),
         of_rows=_layer_norm_rows),
    Spec("rms_norm", rms_norm, definition.rms_norm, _rms_norm_samples, tuple(_rms_norm_bad()), of_rows=_rms_norm_rows),
]  # fmt: skip

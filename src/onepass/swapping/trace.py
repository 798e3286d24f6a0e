"""What a layer's forward does with its modules: it is run on stand-ins that record their calls."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# prefix of values in traces; parameters have no such names
_VALUE = "_v"
_SHAPE = 7, 2, 3  # of seven: a forward that unpacks the tensor in two or three raises
_TUPLES = (2, 3)
_ADDITIONS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
EXTRA = "**"
# what a forward may read of its module
_STATE = ("training", "_modules")
_SIMPLE = (type(None), bool, int, float, str)


class Step(NamedTuple):
    """One call of a module or one addition: ``out = module(*args, **options)``."""

    out: str
    module: str  # the name of the layer's module; "+" for the sum of args
    args: tuple[str, ...]
    options: tuple[tuple[str, str], ...]  # (EXTRA, EXTRA) stands for the options that forward has no name for


class Trace(NamedTuple):
    """What a forward does, as names of parameters, of values, and None, True, False.

    Attributes:
        parameters: of forward, as source text with their defaults.
        steps: in order.
        result: what it returns.
        plain: (name, default) of parameters that change what forward does unless they have their defaults.
        extra: the name of the parameter with ``**``, or "".
        extra_is_plain: options without a name change what forward does.
    """

    parameters: tuple[str, ...]
    steps: tuple[Step, ...]
    result: str
    plain: tuple[tuple[str, str], ...]
    extra: str
    extra_is_plain: bool


class UntraceableError(Exception):
    """The forward does more than a `Trace` can describe; the text is a reason for the report.

    Attributes:
        final: so whatever the modules return, one tensor or several.
    """

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class _Given:
    """An argument that a forward may hand on or compare with None; any other use raises."""

    def __init__(self, recorder: _Recorder) -> None:
        vars(self)["recorder"] = recorder

    def _refuse(self, *_: Any) -> Any:
        vars(self)["recorder"].refuse("its forward looks at an argument")

    __bool__ = __eq__ = __hash__ = __len__ = __iter__ = __getitem__ = _refuse
    __class__ = property(_refuse)  # isinstance asks for it


class _Made(Tensor):
    """The tensor that stands for an argument or a result: a forward that asks whether it is a tuple raises."""

    recorder: _Recorder

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # type: ignore[override]
        self.recorder.refuse("its forward asks for the type of a tensor", final=True)


class _Recorder(TorchFunctionMode):
    """Run a forward once on stand-ins for the modules; `tuples` says which of them return tuples."""

    def __init__(self, tuples: dict[str, int]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.tuples = tuples
        self.last = ""  # the module that was called last
        self.refused: UntraceableError | None = None
        self._known: list[tuple[object, str]] = []
        self._modes = _modes()

    def refuse(self, reason: str, final: bool = False) -> NoReturn:
        """Raise an error; it stays in `refused`, because the forward may catch it and go on."""
        self.refused = self.refused or UntraceableError(reason, final)
        raise self.refused

    def know(self, value: object, name: str) -> None:
        self._known.append((value, name))

    def name(self, value: object) -> str:
        """Return the name of a value."""
        for known, name in self._known:
            if known is value:
                return name
        if value is None or isinstance(value, bool):
            return repr(value)
        if not isinstance(value, tuple):
            self.refuse(f"its forward makes a {type(value).__name__} of its own")
        return f"({', '.join(map(self.name, value))},)"

    def call(self, module: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Record a call of a module and return what stands for its result."""
        if _modes() != self._modes:
            self.refuse(f"its forward calls {module} in a context of its own", final=True)
        named = ((key, self.name(value)) for key, value in options.items())
        # an option that forward has no name for is passed on with all others like it
        passed = tuple((EXTRA if name == EXTRA else key, name) for key, name in named)
        out = f"{_VALUE}{len(self.steps)}"
        self.steps.append(Step(out, module, tuple(map(self.name, args)), passed))
        self.last = module
        count = self.tuples.get(module, 0)
        made = tuple(_made(self) for _ in range(count or 1))
        for i, t in enumerate(made):
            self.know(t, f"{out}[{i}]" if count else out)
        return made if count else made[0]

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in _ADDITIONS or kwargs or len(args) != 2 or not all(isinstance(t, Tensor) for t in args):
            if getattr(func, "__name__", "") == "__get__":
                self.refuse(f"its forward reads a tensor's {func.__self__.__name__}")
            options = f" with {', '.join(kwargs)}" if kwargs else ""
            self.refuse(f"its forward calls {_short(func)}{options}")
        out = f"{_VALUE}{len(self.steps)}"
        self.steps.append(Step(out, "+", (self.name(args[0]), self.name(args[1])), ()))
        made = _made(self)
        self.know(made, out)
        return made


class _StandIn:
    """What a layer calls in the place of a module. It is not a module, so hooks of all modules do not see it."""

    def __init__(self, recorder: _Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._recorder.call(self._name, args, options)

    def __getattr__(self, name: str) -> Any:
        self._recorder.refuse(f"its forward reads {self._name}.{name}")


def trace(module: nn.Module, cls: type[nn.Module]) -> Trace:
    """Return what the forward of `cls` does on a module in both modes.

    Raises:
        UntraceableError: it does anything but call modules, add tensors and hand on its arguments, or it depends on
            the mode.
    """
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    _check(parameters)
    evaluation, training = (_of_mode(module, cls, parameters, mode) for mode in (False, True))
    if evaluation != training:
        raise UntraceableError("its forward does something else in training mode")
    autocasts: list[Any] = [torch.autocast(d) for d in ("cpu", "cuda") if d == "cpu" or torch.cuda.is_available()]
    for context in [torch.no_grad(), torch.inference_mode(), *autocasts]:
        with context:
            if _of_mode(module, cls, parameters, True) != training:
                raise UntraceableError("its forward does something else in another of torch's modes")
    return training


def _check(parameters: list[inspect.Parameter]) -> None:
    for p in parameters:
        if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            star = "*" * (p.kind is p.VAR_POSITIONAL)
            raise UntraceableError(f"its forward takes {star}{p.name} by position")
        if p.default is not p.empty and type(p.default) not in _SIMPLE:
            raise UntraceableError(f"its forward's {p.name} has the default {p.default!r}")
    if not parameters or parameters[0].default is not inspect.Parameter.empty:
        raise UntraceableError("its forward needs no tensor")


def _of_mode(module: nn.Module, cls: type[nn.Module], parameters: list[inspect.Parameter], training: bool) -> Trace:
    """Return the trace in one mode: without optional arguments, then with each, then with all that are passed on."""
    optional = [p.name for p in parameters if p.default is not p.empty and p.kind is not p.VAR_KEYWORD]
    extra = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")
    optional += [extra] if extra else []
    steps, result = _run(module, cls, parameters, set(), training)
    plain, passed = [], set()
    for name in optional:
        try:
            found = _run(module, cls, parameters, {name}, training)
        except UntraceableError:
            found = None
        if found is None or _forget(found[0], name, steps) != steps or found[1] != result:
            plain.append(name)
        else:
            passed.add(name)
    steps, result = _run(module, cls, parameters, passed, training)
    defaults = {p.name: p.default for p in parameters}
    unlike = [(name, repr(defaults[name])) for name in plain if name != extra]
    for name, default in unlike:
        if default not in ("None", "True", "False"):
            raise UntraceableError(f"what its forward does depends on {name}")
    texts = tuple(_source(p, parameters) for p in parameters)
    return Trace(texts, steps, result, tuple(unlike), extra, extra in plain)


def _source(p: inspect.Parameter, parameters: list[inspect.Parameter]) -> str:
    """Return a parameter as source text, with the star before the first that is passed by keyword alone."""
    if p.kind is p.VAR_KEYWORD:
        return f"**{p.name}"
    text = p.name if p.default is p.empty else f"{p.name}={p.default!r}"
    first = next((q.name for q in parameters if q.kind is q.KEYWORD_ONLY), "")
    return f"*, {text}" if p.name == first else text


def _forget(steps: tuple[Step, ...], name: str, like: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the steps of a call with an optional argument as those of a call without it."""
    found = []
    for step, base in zip(steps, like, strict=False):
        options = tuple((key, value) for key, value in step.options if key != EXTRA)
        if len(step.args) == len(base.args) and len(options) == len(base.options):
            args = tuple(b if a == name else a for a, b in zip(step.args, base.args, strict=True))
            options = tuple(b if a == (b[0], name) else a for a, b in zip(options, base.options, strict=True))
            step = step._replace(args=args, options=options)
        found.append(step)
    return tuple(found) + steps[len(like) :]


def _run(
    module: nn.Module, cls: type[nn.Module], parameters: list[inspect.Parameter], given: set[str], training: bool
) -> tuple[tuple[Step, ...], str]:
    """Return steps and result of one call; which modules return tuples is found by what the forward takes."""
    tuples: dict[str, int] = {}
    reasons: dict[tuple[int, bool], UntraceableError] = {}
    while True:
        recorder = _Recorder(tuples)
        twin = _twin(module, recorder, training)
        positional, options = _arguments(recorder, parameters, given)
        result = ""
        error: Any = None
        with _random_state_kept() as untouched:
            try:
                with recorder:
                    made = cls.forward(twin, *positional, **options)
                result = recorder.name(made)
            except Exception as e:
                error = e
            # a forward may have caught what it was refused
            error = recorder.refused or error
            if not untouched():
                error = UntraceableError("its forward draws random numbers, or sets their seed", final=True)
        if error is None:
            return tuple(recorder.steps), result
        known = isinstance(error, UntraceableError)
        if known and error.final:
            raise error
        line = str(error) if known else f"its forward raises on stand-ins: {type(error).__name__}: {error}"
        # the reason is the error of the call that got furthest
        reasons[len(recorder.steps), known] = UntraceableError(line.splitlines()[0])
        # the module that was called last may return a tuple, or a longer one
        sizes = [n for n in _TUPLES if n > tuples.get(recorder.last, 0)]
        if not recorder.last or not sizes:
            raise reasons[max(reasons)] from error
        tuples[recorder.last] = sizes[0]


def _twin(module: nn.Module, recorder: _Recorder, training: bool) -> nn.Module:
    """Return a module of the same class and attributes with stand-ins for its modules."""

    class Watched(type(module)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in own and name not in _STATE:
                # it may have another value in a later call
                recorder.refuse(f"its forward reads the attribute {name}")
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            recorder.refuse(f"its forward sets the attribute {name}", final=True)

    own = vars(module)
    twin: Any = object.__new__(Watched)
    vars(twin).update(own)
    stand_ins = {name: _StandIn(recorder, name) for name, m in module._modules.items() if m is not None}
    vars(twin).update(_modules=stand_ins, training=training)
    return twin  # type: ignore[no-any-return]


def _arguments(
    recorder: _Recorder, parameters: list[inspect.Parameter], given: set[str]
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments that the recorder knows: a tensor per required one, an opaque object per one in `given`."""
    positional: list[Any] = []
    options: dict[str, Any] = {}
    for p in parameters:
        required = p.default is p.empty and p.kind is not p.VAR_KEYWORD
        if not required and p.name not in given:
            continue
        value = _made(recorder) if required else _Given(recorder)
        recorder.know(value, EXTRA if p.kind is p.VAR_KEYWORD else p.name)
        if required and p.kind is not p.KEYWORD_ONLY:
            positional.append(value)
        else:
            options["onepass_extra" if p.kind is p.VAR_KEYWORD else p.name] = value
    return positional, options


def _made(recorder: _Recorder) -> Tensor:
    # the recorder would take torch.empty for an operation of the forward
    with torch._C.DisableTorchFunction():
        made = torch.empty(_SHAPE, device="cpu").as_subclass(_Made)
    made.recorder = recorder
    return made


def _modes() -> tuple[Any, ...]:
    """Return what a forward may set around a call, unseen by a `TorchFunctionMode`."""
    autocast = ((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, hooks


@contextmanager
def _random_state_kept() -> Iterator[Callable[[], bool]]:
    """Restore the random states of torch, Python and NumPy; the value says whether they are as they were."""
    numpy = sys.modules.get("numpy")

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else ()

    def untouched() -> bool:
        now = states()
        # NumPy's hold an array
        of_numpy = all(
            bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in zip(now[2], before[2], strict=True)
        )
        return torch.equal(now[0], before[0]) and now[1] == before[1] and of_numpy

    before = states()
    try:
        yield untouched
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])


def _short(func: Any) -> str:
    return str(getattr(func, "__name__", func)).removeprefix("__").removesuffix("__")


__all__ = ["EXTRA", "Step", "Trace", "UntraceableError", "trace"]

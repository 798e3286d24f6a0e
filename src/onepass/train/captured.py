"""Parts of a training step as CUDA graphs, which take the host out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.core.garbage import collected

EAGER = 3  # calls as written before the capture: they compile kernels and let cuBLAS allocate
ALIGN = 64  # elements: gradients in one buffer begin where kernels read 16 bytes at a time


class Captured:
    """Calls a function of tensors; on CUDA it replays a graph of it after some calls as written.

    Args:
        compute: function of tensors whose shapes and dtypes never change; it must not read values on the host.
        device: where the tensors are.
        why_eager: reason not to capture; empty: capture on a CUDA device.
        eager: calls as written before the capture.

    Attributes:
        why_eager: why kernels are launched one by one; empty where a graph is replayed, or will be.
    """

    def __init__(
        self, compute: Callable[..., Any], device: torch.device, why_eager: str = "", eager: int = EAGER
    ) -> None:
        self.compute, self.eager = compute, eager
        self.why_eager = why_eager or ("" if device.type == "cuda" else "no CUDA device")
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream: Any = None  # also of the eager calls: autograd remembers it
        self.static: tuple[Tensor, ...] = ()
        self.result: Any = None

    def __call__(self, *tensors: Tensor) -> Any:
        """Return what the function returns: None or a tensor of its own."""
        if self.graph is None and not self.why_eager:
            if self.eager > 0:
                self.eager -= 1
                return self._run_eager(tensors)
            self._capture(tensors)
        if self.graph is None:
            return self.compute(*tensors)
        for static, new in zip(self.static, tensors, strict=True):
            static.copy_(new, non_blocking=True)
        self.graph.replay()
        # a copy, because the next replay overwrites the graph's result
        return None if self.result is None else self.result.clone()

    def _run_eager(self, tensors: tuple[Tensor, ...]) -> Any:
        """Call the function on the stream of the capture."""
        self.stream = self.stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.compute(*tensors)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        self.static = tuple(tensor.clone() for tensor in tensors)
        graph = torch.cuda.CUDAGraph()
        try:
            # NCCL's watchdog thread queries its events during the capture, which another mode would forbid
            with collected(), torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.result = self.compute(*self.static)
            self.graph = graph
        except RuntimeError as error:
            self.why_eager = str(error.__context__ or error).splitlines()[0]  # the end fails too, but says less
            torch.cuda.synchronize()
            # after a failed capture the random generator still counts as captured, and every draw would fail; a copy of
            # its state does not
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())


class Gradients(Captured):
    """Computes a loss and the gradients of a model's parameters; on CUDA it replays a graph of both.

    Args:
        loss: function of tensors as in `Captured`.
        parameters: whose ``.grad`` each call sets to its own gradients.
        device, why_eager: as in `Captured`.
        together: whether all gradients are views of one buffer, `flat`, for one all-reduce of them.
    """

    def __init__(
        self, loss: Callable[..., Tensor], parameters: Sequence[Tensor], device: torch.device, why_eager: str = "",
        *, together: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(self._compute, device, why_eager)
        self.loss, self.parameters, self.together = loss, parameters, together
        self.flat = torch.empty(0)
        self.views: dict[int, Tensor] = {}  # by place of the parameter

    def _compute(self, *tensors: Tensor) -> Tensor:
        # backward then allocates gradients; those of a capture are written anew by each replay
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.loss(*tensors)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.together:
            self._gather()
        return loss.detach()

    def _gather(self) -> None:
        """Move the gradients into the buffer; a parameter without one keeps none, so that the optimizer skips it."""
        grads = {place: p.grad for place, p in enumerate(self.parameters) if p.grad is not None}
        if grads.keys() != self.views.keys():
            lengths = [-(-grad.numel() // ALIGN) * ALIGN for grad in grads.values()]
            self.flat = next(iter(grads.values())).new_zeros(sum(lengths))
            pieces = zip(grads.items(), torch.split(self.flat, lengths), strict=True)
            self.views = {place: piece[: grad.numel()].view(grad.shape) for (place, grad), piece in pieces}
        torch._foreach_copy_(list(self.views.values()), list(grads.values()))
        for place, parameter in enumerate(self.parameters):
            parameter.grad = self.views.get(place)

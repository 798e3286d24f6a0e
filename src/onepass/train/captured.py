"""Forward and backward of a training step as one CUDA graph, which takes the host out of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onepass.core.garbage import collected

WARMUP = 3  # passes before the capture: they compile kernels and let cuBLAS allocate


class Gradients:
    """Computes a loss and the gradients of a model's parameters; on CUDA it replays a graph of both.

    Args:
        loss: function of tensors whose shapes and dtypes never change; it must not read values on the host.
        parameters: whose ``.grad`` each call sets to its own gradients.
        device: where the tensors are.
        why_eager: reason not to capture; empty: capture on a CUDA device.

    Attributes:
        why_eager: why kernels are launched one by one; empty where a graph is replayed, or will be.
    """

    def __init__(
        self, loss: Callable[..., Tensor], parameters: list[Tensor], device: torch.device, why_eager: str = ""
    ) -> None:
        self.loss, self.parameters = loss, parameters
        self.why_eager = why_eager or ("" if device.type == "cuda" else "no CUDA device")
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: tuple[Tensor, ...] = ()
        self.result = torch.empty(0)

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Set the gradients; return the loss."""
        if self.graph is None and not self.why_eager:
            self._capture(tensors)
        if self.graph is None:
            self._forget()
            return self._compute(tensors)
        for static, new in zip(self.static, tensors, strict=True):
            static.copy_(new, non_blocking=True)
        self.graph.replay()
        # the next replay overwrites the graph's own
        return self.result.clone()

    def _compute(self, tensors: tuple[Tensor, ...]) -> Tensor:
        loss = self.loss(*tensors)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        self.static = tuple(tensor.clone() for tensor in tensors)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                self._compute(self.static)
        torch.cuda.current_stream().wait_stream(side)
        # backward inside the capture then makes gradients that each replay writes anew
        self._forget()
        graph = torch.cuda.CUDAGraph()
        try:
            with collected(), torch.cuda.graph(graph):
                self.result = self._compute(self.static)
            self.graph = graph
        except RuntimeError as error:
            self.why_eager = str(error).splitlines()[0]
            torch.cuda.synchronize()
            # after a failed capture the random generator still counts as captured, and every draw would fail; a copy of
            # its state does not
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())

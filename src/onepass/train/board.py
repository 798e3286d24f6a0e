"""The metrics of a run for TensorBoard, in the run's directory: `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from onepass.train.commands.errors import UserError
from onepass.train.metrics import Row
from onepass.train.run import Run


def require() -> None:
    """Raise UserError if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError("--tensorboard needs tensorboard: pip install tensorboard")


@contextlib.contextmanager
def written(run: Run, step: int) -> Iterator[None]:
    """Write every row of metrics for TensorBoard as well; what an earlier process wrote after `step` is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    def write(row: Row) -> None:
        for name, value in row.items():
            if name != "step":
                writer.add_scalar(name, value, row["step"])

    with SummaryWriter(str(run.path), purge_step=step + 1) as writer:
        run.listeners.append(write)
        try:
            yield
        finally:
            run.listeners.remove(write)

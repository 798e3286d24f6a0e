"""Lightning: a routed feed-forward learns which tokens need it; Lion trains it, and a checkpoint brings it back.

Run: python examples/lightning_module.py      needs: pip install lightning
"""

from __future__ import annotations

import logging
import tempfile
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from onepass.nn import RMSNorm, RoutedFeedForward
from onepass.optim import Lion

DIM, LENGTH = 32, 128


class Routed(lightning.LightningModule):
    """Tokens with a hard task (a product of two features) among tokens with an easy one (a copy)."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(4, DIM)
        self.routed = RoutedFeedForward(DIM, k=1 / 8, light_mult=0.25, heavy_mult=4)
        self.norm, self.head = RMSNorm(DIM), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        y, routing = self.routed(h, return_routing=True)
        return self.head(self.norm(h + y)).squeeze(-1), routing.indices

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x)[0], y)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        guess, chosen = self(x)
        hard = x[..., 3].gather(1, chosen).mean()  # share of the heavy branch that hard tokens got
        self.log_dict({"error": F.mse_loss(guess, y), "hard": hard}, prog_bar=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Lion(self.parameters(), lr=self.hparams["lr"], weight_decay=0.1)


def tokens(count: int) -> TensorDataset:
    x = torch.randn(count, LENGTH, 4)
    x[..., 3] = (torch.rand(count, LENGTH) < 1 / 8).float()  # a mark: this token is hard
    y = torch.where(x[..., 3] > 0, 2 * x[..., 0] * x[..., 1], x[..., 0])
    return TensorDataset(x, y)


def main() -> None:
    warnings.filterwarnings("ignore", module="lightning")  # about workers and loggers that this run does without
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    training, validation = DataLoader(tokens(512), 32, shuffle=True), DataLoader(tokens(64), 64)
    with tempfile.TemporaryDirectory() as out:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(max_epochs=12, accelerator="auto", devices=1, default_root_dir=out, **quiet)
        model = Routed()
        before = trainer.validate(model, validation, verbose=False)[0]
        trainer.fit(model, training)
        after = trainer.validate(model, validation, verbose=False)[0]
        again = Routed.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        assert trainer.validate(again, validation, verbose=False)[0] == after
    print(f"error {before['error']:.2f} to {after['error']:.2f}")
    print(f"share of the heavy branch for hard tokens {before['hard']:.2f} to {after['hard']:.2f}")


if __name__ == "__main__":
    main()

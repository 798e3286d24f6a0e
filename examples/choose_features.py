"""Soft top-k outside transformers: choose k of 30 features for a classifier, and compare with a lasso.

The gates of `onepass.topk` choose exactly k features and carry a gradient to all scores. A lasso reaches k by its
penalty.

Run: python examples/choose_features.py      needs: pip install scikit-learn
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import onepass
from onepass.optim import Lion


def chosen_by_topk(x: Tensor, y: Tensor, k: int) -> list[int]:
    """Train scores and a linear classifier together; the k highest scores are the choice."""
    torch.manual_seed(0)
    scores = torch.zeros(x.shape[1]).requires_grad_()
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = Lion([scores, weight, bias], lr=0.01)
    for step in range(400):
        # eps falls: first every feature has a share, at the end the gates are nearly 0 or 1
        gates = onepass.soft_topk(scores, k, eps=1.0 * 0.01 ** (step / 400))
        loss = F.binary_cross_entropy_with_logits(x @ (gates * weight) + bias, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return sorted(onepass.topk(scores, k).indices.tolist())


def chosen_by_lasso(x: Tensor, y: Tensor, k: int) -> list[int]:
    """Raise the inverse penalty until k features have a weight, then keep the k largest."""
    for power in range(60):
        lasso = LogisticRegression(l1_ratio=1.0, solver="liblinear", C=1e-3 * 1.2**power).fit(x, y)
        if (lasso.coef_ != 0).sum() >= k:
            break
    return sorted(abs(lasso.coef_[0]).argsort()[-k:].tolist())


def main() -> None:
    warnings.filterwarnings("ignore", module="sklearn")
    data = load_breast_cancer()
    halves = train_test_split(data.data, data.target, test_size=0.5, random_state=0, stratify=data.target)
    scaler = StandardScaler().fit(halves[0])
    x, x_test = (torch.tensor(scaler.transform(part), dtype=torch.float32) for part in halves[:2])
    y, y_test = (torch.tensor(part, dtype=torch.float32) for part in halves[2:])
    everything = LogisticRegression().fit(x, y).score(x_test, y_test)
    print(f"all 30 features: accuracy {everything:.3f} on the other half of the data")
    for k in (2, 4, 8):
        scores = {}
        for name, choose in (("top-k", chosen_by_topk), ("lasso", chosen_by_lasso)):
            chosen = choose(x, y, k)
            scores[name] = LogisticRegression().fit(x[:, chosen], y).score(x_test[:, chosen], y_test)
            names = ", ".join(data.feature_names[i] for i in chosen[:4]) + (", …" if k > 4 else "")
            print(f"k = {k}  {name}  accuracy {scores[name]:.3f}  {names}")


if __name__ == "__main__":
    main()

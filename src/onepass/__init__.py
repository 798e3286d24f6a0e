"""PyTorch operators that pass over memory once, and the conditional computation they exist for."""

from onepass.ops.norm.op import layer_norm, rms_norm
from onepass.ops.soft_topk.op import soft_topk
from onepass.ops.soft_topk.op_descent import coor_descent
from onepass.ops.soft_topk.op_topk import TopK, topk
from onepass.ops.weighted_sum.op import weighted_sum

__version__ = "0.1.0"

__all__ = ["TopK", "__version__", "coor_descent", "layer_norm", "rms_norm", "soft_topk", "topk", "weighted_sum"]

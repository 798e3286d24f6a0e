"""onepass's operators as a kernel of the Hugging Face Hub, with layers for `kernels.kernelize`."""

from onepass.ops.coor_descent.op import coor_descent
from onepass.ops.norm.op import Quantized, layer_norm, rms_norm
from onepass.ops.norm.rope import qk_norm_rope
from onepass.ops.soft_topk.op import soft_topk
from onepass.ops.topk.op import TopK, topk
from onepass.ops.weighted_sum.op import weighted_sum

from . import layers

__all__ = [
    "Quantized",
    "TopK",
    "coor_descent",
    "layer_norm",
    "layers",
    "qk_norm_rope",
    "rms_norm",
    "soft_topk",
    "topk",
    "weighted_sum",
]

"""Whole routed layers in few calls: the autograd nodes behind `onepass.nn`, and the kernels that only they use."""

"""One folder per operator: README, reference, kernels, op, spec."""

"""One folder per operator: README, definition, kernels, op, spec."""

"""Names and arguments of well-known public kernels over onepass operators: change one import line, nothing else."""

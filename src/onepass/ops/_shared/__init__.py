"""Code that several operators share: checks of scores and options, row views, tiles and sums of Triton kernels."""

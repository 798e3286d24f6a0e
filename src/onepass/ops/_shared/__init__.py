"""What several operators need: checks of scores and options, row views, tiles and sums of Triton kernels."""

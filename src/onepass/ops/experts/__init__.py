"""Experts: each token to the feed-forwards that a router chose for it."""

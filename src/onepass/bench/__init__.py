"""Measuring: every operator's cases against a device copy and the rivals that are installed."""

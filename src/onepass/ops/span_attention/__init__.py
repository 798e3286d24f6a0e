"""Attention in which every query sees one run of keys: local windows, prefixes, padding, in one operator."""

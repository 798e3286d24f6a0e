"""Choices that depend on the past alone, for language models; see README.md in this folder."""

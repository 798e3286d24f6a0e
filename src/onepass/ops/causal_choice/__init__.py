"""Causal choices, for language models: a token's choice depends on no later token; see README.md in this folder."""

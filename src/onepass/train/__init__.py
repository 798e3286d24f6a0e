"""The training job: a routed model that learns from text (`onepass train`), pictures of its routing (`onepass show`).

`--task masked` trains an encoder that guesses hidden bytes, `--task causal` a language model.
"""

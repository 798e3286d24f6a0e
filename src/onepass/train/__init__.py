"""The main job: a routed encoder that learns from text (`onepass train`), pictures of its choices (`onepass show`)."""

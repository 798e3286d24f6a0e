"""The bench: measure every operator's cases against a device copy and the installed rivals."""

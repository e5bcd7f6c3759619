"""Errors of a model on disk. No torch here: the HTTP process raises these too."""


class ModelError(ValueError):
    """The model cannot be served as it is; the message names the file, the value and what would work."""

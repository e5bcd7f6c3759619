"""Defines why a model cannot run through transformers here."""


class UnsupportedError(Exception):
    """A model cannot run on the page pool; the message is a clause that gives the reason."""

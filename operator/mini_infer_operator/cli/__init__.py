"""`mini-infer`, the user's tool."""

from mini_infer_operator.cli.entry import main

__all__ = ["main"]

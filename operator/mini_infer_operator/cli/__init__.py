"""`mini-infer`, the user's tool."""

from collections.abc import Sequence

from mini_infer_process.endings import ends_quietly

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code."""
    with ends_quietly("mini-infer"):  # from here on: reading flags takes its time on a busy machine, too
        from mini_infer_operator.cli.entry import main as run

        return run(arguments)

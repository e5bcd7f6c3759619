"""How the processes of a server log: one line an event, on stderr."""

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str) -> None:
    """For this process."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )

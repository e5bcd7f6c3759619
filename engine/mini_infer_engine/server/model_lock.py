"""Locks a copied model while the engine runs, so that a copy that needs room does not delete it."""

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

from mini_infer_contract.launch import MODEL_MANIFEST

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked_model(model: str) -> Iterator[None]:
    """Holds a shared lock on the manifest of a model's folder; does nothing for a model that `mini-infer fetch` did not
    copy. A file system without locks is logged: models on it are not deleted either.
    """
    file = Path(model).expanduser() / MODEL_MANIFEST
    with contextlib.ExitStack() as stack:
        try:
            if file.is_file():
                fcntl.flock(stack.enter_context(file.open("rb")), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            logger.warning("%s cannot be locked: %s", file, error.strerror or error)
        yield

"""Builds models without memory, on the meta device, so that their checkpoints are compared before any is taken."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mini_infer_engine.config.errors import ModelError


@contextmanager
def without_memory(dtype: torch.dtype) -> Iterator[None]:
    """Parameters that are created inside have no memory, and are in `dtype` unless they set their own.

    Raises ModelError for sizes that overflow.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    except (RuntimeError, TypeError) as error:  # what torch raises for sizes that overflow
        reason = str(error).partition("\n")[0]
        raise ModelError(f"config.json asks for layers that no memory holds ({reason}): repair its sizes.") from None
    finally:
        torch.set_default_dtype(usual)

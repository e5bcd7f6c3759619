"""Names exactly the model, dtype, layout and version of an engine's blocks, for memory that outlives the engine."""

import hashlib
import re

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core_process.weights_identity import weights_identity
from mini_infer_engine.version import __version__

_DIGEST = re.compile("[0-9a-f]{64}")


def blocks_identity(
    settings: EngineSettings, layout: str, page_tokens: int, page_bytes: int, device: str, *, with_weights: bool = True
) -> str:
    """Returns a digest that differs wherever the bytes of equal tokens' pages do. `layout` names the form of a page.

    Reads all of the checkpoint `with_weights`, unless its digest is known. Memory that only engines of one server see
    needs no weights.
    """
    parts = (
        weights_identity(settings, None) if with_weights else "",
        layout,
        f"{page_tokens} tokens, {page_bytes} bytes",
        f"{device}, {settings.attention_backend}, {settings.model_impl}, {settings.dtype}",
        f"{settings.tensor_parallel_size} x {settings.pipeline_parallel_size} ranks",
        __version__,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def is_blocks_identity(name: str) -> bool:
    """Returns True if a name is such a digest already."""
    return _DIGEST.fullmatch(name) is not None

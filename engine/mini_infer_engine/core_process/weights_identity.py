"""Names the weights of an engine by their contents, for keys and values that outlive it or leave it."""

import hashlib
from pathlib import Path

import msgspec

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.dry.dry_run import DryRun
from mini_infer_engine.kv_transfer.protocol.checkpoint_digest import checkpoint_digest
from mini_infer_engine.model_path import resolve_model


def weights_identity(settings: EngineSettings, dry_run: DryRun | None) -> str:
    """Returns a name of the weights as they are loaded, which differs wherever keys and values of equal tokens do.

    Reads all of the checkpoint, unless its digest is known.
    """
    if dry_run is not None:
        return f"dry-run:{hashlib.sha256(msgspec.json.encode(dry_run.script)).hexdigest()}"
    is_dummy = settings.load_format == "dummy"
    folder = resolve_model(settings.model, settings.revision, weights=not is_dummy)
    if is_dummy:
        config = hashlib.sha256((Path(folder) / "config.json").read_bytes()).hexdigest()
        content = f"dummy:{config}:{settings.seed}"
    else:
        content = checkpoint_digest(Path(folder))
    overrides = f":{settings.hf_overrides}" if settings.hf_overrides else ""
    return f"{content}:{_rounding(settings)}{overrides}"


def _rounding(settings: EngineSettings) -> str:
    """Names the quantisation that is applied to the checkpoint's weights when they are loaded."""
    kind = settings.quantization
    if kind is None:
        return "" if settings.gguf_blocks == "auto" else f"gguf-{settings.gguf_blocks}"
    calibration = [settings.quantization_calibration] if kind in ("int4", "w8a8-int8") else []
    layers = ["head"] * settings.quantize_lm_head + ["embeddings"] * settings.quantize_embeddings
    return ",".join([kind, *calibration, *layers])

"""Opens the weights of drafts that read hidden states: the layer in the target's checkpoint, or an EAGLE-3 folder."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.architectures import MTP
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.options.speculation import speculation_of
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.models.eagle3 import Eagle3Model
from mini_infer_engine.models.hidden_draft import HiddenDraft
from mini_infer_engine.models.mtp import MtpModel
from mini_infer_engine.models.weights.checkpoint import Checkpoint
from mini_infer_engine.models.weights.loader import fit_checkpoint
from mini_infer_engine.models.weights.safetensors_checkpoint import SafetensorsCheckpoint
from mini_infer_engine.models.weights.without_memory import without_memory
from mini_infer_engine.speculation.draft_files import DraftFiles, Eagle3Files
from mini_infer_engine.speculation.eagle3_files import verifier_of

log = logging.getLogger(__name__)

_EMBEDDINGS = "embed_tokens.weight"


def open_hidden_draft(
    settings: EngineSettings,
    found: DraftFiles | Eagle3Files | None,
    target: CausalModel,
    directory: Path | None,
    dtype: torch.dtype,
    quantize: Callable[[DecoderModel], None],
) -> tuple[HiddenDraft, Checkpoint | None] | None:
    """Returns the draft without memory and its checkpoint, or None if the settings name no draft of this kind.

    `directory` is the target's folder, and `quantize` prepares layers as its checkpoint stores them. No checkpoint
    means random weights.

    Raises:
        ModelError: the target or the checkpoint has no such draft, or it does not fit.
    """
    speculation = speculation_of(settings)
    method = "eagle3" if isinstance(found, Eagle3Files) else None if speculation is None else speculation.method
    if method not in ("mtp", "eagle3"):
        return None
    if not isinstance(target, DecoderModel):
        raise ModelError(
            f"speculative_method = {method!r}: {target.config.architecture} runs through transformers, which does not "
            "collect hidden states of layers yet: use 'ngram' or 'draft_model'."
        )
    is_dummy = settings.load_format == "dummy"
    if isinstance(found, Eagle3Files):
        return _open_eagle3(found, target, dtype, is_dummy=is_dummy)
    return _open_mtp(target, None if is_dummy else directory, dtype, quantize)


def _open_mtp(
    target: DecoderModel, directory: Path | None, dtype: torch.dtype, quantize: Callable[[DecoderModel], None]
) -> tuple[MtpModel, Checkpoint | None]:
    names, config = target.mtp_names, target.config
    if names is None:
        raise ModelError(
            f"speculative_method = 'mtp': multi-token prediction of {config.architecture} is not supported, but that "
            f"of {', '.join(sorted(MTP))}: use 'ngram', or name a draft by speculative_model."
        )
    checkpoint = None if directory is None else SafetensorsCheckpoint(directory)
    prefix = names.prefix_of(config.num_layers)
    if checkpoint is not None and not any(name.startswith(prefix) for name in checkpoint.tensors):
        raise ModelError(
            f"speculative_method = 'mtp': {directory} has no multi-token-prediction layer (no tensor begins with "
            f"{prefix}): use a checkpoint that has it, 'ngram', or name a draft by speculative_model."
        )
    with without_memory(dtype):
        model = MtpModel(target, names)
        quantize(model)
    if checkpoint is not None and directory is not None:
        fit_checkpoint(model, checkpoint, directory)
    return model, checkpoint


def _open_eagle3(
    found: Eagle3Files, target: DecoderModel, dtype: torch.dtype, *, is_dummy: bool
) -> tuple[Eagle3Model, Checkpoint | None]:
    directory = found.directory
    if (verifier := verifier_of(Fields.read(directory / "config.json"))) is not None:
        log.info("%s was trained for %s", directory, verifier)
    checkpoint = None if is_dummy else SafetensorsCheckpoint(directory, is_text_model=False)
    has_embeddings = checkpoint is not None and _EMBEDDINGS in checkpoint.tensors
    if not has_embeddings and found.shape.layer.hidden_size != target.config.hidden_size:
        raise ModelError(
            f"{directory}: {_EMBEDDINGS} is missing, and the model's embeddings have {target.config.hidden_size} "
            f"numbers, not {found.shape.layer.hidden_size}: choose the head that was trained for this model."
        )
    with without_memory(dtype):
        model = Eagle3Model(target, found.shape, has_embeddings=has_embeddings)
    if checkpoint is not None:
        fit_checkpoint(model, checkpoint, directory)
    return model, checkpoint


def complete_draft(model: HiddenDraft, directory: Path | None) -> None:
    """Checks the draft's loaded weights; `directory` is that of an EAGLE-3 head, None if its weights are random.

    Raises:
        ModelError: `d2t` names a token that the model has not.
    """
    if not isinstance(model, Eagle3Model) or model.d2t is None:
        return
    count, vocab_size = len(model.d2t), model.config.vocab_size
    if directory is None:
        places = torch.arange(count, device=model.d2t.device)
        model.d2t.copy_(places * vocab_size // count - places)
    token_ids = model.token_ids
    assert token_ids is not None
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size or len(set(token_ids.tolist())) < count:
        raise ModelError(
            f"{directory}: d2t must name {count} different tokens of the model's {vocab_size}: choose the head that "
            "was trained for this model."
        )

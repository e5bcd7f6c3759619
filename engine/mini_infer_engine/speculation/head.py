"""Drafts tokens by a trained head from hidden states of the model itself, as a chain of small steps without attention.

As in EAGLE-3 (Li et al., arXiv:2503.01840) it reads several layers at once, feeds its own state back, and is trained
over the whole chain. As in recurrent drafters (Zhang et al., arXiv:2403.09919) a step sees that state and the newest
token alone: it has no keys and values, so cached prefixes, swaps and passes without drafts leave it nothing to read.
The hidden states of one pass with drafts are all that it needs. Token embeddings, last norm and output matrix are the
model's. It may draft from a part of the vocabulary alone, as in EAGLE-3 and FR-Spec (Zhao et al., arXiv:2502.14856): if
the vocabulary is large, most of what a draft reads is the output matrix.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.layers.placement import Placement
from mini_infer_engine.models.weights.checkpoint import check_fit
from mini_infer_engine.models.weights.safetensors_checkpoint import SafetensorsCheckpoint

ARCHITECTURE = "MiniInferSpeculativeHead"
"""Name of the head in `architectures` of its config.json."""
EPS = 1e-6
"""Epsilon of its norms, which have no weights."""
_SIZES = ("hidden_size", "width", "intermediate_size")
_VOCABULARY = "draft_vocab_size"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes in a head's config.json."""

    hidden_size: int
    """The model's hidden size."""
    width: int
    """Width of the head's state."""
    intermediate_size: int
    layers: tuple[int, ...]
    """Layers of the model whose outputs it reads, from 0, in ascending order."""
    draft_vocab_size: int | None = None
    """Tokens that it may draft; None means all."""

    @property
    def num_features(self) -> int:
        """Numbers that it reads for each token."""
        return len(self.layers) * self.hidden_size

    def to_config(self) -> dict[str, Any]:
        """Returns the contents of config.json."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {"architectures": [ARCHITECTURE], **values, "layers": list(self.layers)}

    @classmethod
    def read(cls, path: Path) -> "HeadShape":
        """Reads a head's config.json. Raises ModelError if it is none."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            architectures = values["architectures"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path} is no config.json of a speculative head: {error!r}.") from None
        if architectures != [ARCHITECTURE]:
            raise ModelError(f"{path} is of {architectures}, and a speculative head's says {ARCHITECTURE}.")
        try:
            sizes = {name: int(values[name]) for name in _SIZES}
            if values.get(_VOCABULARY) is not None:
                sizes[_VOCABULARY] = int(values[_VOCABULARY])
            layers = tuple(int(layer) for layer in values["layers"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path} is no config.json of a speculative head: {error!r}.") from None
        for name, size in sizes.items():
            if size < 1:
                raise ModelError(f"{path}: {name} = {size}: it must be at least 1.")
        if not layers or layers != tuple(sorted(set(layers))) or layers[0] < 0:
            raise ModelError(f"{path}: layers = {list(layers)}: they must be numbers from 0 in ascending order.")
        return cls(**sizes, layers=layers)


class SpeculativeHead(nn.Module):
    """The trained head, which drafts from the model's hidden states. Rows are sequences."""

    d2t: Tensor  # of heads with a vocabulary of their own, as EAGLE-3's checkpoints name it

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fuse = nn.Linear(shape.num_features, shape.width, bias=False)
        self.embedded = nn.Linear(shape.hidden_size, shape.width, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.hidden_size, bias=False)
        if shape.draft_vocab_size is not None:
            # [draft_vocab_size] int64: what is to be added to a number of a token here to get the model's.
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))

    @property
    def token_ids(self) -> Tensor | None:
        """The tokens that it may draft, [draft_vocab_size] int64, ascending; None means all."""
        if self.shape.draft_vocab_size is None:
            return None
        return torch.arange(self.shape.draft_vocab_size, device=self.d2t.device) + self.d2t

    def begin(self, features: Tensor) -> Tensor:
        """Returns the first state [rows, width] from hidden states [rows, layers * hidden_size], normed by layer."""
        layers = features.view(-1, len(self.shape.layers), self.shape.hidden_size)
        state: Tensor = self.fuse(_normed(layers).flatten(-2))
        return state

    def step(self, state: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next state, and the input of the model's last norm and output matrix, [rows, hidden_size].

        `embedding` [rows, hidden_size] is that of the newest token.
        """
        x = _normed(state) + self.embedded(_normed(embedding))
        gate, up = self.gate_up(_normed(x)).chunk(2, dim=-1)
        x = x + self.down(functional.silu(gate) * up)
        return x, self.out(_normed(x))


def _normed(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def load_head(
    directory: Path,
    hidden_size: int,
    num_layers: int,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    dummy: bool,
    seed: int,
) -> SpeculativeHead:
    """Loads a head for a model of these sizes, with random weights if `dummy`.

    Raises:
        ModelError: it is for another model, or unreadable. Sizes are checked before memory is taken.
    """
    shape = HeadShape.read(directory / "config.json")
    if shape.hidden_size != hidden_size or shape.layers[-1] >= num_layers:
        raise ModelError(
            f"{directory}: this head reads layers {list(shape.layers)} of width {shape.hidden_size}, and the model has "
            f"{num_layers} layers of width {hidden_size}: choose the head that was trained for it."
        )
    with torch.device("meta"):
        head = SpeculativeHead(shape).to(dtype)
    checkpoint = None if dummy else SafetensorsCheckpoint(directory, is_text_model=False)
    if checkpoint is not None:
        check_fit(checkpoint, directory, _placements(head), ARCHITECTURE, lambda _: False)
    memory = {name: torch.empty_like(tensor, device=device) for name, tensor in head.state_dict().items()}
    head.load_state_dict(memory, assign=True)
    if checkpoint is None:
        generator = torch.Generator().manual_seed(seed)
        for matrix in head.parameters():
            matrix.data.copy_(torch.randn(matrix.shape, generator=generator) * matrix.shape[-1] ** -0.5)
        if (count := shape.draft_vocab_size) is not None:
            places = torch.arange(count)
            head.d2t.copy_(places * vocab_size // count - places)
    else:
        expected = _placements(head)
        for file in {tensor.file for tensor in checkpoint.tensors.values()}:
            names = [name for name, tensor in checkpoint.tensors.items() if tensor.file == file]
            checkpoint.read(file, dict.fromkeys(names), lambda name, tensor: expected[name].place(tensor))
    token_ids = head.token_ids
    if token_ids is not None:
        is_ascending = bool((token_ids[1:] > token_ids[:-1]).all())
        if not is_ascending or token_ids[0] < 0 or token_ids[-1] >= vocab_size:
            raise ModelError(
                f"{directory}: d2t must name {len(token_ids)} of the model's {vocab_size} tokens in ascending order: "
                "choose the head that was trained for this model."
            )
    return head.eval().requires_grad_(False)


def _placements(head: SpeculativeHead) -> dict[str, Placement]:
    return {name: Placement(tensor) for name, tensor in head.state_dict().items()}

"""Maps a checkpoint's tensors to the parameters of a model of transformers, by the rules of its `from_pretrained`.

Checkpoints have older names, names with or without the prefix of the base model, and tensors that transformers 5 stores
together, such as the experts of a layer. Renaming and conversion are transformers' own; reading is ours.
"""

import re
import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.parallelism.tensor_parallel import Shard
from mini_infer_engine.layers.placement import Part, Placement
from mini_infer_engine.models.transformers_backend.sharding.parameters import ShardedParameter
from mini_infer_engine.models.weights.checkpoint import StoredTensor


@dataclass(slots=True)
class Conversion:
    """Tensors of a checkpoint that become one or more parameters together."""

    converter: WeightConverter
    target: str
    """The parameter that names the conversion for transformers."""
    sources: dict[str, str] = field(default_factory=dict)
    """The checkpoint's names, in transformers' order, and the pattern that each has matched."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the checkpoint's tensors."""
    targets: frozenset[str] = frozenset()
    """All parameters that are made, once `check` has run."""
    parts: dict[str, Part] = field(default_factory=dict)
    """The parts that a rank reads of the sources; others are read whole."""

    def check(self, model: PreTrainedModel, sharded: Mapping[str, ShardedParameter]) -> None:
        """Converts without memory, and sets `targets`. `sharded` are the parameters of which a rank has a part.

        Raises:
            ModelError: the tensors do not fit each other, or the parameters that config.json asks for.
        """
        without_memory = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        try:
            made = self.convert(model, without_memory)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise ModelError(
                f"{self.target}: its {len(self.sources)} tensors in the checkpoint do not fit each other ({reason}): "
                "config.json is of another model."
            ) from None
        expected = model.state_dict()
        for name, tensor in made.items():
            shape = expected[name].shape if name in expected else ()
            shape = sharded[name].whole if name in sharded else tuple(shape)
            if tuple(tensor.shape) != shape:
                raise ModelError(
                    f"{name}: the checkpoint's tensors make {list(tensor.shape)}, config.json asks for {list(shape)}."
                )
        self.targets = frozenset(made)

    def shard(self, sharded: Mapping[str, ShardedParameter]) -> frozenset[str]:
        """Reads no more of the sources than a rank's part of the parameter is made of, where that is known.

        Returns the names of sources that the rank does not need. Other conversions read all, and are cut afterwards.
        """
        part = sharded[self.target].part if self.targets == {self.target} and self.target in sharded else None
        if part is None or not self._stacks_experts:
            return frozenset()
        by_pattern: dict[str, list[str]] = {}
        for name, pattern in self.sources.items():
            by_pattern.setdefault(pattern, []).append(name)
        if part.dim == 0:
            ((begin, end),) = part.shard.ranges
            needed = {name for names in by_pattern.values() for name in names[begin:end]}
            others = frozenset(self.sources.keys() - needed)
            self.sources = {name: pattern for name, pattern in self.sources.items() if name in needed}
            return others
        offset = 0
        for pattern in self.converter.source_patterns:
            for name in by_pattern[pattern]:
                size = self.shapes[name][part.dim - 1]
                begin = offset if part.dim == 1 else 0
                ranges = [(first - begin, last - begin) for first, last in part.shard.ranges]
                own = tuple((first, last) for first, last in ranges if first >= 0 and last <= size)
                self.parts[name] = Part(part.dim - 1, Shard(size, own))
            offset += size
        return frozenset()

    @property
    def _stacks_experts(self) -> bool:
        """True if the parameter is a stack of experts, each of one tensor, or of several below each other."""
        merge, *others = self.converter.operations
        if not isinstance(merge, MergeModulelist) or merge.dim or len({*self.sources.values()}) > 1 + len(others):
            return False
        return not others or (len(others) == 1 and isinstance(others[0], Concatenate) and others[0].dim == 1)

    def convert(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the parameters by name. `tensors` has all sources."""
        converter = deepcopy(self.converter)
        for name, pattern in self.sources.items():
            converter.add_tensor(self.target, name, pattern, tensors[name])  # type: ignore[arg-type]  # it takes both
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


@dataclass(frozen=True, slots=True)
class Names:
    """The parameters into which the tensors of one checkpoint go."""

    renamed: Mapping[str, str]
    """Parameters by the checkpoint's names."""
    conversions: tuple[Conversion, ...]


def names_of(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> Names:
    """Returns where `from_pretrained` would load these tensors."""
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    renamed: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            continue  # the loader refuses it, or the model says that it is unused
        if pattern is None:
            renamed[name] = target
        else:
            conversion = conversions.setdefault(target, Conversion(by_pattern[pattern], target))
            conversion.sources[name] = pattern
            conversion.shapes[name] = stored[name].shape
    return Names(renamed, tuple(conversions.values()))


class Gathering:
    """Collects the tensors of a conversion from several threads, and fills the parameters once all are there."""

    def __init__(self, conversion: Conversion, model: PreTrainedModel, fill: Callable[[str, Tensor], None]) -> None:
        """Takes `fill`, which copies a converted tensor to the parameter of this name."""
        self._conversion, self._model, self._fill = conversion, model, fill
        self._tensors: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor of the checkpoint; the last one converts and copies."""
        with self._lock:
            self._tensors[name] = tensor
            if len(self._tensors) < len(self._conversion.sources):
                return
        for target, made in self._conversion.convert(self._model, self._tensors).items():
            self._fill(target, made)
        self._tensors.clear()


@dataclass(frozen=True, slots=True)
class GatheredPlacement(Placement):
    """The target of one of several tensors that are converted together."""

    name: str = ""
    gathering: Gathering | None = None

    @property
    def is_copied(self) -> bool:
        """False: the tensors are converted."""
        return False

    def place(self, tensor: Tensor) -> None:
        """Adds the tensor to the others."""
        assert self.gathering is not None, "a placement of a conversion has it"
        self.gathering.add(self.name, tensor)


def ignored_patterns(model: PreTrainedModel) -> list[re.Pattern[str]]:
    """Returns patterns of tensors that a checkpoint may have in vain: transformers ignores them, too."""
    patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    return [re.compile(pattern) for pattern in patterns]

"""Replaces parameters of a model on the meta device by a rank's part of them. It knows no plan."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mini_infer_engine.config.parallelism.tensor_parallel import Shard, TensorParallel, side_by_side
from mini_infer_engine.layers.placement import Part, Placement
from mini_infer_engine.models.transformers_backend.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter of which a rank has a part."""

    whole: tuple[int, ...]
    """The shape of the whole parameter."""
    part: Part | None
    """The part that the rank has; None: all of it."""
    is_zero: bool = False
    """True for a bias that another rank adds."""

    def placement(self, memory: Tensor) -> Placement:
        """Returns the place of a checkpoint's tensor in the rank's memory, whose last rows may be padding."""
        if self.part is None:
            return Placement(memory, expand=torch.zeros_like if self.is_zero else None)
        return Placement(memory.narrow(self.part.dim, 0, self.part.shard.count), part=self.part)

    def of(self, made: Tensor) -> Tensor:
        """Cuts the rank's part out of the whole parameter. A tensor of another shape has been cut before."""
        if self.is_zero:
            return torch.zeros_like(made)
        return made if self.part is None or tuple(made.shape) != self.whole else self.part.of(made)


@dataclass(slots=True)
class ParameterCuts:
    """Cuts the parameters of one rank, and records what it has cut."""

    parallel: TensorParallel
    made: dict[str, ShardedParameter] = field(default_factory=dict)
    """The parameters of which the rank has a part, by name; those of tied layers have several."""

    def share(self, name: str, total: int, count: int = 1) -> Shard:
        """Returns the rank's equal share of each of `count` weights that lie side by side.

        Raises:
            UnsupportedError: they cannot be divided among the ranks.
        """
        if (obstacle := self.parallel.obstacle(name, total // count)) is not None or total % count:
            raise UnsupportedError(obstacle or f"{name} = {total} is odd")
        return side_by_side([self.parallel.even(total // count)] * count)

    def cut(self, path: str, module: nn.Module, own: str, part: Part) -> None:
        """Replaces the parameter `own` of a module by one of the size of this part."""
        parameter = module.get_parameter(own)
        self.made[f"{path}.{own}"] = ShardedParameter(tuple(parameter.shape), part)
        shape = list(parameter.shape)
        shape[part.dim] = part.shard.count
        module.register_parameter(own, nn.Parameter(parameter.new_empty(shape), requires_grad=False))

    def leave_to_first(self, path: str, module: nn.Module, own: str) -> None:
        """Makes a bias zero on all ranks but the first, so that their sum has it once."""
        parameter = module.get_parameter(own)
        self.made[f"{path}.{own}"] = ShardedParameter(tuple(parameter.shape), None, is_zero=self.parallel.rank > 0)

    def cut_vocabulary(self, path: str, module: nn.Module, own: str) -> None:
        """Cuts the rank's tokens out of a parameter; the last rows of its memory may be padding."""
        parameter = module.get_parameter(own)
        part = Part(0, self.parallel.vocabulary(parameter.shape[0]))
        self.made[f"{path}.{own}"] = ShardedParameter(tuple(parameter.shape), part)
        rows = self.parallel.vocabulary_rows(parameter.shape[0])
        memory = parameter.new_empty((rows, *parameter.shape[1:]))
        module.register_parameter(own, nn.Parameter(memory, requires_grad=False))

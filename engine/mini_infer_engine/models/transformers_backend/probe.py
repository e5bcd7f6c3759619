"""Runs a model of transformers once without memory, and records what its layers ask of attention.

Sizes, scales and windows are read from the calls of the forward pass itself, not guessed from names in a config:
whatever reaches attention is served as it is, and what cannot be served is an obstacle with its reason.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils.generic import ModelOutput

from mini_infer_engine.models.transformers_backend.alibi import WIDTH as ALIBI_WIDTH
from mini_infer_engine.models.transformers_backend.attention import paged_attention, receiving
from mini_infer_engine.models.transformers_backend.errors import UnsupportedError

PROBE = "mini_infer_probe"
"""The name of our attention for a probe: masks are requested, too, to see which keys a layer reads."""
_TOKENS = 3
_HARMLESS = {
    "alibi",
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "s_aux",
    "scaling",
    "sliding_window",
    "softcap",
    "training",
    "use_cache",
}
"""Keyword arguments of attention calls that are served, or change nothing of one pass."""
_NEEDS_VALUES = ("torch.nonzero()", "item() cannot be called", "Cannot copy out of meta", "boolean value of")
"""Parts of torch's errors where a pass without memory asks for a value."""
_NO_WINDOW = 1 << 20
"""The distance at which a mask without a window is tested."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The request of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: str | None = None
    """The path of the parameter with the heads' attention sinks, which transformers calls s_aux."""
    alibi: tuple[float, ...] | None = None
    """The heads' slopes of ALiBi, for which `head_dim` has further dimensions."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The attention calls of a pass in their order, and where the decoder ends."""

    calls: tuple[LayerCall, ...]
    backbone: str
    """The path of the decoder: the module that returns hidden states for the head."""
    output_class: type[ModelOutput]
    """The class of the decoder's output."""
    hidden_size: int
    vocab_size: int


@dataclass(slots=True)
class _Recorder:
    """An `AttentionCalls` that records."""

    names: Mapping[nn.Module, str]
    """The paths of the model's modules."""
    layers: list[LayerCall] = field(default_factory=list)
    masks: list[tuple[Tensor, "int | UnsupportedError | None"]] = field(default_factory=list)
    """Placeholders for masks, with the window that each mask lets through, or the reason why it cannot be served."""

    def mask(self, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Tensor:
        """Returns a placeholder for a mask of a layer's attention."""
        placeholder = torch.empty(1, 1, _TOKENS, _TOKENS, device="meta")
        try:
            self.masks.append((placeholder, _window_of(mask_function, local_size)))
        except UnsupportedError as obstacle:  # models make masks that none of their layers takes
            self.masks.append((placeholder, obstacle))
        return placeholder

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Records a call. Raises UnsupportedError if it cannot be served."""
        if not options.get("is_causal", getattr(module, "is_causal", True)):
            raise UnsupportedError("its attention is not causal: tokens see what comes after them")
        if query.shape[2] != _TOKENS or key.shape[2] != _TOKENS:
            raise UnsupportedError("its attention reads other keys than those of the same tokens")
        others = sorted(name for name, given in options.items() if given is not None and name not in _HARMLESS)
        if others:
            raise UnsupportedError(f"its attention takes {', '.join(others)}, which the kernels of this engine lack")
        if key.shape[3] != value.shape[3]:
            raise UnsupportedError(
                f"heads of its keys and values differ in width ({key.shape[3]} and {value.shape[3]}): latent attention "
                "needs a file of its own"
            )
        if query.shape[3] % 2:
            raise UnsupportedError(f"its heads are {query.shape[3]} wide: an even number is needed")
        if query.shape[1] % key.shape[1]:
            raise UnsupportedError(f"{query.shape[1]} query heads do not share {key.shape[1]} heads of keys equally")
        scale, alibi = options.get("scaling"), options.get("alibi")
        call = LayerCall(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3] + (0 if alibi is None else ALIBI_WIDTH),
            scale=query.shape[3] ** -0.5 if scale is None else float(scale),
            window=self._window(mask, options.get("sliding_window")),
            softcap=options.get("softcap"),
            sinks=self._sinks(module, options.get("s_aux"), query.shape[1]),
            alibi=None if alibi is None else tuple(alibi.tolist()),
        )
        self.layers.append(call)
        return value.new_empty(1, _TOKENS, query.shape[1], value.shape[3])

    def _sinks(self, module: nn.Module, sinks: Tensor | None, num_heads: int) -> str | None:
        """Returns the path of the sinks. Raises UnsupportedError if they are no parameter [heads] of the module."""
        if sinks is None:
            return None
        own = next((name for name, parameter in module.named_parameters(recurse=False) if parameter is sinks), None)
        if own is None or sinks.shape != (num_heads,):
            raise UnsupportedError("its attention sinks are no parameter of its layer with a number for each head")
        return f"{self.names[module]}.{own}"

    def _window(self, mask: Tensor | None, argument: int | None) -> int | None:
        if mask is None:
            return argument
        for placeholder, window in self.masks:
            if placeholder is not mask:
                continue
            if isinstance(window, UnsupportedError):
                raise window
            return window
        raise UnsupportedError("its attention takes a mask of its own")


_recorder: ContextVar[_Recorder] = ContextVar("recorder of a probe")


def _record_mask(*_arguments: Any, **request: Any) -> Tensor:
    """Implements transformers' mask interface."""
    return _recorder.get().mask(**request)


AttentionInterface.register(PROBE, paged_attention)
AttentionMaskInterface.register(PROBE, _record_mask)


def _window_of(mask_function: Callable[..., Any], local_size: int | None) -> int | None:
    """Returns the sliding window of a mask, None if tokens see all before them.

    Raises:
        UnsupportedError: the mask is of another kind.
    """
    distance = _NO_WINDOW if local_size is None else local_size
    places = [distance + offset for offset in (0, 1, 7, distance // 2, distance, 2 * distance + 1)]

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(0, 0, torch.tensor(query), torch.tensor(key)))

    try:
        sees_window = all(sees(place, place) and sees(place, place - distance + 1) for place in places)
        sees_more = any(
            sees(place, place + 1) or (local_size is not None and sees(place, place - distance)) for place in places
        )
    except (RuntimeError, IndexError, TypeError, NotImplementedError):
        sees_window, sees_more = False, True
    if sees_window and not sees_more:
        return local_size
    raise UnsupportedError("its attention mask is neither causal nor a sliding window")


def probe(model: PreTrainedModel) -> Probe:
    """Returns what `model`, which is on the meta device and attends by `PROBE`, asks of attention.

    Raises:
        UnsupportedError: a layer asks for something that cannot be served, or the pass does not run without memory.
    """
    names = {module: name for name, module in model.named_modules()}
    recorder = _Recorder(names)
    backbones: list[tuple[str, ModelOutput]] = []

    def note_output(module: nn.Module, _arguments: object, output: object) -> None:
        if (
            module is not model
            and isinstance(output, ModelOutput)
            and isinstance(output.get("last_hidden_state"), Tensor)
        ):
            backbones.append((names[module], output))

    hooks = [module.register_forward_hook(note_output) for module in model.modules()]
    token = _recorder.set(recorder)
    try:
        with receiving(recorder), torch.inference_mode():
            embeddings = model.get_input_embeddings()
            hidden = embeddings(torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta"))
            output = model(
                inputs_embeds=hidden,
                position_ids=torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta"),
                attention_mask=torch.ones(1, _TOKENS, dtype=torch.int64, device="meta"),
                use_cache=False,
                return_dict=True,
            )
    except UnsupportedError:
        raise
    except Exception as error:  # any code of any model runs here
        if any(words in str(error) for words in _NEEDS_VALUES):
            raise UnsupportedError(
                "its code reads values of tensors while it runs, such as which experts are hit or a state's length"
            ) from error
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedError(
            f"a pass of it does not run without memory ({type(error).__name__}: {reason})"
        ) from error
    finally:
        _recorder.reset(token)
        for hook in hooks:
            hook.remove()
    if not backbones:
        raise UnsupportedError("no part of it returns hidden states for its head")
    path, states = backbones[-1]
    return Probe(
        tuple(recorder.layers), path, type(states), states["last_hidden_state"].shape[-1], output.logits.shape[-1]
    )

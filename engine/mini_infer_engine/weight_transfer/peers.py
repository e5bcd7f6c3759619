"""Loads a rank's weights from peers if that is sensible, and serves them once they are there.

Any fault of a peer ends in `LoadedWeights` with the reason: the caller reads the files then. In a group all ranks load
from peers, or none does.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.settings import EngineSettings, num_nodes
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.weights.checkpoint import Checkpoint
from mini_infer_engine.weight_transfer.client import PeerError, fetch, find_peer
from mini_infer_engine.weight_transfer.decisions import asks_peers
from mini_infer_engine.weight_transfer.exchange import NO_EXCHANGE, LoadedWeights, WeightExchange
from mini_infer_engine.weight_transfer.file_check import differing_tensor
from mini_infer_engine.weight_transfer.file_rate import file_bytes_per_s, weight_files
from mini_infer_engine.weight_transfer.identity import weights_identity
from mini_infer_engine.weight_transfer.model_tensors import ModelTensors, restore_plain_weights
from mini_infer_engine.weight_transfer.pieces import manifest_fault
from mini_infer_engine.weight_transfer.server import WeightServer, serve_weights

log = logging.getLogger(__name__)

_STRUCTURE_POSITIONS = 16
"""Context for which a model is finished before its tensors are filled; the memory plan finishes it again."""


def _alone(number: int) -> int:
    return number


class WeightPeers:
    """The exchange of weights of one rank. It does nothing if the exchange has neither peers nor a port."""

    def __init__(
        self,
        settings: EngineSettings,
        exchange: WeightExchange = NO_EXCHANGE,
        smallest: Callable[[int], int] = _alone,
    ) -> None:
        """`smallest` returns the smallest of one number from each rank that shares the model."""
        is_possible = settings.load_format != "dummy" and num_nodes(settings) == 1 and settings.data_parallel_size == 1
        self._exchange = exchange if is_possible else NO_EXCHANGE
        self._settings, self._smallest = settings, smallest
        self._identity, self._rank = "", 0

    def identify(self, config: ModelConfig, directory: Path | None, device: torch.device, dtype: torch.dtype) -> None:
        """Computes the identity of this rank's weights; `config` has the rank's place in its group."""
        if directory is None or not (self._exchange.port or self._exchange.peers):
            return
        self._rank = config.stage.index * config.tensor_parallel.size + config.tensor_parallel.rank
        try:
            self._identity = weights_identity(self._settings, config, directory, device, dtype, self._rank)
        except OSError as error:
            log.warning("weights are not exchanged with peers: %s", error)
            self._exchange = NO_EXCHANGE

    def tensors_of(self, model: CausalModel) -> ModelTensors | None:
        """Brings a model that has memory and no quantised layers into the form in which peers fill it, and returns its
        tensors for `fill`; None if there are no peers.
        """
        if not self._exchange.peers:
            return None
        return _in_final_form(model)

    def fill(
        self,
        model: CausalModel,
        checkpoint: Checkpoint | None,
        directory: Path | None,
        device: torch.device,
        tensors: ModelTensors | None = None,
    ) -> LoadedWeights:
        """Fills a model from a peer, finished and ready. It must have no memory, unless its `tensors` are given.

        If the result has a `fallback`, the model's memory has arbitrary contents, and the caller makes another one, or
        fills it from files.
        """
        if checkpoint is None or directory is None or not self._exchange.peers:
            return LoadedWeights(source="dummy" if checkpoint is None else "files")
        is_quantized = self._settings.quantization is not None or model.config.quantization is not None
        source = self._settings.weights_from
        rate = file_bytes_per_s(weight_files(directory)) if source == "auto" else None
        if asks_peers(source, rate, is_recomputed=self._settings.quantization is not None):
            compared = None if is_quantized else checkpoint
            loaded = self._received(model, compared, device, rate, tensors, is_quantized=is_quantized)
        else:
            loaded = LoadedWeights()
            log.info("weights: no peer is asked (--weights-from %s, files at %.1f GB/s)", source, (rate or 0) / 1e9)
        return self._agreed(loaded)

    def serve(self, model: CausalModel) -> WeightServer | None:
        """Serves the finished model's weights from now on; returns None if there is no port.

        Raises ValueError if the port is taken.
        """
        if not self._exchange.port or not self._identity:
            return None
        try:
            tensors = ModelTensors(model)
        except ValueError as error:
            log.warning("weights are not served to peers: %s", error)
            return None
        return serve_weights(tensors, self._identity, self._exchange, self._rank)

    def _received(
        self,
        model: CausalModel,
        checkpoint: Checkpoint | None,
        device: torch.device,
        rate: float | None,
        tensors: ModelTensors | None,
        *,
        is_quantized: bool,
    ) -> LoadedWeights:
        begin_s = time.monotonic()
        try:
            exchange = self._exchange
            with find_peer(exchange.peers, self._rank, self._identity, exchange.secret) as peer:
                tensors = tensors or _finished(model, device, is_quantized=is_quantized)
                if fault := manifest_fault(tensors.specs, peer.offer.tensors):
                    raise PeerError(f"the manifest of peer {peer.offer.name} has {fault}")
                log.info("weights: %.1f GB are fetched from peer %s", tensors.num_bytes / 1e9, peer.offer.name)
                fetch(tensors, peer, rate)
            if checkpoint is not None and (name := differing_tensor(model, checkpoint)):
                raise PeerError(f"tensor {name} of peer {peer.offer.name} is not that of the files")
        except (PeerError, ModelError, OSError, ValueError, RuntimeError) as error:
            log.warning("weights are read from files, not from a peer: %s", error)
            return LoadedWeights(fallback=str(error)[:500])
        seconds = time.monotonic() - begin_s
        loaded = LoadedWeights(
            source="peer", peer=peer.offer.name, num_bytes=tensors.num_bytes, seconds=round(seconds, 3)
        )
        log.info("%s", loaded)
        return loaded

    def _agreed(self, loaded: LoadedWeights) -> LoadedWeights:
        """Returns what all ranks can use: weights of peers if all have them."""
        has_all = self._smallest(int(loaded.source == "peer"))
        if loaded.source == "peer" and not has_all:
            return LoadedWeights(fallback="another rank reads files")
        return loaded


def _finished(model: CausalModel, device: torch.device, *, is_quantized: bool) -> ModelTensors:
    """Gives a model memory, and brings it into the form after loading. Its tensors are then filled in that form.

    Rounded weights have their final shapes after the rounding alone, so zeros are rounded first.
    """
    model.take_memory(device)
    with torch.no_grad():
        if is_quantized:
            for parameter in model.parameters():
                parameter.zero_()
    tensors = _in_final_form(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what was launched above must not overwrite what other streams fill
    return tensors


def _in_final_form(model: CausalModel) -> ModelTensors:
    with torch.no_grad():
        model.finish_loading(_STRUCTURE_POSITIONS)
    restore_plain_weights(model)
    return ModelTensors(model)

"""Decides whether an engine can serve a request, and makes its sequence."""

import time

import msgspec

from mini_infer_contract.blocks import root_key
from mini_infer_engine.config.model.vision import VisionConfig
from mini_infer_engine.config.options.kv_policies import KVPolicy, policy_of_request, room_fault
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Runner
from mini_infer_engine.core.beam_search.group import BeamGroup, request_of_beams, rules_of
from mini_infer_engine.core.constraints import Constraints, NoConstraints
from mini_infer_engine.core.guarded_connector import GuardedConnector
from mini_infer_engine.core.images import NO_IMAGES, PromptImages, images_fault
from mini_infer_engine.core.kv_eviction import request_obstacle
from mini_infer_engine.core.request import NO_TARGETS, Request
from mini_infer_engine.core.scheduler import Scheduler
from mini_infer_engine.core.scheduling.from_options import default_targets
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.core.speculation.planner import NoSpeculation, SpeculationPlanner


class InputProcessor:
    """Turns requests into sequences in the order of their arrival. It queues nothing and holds no page.

    `longest_block` is the most tokens that a chunk cannot divide: a pass has room for them beside the decode rows of
    all other sequences. `vision` is None if the model reads text alone.
    """

    def __init__(
        self,
        settings: EngineSettings,
        runner: Runner,
        scheduler: Scheduler,
        constraints: Constraints | NoConstraints,
        speculation: SpeculationPlanner | NoSpeculation,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        model_revision: str,
        longest_block: int,
        vision: VisionConfig | None,
    ) -> None:
        self.settings = settings
        self._runner = runner
        self._scheduler = scheduler
        self._constraints = constraints
        self._speculation = speculation
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._model_revision = model_revision
        self.longest_block = longest_block
        self._vision = vision
        self._default_targets = default_targets(settings)
        self._arrivals = 0

    def process(
        self, request: Request, transfers: GuardedConnector, *, is_for_peer: bool
    ) -> tuple[Sequence, BeamGroup | None]:
        """Returns the request's sequence, and its beams if it wants some. A prompt that is computed `is_for_peer` has
        no latency targets here.

        Raises ValueError if the request is longer than the model allows, or if the engine cannot serve it.
        """
        self._check(request)
        sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
        max_tokens = self._max_model_len if sampling.max_tokens is None else sampling.max_tokens
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= self._eos_token_ids
        original, rules = request, rules_of(request, stops, min(max_tokens, self._max_model_len - num_prompt))
        if rules is not None:
            self._scheduler.check_group_fits(rules.width, num_prompt, num_prompt + rules.max_tokens)
            request = request_of_beams(request, rules)
        if refusal := self._runner.refuses(request):
            raise ValueError(refusal)
        policy = self._kv_policy(request, transfers)
        images = self._images(request)
        if request.kv_source is not None and transfers.refuses(request):
            request = msgspec.structs.replace(request, kv_source=None)
        sequence = Sequence(
            request,
            order=(request.priority, self._arrivals),
            arrival_s=time.monotonic(),
            root=root_key(self._model_revision, salt=request.cache_salt),
            last_position=min(num_prompt + max_tokens, self._max_model_len) - 2,
            stops=stops,
            suppressed=tuple(sorted(stops)) if sampling.min_tokens else (),
            kv_policy=policy,
            speculates=not images and policy is None and self._speculation.speculates(request),
            may_load=policy is None,
            images=images,
            targets=NO_TARGETS if is_for_peer else request.targets.or_defaults(self._default_targets),
            may_be_proved_late=not is_for_peer and sampling.prompt_logprobs is None,
        )
        self._arrivals += 1
        return sequence, None if rules is None else BeamGroup(sequence, rules, original)

    def unserved(self, request: Request) -> Sequence:
        """Returns a sequence that names the cached blocks of a request's prompt, and is never run. Raises ValueError if
        the request's images cannot be read.
        """
        return Sequence(
            request,
            order=(),
            arrival_s=0.0,
            root=root_key(self._model_revision, salt=request.cache_salt),
            last_position=0,
            stops=frozenset(),
            suppressed=(),
            images=self._images(request),
        )

    def _check(self, request: Request) -> None:
        """Raises ValueError if no engine with this model could serve the request."""
        num_prompt = len(request.prompt_token_ids)
        if not 1 <= num_prompt < self._max_model_len:
            raise ValueError(
                f"request {request.request_id!r} has {num_prompt} prompt tokens: there must be at least one, and "
                f"fewer than the {self._max_model_len} of the model's context"
            )
        sampling = request.sampling
        if sampling.max_tokens is not None and sampling.max_tokens < 1:
            raise ValueError(f"request {request.request_id!r} has max_tokens {sampling.max_tokens}: ask for at least 1")
        if sampling.grammar is not None and not self._constraints.are_supported:
            raise ValueError(f"{sampling.grammar.param} needs a tokenizer, and this engine runs without: leave it out")
        if sampling.grammar is not None and request.beam_search is not None:
            raise ValueError(f"{sampling.grammar.param} does not go with use_beam_search: leave out one of them")

    def _kv_policy(self, request: Request, transfers: GuardedConnector) -> KVPolicy | None:
        """Returns the policy by which a request's sequence loses cached tokens. Raises ValueError if it cannot."""
        policy = policy_of_request(request.sampling.kv_policy, request.sampling.kv_budget, self.settings)
        if policy is None or request.embeds:  # nothing is generated after a prompt that is embedded
            return None
        obstacle = self._runner.eviction_obstacle or request_obstacle(request)
        if obstacle is None and transfers.is_present:
            obstacle = "KV transfer moves whole caches"
        if obstacle is not None:
            raise ValueError(f"kv_policy {policy.name!r} does not work here, for {obstacle}: send kv_policy 'full'")
        if (fault := room_fault(policy, self.longest_block)) is not None:
            raise ValueError(fault)
        return policy

    def _images(self, request: Request) -> PromptImages:
        """Returns the images of a prompt. Raises ValueError if they cannot be read."""
        if not request.images:
            return NO_IMAGES
        if self._vision is None:
            raise ValueError("images: this engine reads text alone: leave them out")
        fault = images_fault(request.prompt_token_ids, request.images, self._vision)
        if fault is not None:
            raise ValueError(f"images of request {request.request_id!r}: {fault}")
        images = PromptImages.of(request.images, self._vision)
        capacity = self._scheduler.encoder_cache.capacity
        if (largest := max(images.longest_block(), *(image.num_tokens for image in images.rows))) > capacity:
            raise ValueError(
                f"images: one has {largest} tokens, and this engine reads {capacity} at most "
                "(--mm-encoder-cache-tokens): send a smaller image"
            )
        if images.longest_block() > self.longest_block:
            raise ValueError(
                f"images: {images.longest_block()} tokens must be computed in one pass, and there is room for "
                f"{self.longest_block} beside all sequences: raise --max-num-batched-tokens"
            )
        return images

"""Continuous batching over any `Runner`: requests in, tokens out, one step at a time. No torch, no text, no sockets.

With `step_depth` 1 the host plans and launches a pass before it knows the tokens of the one before; with 0 it waits.
Both generate the same tokens. A pipeline of P stages has P - 1 more passes in flight, of other sequences.
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_contract.events import BlockStored, KVEvent, LoadReport
from mini_infer_engine.config.model.vision import VisionConfig
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.options.speculation import speculation_of
from mini_infer_engine.core.batch import Runner, RunnerLostError
from mini_infer_engine.core.constraints import NO_GUESSES, Constraints, NoConstraints, has_constrained_rows
from mini_infer_engine.core.encoder_cache import EncoderCacheManager
from mini_infer_engine.core.grammars.compiler import GrammarCompiler
from mini_infer_engine.core.guarded_connector import FAULT, GuardedConnector
from mini_infer_engine.core.hybrid_kv_cache_manager import make_kv_cache_manager
from mini_infer_engine.core.input_processor import InputProcessor
from mini_infer_engine.core.kv_cache_manager import SWAP
from mini_infer_engine.core.kv_tiers.host_blocks import HostBlocks
from mini_infer_engine.core.kv_tiers.loads import Loaded, count_loaded
from mini_infer_engine.core.kv_tiers.stats import with_tier
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMemory
from mini_infer_engine.core.kv_tiers.tiers import make_kv_tiers
from mini_infer_engine.core.kv_transfer import KVConnector, LayerProgress, NotReceived, Received
from mini_infer_engine.core.output_processor import OutputProcessor
from mini_infer_engine.core.prefill_rate import PrefillRate
from mini_infer_engine.core.request import CachedTokens, Output, Request
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.core.scheduler import Scheduler
from mini_infer_engine.core.scheduling.from_options import policy_of
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.speculation.planner import NoSpeculation, SpeculationPlanner
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.core.step import Refusal, Step

MAX_FAILED_PASSES = 10
"""Consecutive failed passes after which the device counts as broken, and the engine as lost."""

MAX_KEPT_OUT_S = 60.0
"""Seconds for which a prompt waits for pages that only transfers use, before it ends with an error. A peer that hangs
keeps its pages for as long as it lives, and a prompt must not wait forever.
"""

MAX_COPY_WAIT_S = 0.001
"""Seconds for which a step that can do nothing else waits for a copy of a lower tier: requests may come meanwhile."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Iteration:
    """Collects the outputs of one step, and notes what its stages did."""

    outputs: list[Output] = field(default_factory=list)
    has_launched: bool = False
    """A pass was launched, or one that is launched is still to be sampled."""
    has_committed: bool = False


class RunnerFailedError(RuntimeError):
    """Raised when passes keep failing: only a new process, perhaps another device, can help."""


class Engine:
    """One runner, its page pool and all requests. Not thread-safe: one owner calls everything.

    Pass `record_events=False` if you never drain `take_events()` and `load()`: both buffers grow without bound
    otherwise.
    """

    def __init__(
        self,
        settings: EngineSettings,
        runner: Runner,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        model_revision: str,
        *,
        record_events: bool = True,
        grammars: GrammarCompiler | None = None,
        chunk_alignment: int = 1,
        vision: VisionConfig | None = None,
        disk_memory: DiskMemory | None = None,
        shared_blocks: HostBlocks | None = None,
    ) -> None:
        """Creates an engine without requests. `grammars` is None without a tokenizer: then no output can be
        constrained. `vision` is None if the runner reads text alone, `disk_memory` if no blocks are kept on a disk, and
        `shared_blocks` if no other engine shares the blocks of the runner's `host_memory`.

        Prompts are cut into chunks at multiples of `chunk_alignment` tokens.
        """
        self._transfers = GuardedConnector(None)
        resolved = settings.resolved()
        token_budget, chunk_limit = resolved.max_num_batched_tokens, resolved.chunk_tokens
        kv_cache = make_kv_cache_manager(
            runner,
            chunk_tokens=max(chunk_limit, chunk_alignment),
            enable_caching=settings.enable_prefix_caching,
            record_events=record_events,
        )
        kv_cache.check_fits(max_model_len)
        self._tiers = make_kv_tiers(
            kv_cache.cache,
            runner.host_memory,
            disk_memory,
            compute_s_per_token=runner.swap_space.compute_s_per_token,
            record_events=record_events,
            shared=shared_blocks,
            checkpoints=kv_cache.state_checkpoints,
        )
        speculation = speculation_of(settings)
        self._speculation: SpeculationPlanner | NoSpeculation = NoSpeculation()
        if speculation is not None and runner.max_speculative_rows:
            self._speculation = SpeculationPlanner(
                speculation,
                max_rows=runner.max_speculative_rows,
                max_model_len=max_model_len,
                token_budget=token_budget,
                costs=getattr(runner, "guess_costs", None),  # of runners that have measured them
            )
        self.scheduler = Scheduler(
            kv_cache,
            max_num_seqs=settings.max_num_seqs,
            token_budget=token_budget,
            chunk_limit=chunk_limit,
            policy=policy_of(settings, token_budget=token_budget, chunk_alignment=chunk_alignment),
            speculation=self._speculation,
            num_stages=settings.pipeline_parallel_size,
            chunk_alignment=chunk_alignment,
            encoder_cache=EncoderCacheManager(settings.mm_encoder_cache_tokens, token_budget),
            tiers=self._tiers,
        )
        self._runner = runner
        self._num_stages = settings.pipeline_parallel_size
        self._depth = settings.step_depth + self._num_stages - 1
        self._outputs = OutputProcessor(self.scheduler)
        self._in_flight: deque[tuple[Any, Step]] = deque()
        self._waits_for_masks = False
        """True if the last pass in flight has only its logits, and must be sampled before another one is launched."""
        self._launches_ahead = settings.step_depth == 1 and self._num_stages == 1
        """True if the pass after one that was sampled within grammars is launched in the same step."""
        self._constraints = NoConstraints() if grammars is None else Constraints(grammars, eos_token_ids)
        self.inputs = InputProcessor(
            settings,
            runner,
            self.scheduler,
            self._constraints,
            self._speculation,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            model_revision=model_revision,
            longest_block=min(chunk_limit, token_budget - settings.max_num_seqs + 1),
            vision=vision,
        )
        self._record_events = record_events
        self._accepted: list[str] = []
        self._ended_already: list[Output] = []
        """Final outputs that the next step returns, of requests that were complete before they ran."""
        self._waits_for_peers = False
        """True if the last step could launch nothing, and the next one cannot before another engine has acted."""
        self._void: set[Sequence] = set()
        """Sequences in flight whose results are dropped."""
        self._failed_passes = 0
        """Failed passes since the last one that was committed."""
        self._last_commit_s = 0.0
        self._stats = EngineStats()
        self._rate = PrefillRate()

    @property
    def kv_connector(self) -> KVConnector | None:
        """The connector that moves keys and values from and to other engines, or None for no transfers. The builder of
        the engine sets it.
        """
        return self._transfers.connector

    @kv_connector.setter
    def kv_connector(self, connector: KVConnector | None) -> None:
        self._transfers = GuardedConnector(connector)

    def add(self, request: Request, *, is_for_peer: bool = False) -> None:
        """Queues a request, or has the next step refuse it if its latency targets cannot be met.

        Raises ValueError if its id is in use, or if it cannot be served (`InputProcessor.process`).
        """
        self._waits_for_peers = False
        if request.request_id in self._outputs.sequences:
            raise ValueError(f"request id {request.request_id!r} is in use: choose another")
        sequence, beams = self.inputs.process(request, self._transfers, is_for_peer=is_for_peer)
        resumes = len(sequence.token_ids) > len(request.prompt_token_ids)
        if resumes and (reason := sequence.finish_reason(sequence.token_ids[-1])):
            self._ended_already.append(Output(request_id=request.request_id, token_ids=[], finish_reason=reason))
            return
        if request.sampling.grammar is not None:
            self._constraints.add(sequence)
        elif (unmet := self.scheduler.add(sequence, sequence.arrival_s)) is not None:
            self._ended_already.append(_refused(request.request_id, unmet))
            return
        self._outputs.expect(sequence, beams)
        if self._record_events:
            self._accepted.append(request.request_id)

    def abort(self, request_id: str) -> None:
        """Drops a request within two steps that launch passes, in a pipeline within two for each stage. No output
        reports it. An unknown id is no error: its request has ended already.
        """
        self._waits_for_peers = False
        self._ended_already = [output for output in self._ended_already if output.request_id != request_id]
        sequence = self._outputs.remove(request_id)
        if sequence is not None:
            self._leave(sequence)
            if sequence.request.retains_kv:
                self._transfers.drop(request_id)

    def _leave(self, sequence: Sequence) -> None:
        """Stops scheduling the sequence."""
        if sequence.state is State.RECEIVING:
            self._transfers.cancel(sequence)
        elif sequence.state is State.LOADING:
            self._tiers.cancel(sequence)
        if not self._constraints.remove(sequence.request.request_id):
            self.scheduler.leave(sequence, State.FINISHED)

    @property
    def has_work(self) -> bool:
        """True if `step` has something to do."""
        has_requests = bool(self._outputs.sequences or self._in_flight or self._ended_already)
        return has_requests or self._transfers.has_news(time.monotonic())

    def step(self) -> list[Output]:
        """Runs one step: launches the next pass, then commits the one before it, and returns what it made.

        With `step_depth` 0 the same pass is committed. A pipeline of P stages has up to P - 1 passes more in flight.
        """
        iteration = Iteration()
        self._take_in(iteration)
        if not iteration.outputs:  # outputs that are known already wait for no launch, and for no pass in flight
            self._launch_next(iteration)
            self._sample_within_grammars(iteration)
            self._commit_oldest(iteration)
            self._tiers.write_behind()
            self._check_progress(iteration)
        return self._transfers.divert(iteration.outputs)

    def _take_in(self, iteration: Iteration) -> None:
        """Takes in what came since the last step: ended requests, other engines' messages, loaded blocks, compiled
        grammars.
        """
        self._waits_for_peers = False
        self._take_loaded()
        iteration.outputs, self._ended_already = self._ended_already, []
        if not iteration.outputs and self._transfers.is_present:
            iteration.outputs = self._exchange()
        if not iteration.outputs:
            if self._outputs.num_constrained:
                self._admit_compiled()
            self._speculation.may_be_masked = self._outputs.num_constrained > 0

    def _launch_next(self, iteration: Iteration) -> None:
        """Plans the next pass and launches it, unless the last one is still to be sampled within grammars."""
        if self._waits_for_masks:
            iteration.has_launched = True
            return
        planned = self.scheduler.plan(time.monotonic())
        if planned.admitted:
            self._stats.count_admissions(planned, time.monotonic())
            if self._tiers.is_present:
                for sequence in planned.admitted:
                    prefetched = self._tiers.used(sequence)
                    num_device = (sequence.num_cached or 0) - sum(prefetched.values())
                    sequence.cached_tokens = CachedTokens(device=num_device, **prefetched)
        for sequence in planned.receiving:
            self._transfers.receive(sequence)
        for sequence, refusal in planned.refused:
            if self._outputs.remove(sequence.request.request_id) is not None:
                iteration.outputs.append(_refused(sequence.request.request_id, refusal))
        if planned.kept_out:
            iteration.outputs += self._end_kept_out(planned.kept_out, time.monotonic())
        if planned.batch.rows:
            self._launch(planned, iteration)
        # After the launch: it reads states in slots to which loads may write from then on.
        for sequence, match in planned.loading:
            if sequence.state is State.LOADING:
                self._tiers.load(sequence, match, is_first=sequence in planned.admitted)

    def _sample_within_grammars(self, iteration: Iteration) -> None:
        """Has the last pass sampled, where its masks follow from tokens that are committed first.

        The forward after it is then launched in the same step: the device goes on while the caller looks at outputs.
        """
        if self._waits_for_masks:
            iteration.outputs += self._sample(*self._in_flight[-1])
            if self._launches_ahead and self._in_flight:
                self._launch_next(iteration)

    def _commit_oldest(self, iteration: Iteration) -> None:
        """Commits the oldest pass in flight if there are more than the depth allows, or if nothing was launched."""
        is_due = len(self._in_flight) > self._depth or (self._in_flight and not iteration.has_launched)
        if not is_due or self._waits_for_masks:  # a pass that is launched ahead is sampled first
            return
        iteration.has_committed = True
        iteration.outputs += self._commit(*self._in_flight.popleft())
        if self._outputs.sequences and not iteration.has_launched and not self._in_flight:
            self._launch_next(iteration)  # what waited for the commit, as beams do, need not wait longer

    def _check_progress(self, iteration: Iteration) -> None:
        """Notes if nothing can run before another engine has done something; without such a reason pages leaked."""
        if self._in_flight or iteration.outputs or iteration.has_committed or self._constraints.num_compiling:
            return
        self._waits_for_peers = bool(self._outputs.sequences)
        if self._waits_for_peers:
            has_pins = self._transfers.stats.pinned_pages or self.scheduler.slots.has_pins
            may_wait = self.scheduler.receiving or self._tiers.are_copying or has_pins
            assert may_wait, "requests are left and none can run: pages or slots leaked"
            self._tiers.wait(MAX_COPY_WAIT_S)

    def _end_kept_out(self, kept_out: Iterable[Sequence], now_s: float) -> list[Output]:
        """Ends prompts that have waited too long for pages that other engines pin."""
        outputs = []
        for sequence in kept_out:
            if sequence.kept_out_s is None:
                sequence.kept_out_s = now_s
            elif now_s - sequence.kept_out_s > MAX_KEPT_OUT_S:
                self._outputs.end(sequence)
                reason = f"other engines have pinned the pages that it needs for {MAX_KEPT_OUT_S:.0f} s: try again"
                outputs.append(_failed(sequence.request.request_id, reason))
        return outputs

    @property
    def only_receives(self) -> bool:
        """True if `step` would do nothing before another engine has sent something or gives back pinned pages."""
        may_go_on = self.scheduler.lacks_keys or self._tiers.are_copying or self._tiers.are_loading
        return self._waits_for_peers and not may_go_on and not self._transfers.has_news(time.monotonic())

    def write_behind(self) -> bool:
        """Copies cached blocks to lower tiers while there is no work. Returns False if there is nothing to copy."""
        self._take_loaded()
        return self._tiers.write_behind(is_idle=True) or self._tiers.are_copying

    def hint(self, request: Request) -> None:
        """Gives the cached blocks of a prompt the lease of its request, which is not served: its session returns, or
        does not. Raises ValueError if the request's images cannot be read.
        """
        self._take_loaded()
        self.scheduler.kv_cache.pool.advance(time.monotonic())
        sequence = self.inputs.unserved(request)
        self.scheduler.kv_cache.hint(sequence)
        if request.lease_s < 0 and self._tiers.is_present:
            sequence.known_keys(len(sequence.token_ids) // BLOCK_SIZE_TOKENS)
            self._tiers.forget_session(sequence)

    @property
    def next_due_s(self) -> float:
        """Monotonic time at which `write_behind` has something to do, though no request comes; infinite if never."""
        return self._tiers.next_due_s

    def prefetch(self, request_ids: Iterable[str], ttl_s: float) -> None:
        """Begins to load the blocks of sessions that return within `ttl_s` seconds from lower tiers. They are named by
        the ids of their last requests, as clients have them; unknown ones are ignored.
        """
        self._take_loaded()
        self._tiers.prefetch(list(request_ids), ttl_s)

    def _take_loaded(self) -> None:
        """Runs sequences whose blocks have come from a lower tier."""
        for loaded in self._tiers.take(self._rate.tokens_per_s, time.monotonic()):
            sequence = loaded.sequence
            if loaded.is_void:
                self._compute_instead(loaded)
                continue
            self.scheduler.loaded(sequence, loaded.num_tokens, loaded.checkpoint)
            self._stats.cached_prompt_tokens += count_loaded(loaded)

    def _take_loaded_layerwise(self, step: Step) -> set[Sequence]:
        """Takes in the blocks that were loaded while a committed pass computed: they can be hit from now on.

        Returns the sequences whose blocks have changed or have not come. They are to be computed without a load.
        """
        void, kv_cache = set(), self.scheduler.kv_cache
        for sequence in step.loading_layerwise:
            loaded = self._tiers.end_layerwise(sequence)
            if loaded.is_void:
                sequence.may_load = False
                kv_cache.distrust(sequence)
                if not loaded.num_tokens:  # some KV groups may have had tokens, on which nothing can go on
                    self._count_none_cached(loaded)
                void.add(sequence)
            else:
                kv_cache.cache_blocks(sequence)
                self._stats.cached_prompt_tokens += count_loaded(loaded)
        return void

    def _compute_instead(self, loaded: Loaded) -> None:
        """Puts a sequence back in line whose state could not be loaded. It is computed from what is on the device."""
        loaded.sequence.may_load = False
        self.scheduler.not_received(loaded.sequence)
        self._count_none_cached(loaded)

    def _count_none_cached(self, loaded: Loaded) -> None:
        """Counts no tokens of a sequence as cached whose load was void, if this was its first admission."""
        sequence = loaded.sequence
        if loaded.is_first:
            self._stats.cached_prompt_tokens -= sequence.num_cached or 0
            sequence.num_cached, sequence.cached_tokens = 0, CachedTokens()

    def _exchange(self) -> list[Output]:
        """Processes what other engines have sent and requested. An exception fails only its own request."""
        work, outputs = self._transfers.take(time.monotonic(), self._rate.tokens_per_s), list[Output]()
        if self._record_events:
            self._accepted += work.accepted
        cancelled = set(work.abort)
        for request in work.add:
            if request.request_id not in cancelled:
                self._add_for_peer(request)
        for request_id in work.abort:
            self.abort(request_id)
        for event in work.came:
            sequence = self._outputs.sequences.get(event.request_id)
            if sequence is not None and sequence.state is State.RECEIVING:  # else it was aborted meanwhile
                outputs += self._end_receiving(sequence, event)
        return outputs

    def _add_for_peer(self, request: Request) -> None:
        """Queues another engine's prompt, or reports to that engine why it cannot be served."""
        try:
            self.add(request, is_for_peer=True)
        except ValueError as error:
            self._transfers.accept_failed(request.request_id, str(error))
        except Exception as error:
            self._transfers.record("a prompt of another engine", error)
            self._transfers.accept_failed(request.request_id, f"this engine cannot read it ({type(error).__name__})")

    def _end_receiving(self, sequence: Sequence, event: Received | NotReceived) -> list[Output]:
        """Continues a sequence after its transfer. If that failed, its prompt is computed here, or its request ends."""
        request_id, source = sequence.request.request_id, sequence.kv_source
        if isinstance(event, Received):
            try:
                return self._go_on_after(sequence, event)
            except Exception as error:
                self._transfers.record("what another engine has sent", error)
                if self._outputs.remove(request_id) is not None:
                    self.scheduler.leave(sequence, State.FINISHED)
                return [_failed(request_id, f"what another engine has sent of it cannot be used ({FAULT})")]
        self.scheduler.not_received(sequence)
        if not self._transfers.falls_back and source is not None and source.how != "prefix":
            self._outputs.end(sequence)
            return [_failed(request_id, f"its prompt was to come from another engine: {event.message}")]
        return [Output(request_id=request_id, token_ids=[], kv_fallback=event.reason)]

    def _go_on_after(self, sequence: Sequence, event: Received) -> list[Output]:
        """Continues a sequence whose known tokens, or most of them, were received, perhaps with the first new token."""
        self.scheduler.received(sequence, event.num_tokens)
        num_cached = sequence.num_cached or 0
        if event.num_cached > num_cached:
            sequence.num_cached = event.num_cached
            if sequence.cached_tokens is not None:
                num_peer = event.num_cached - num_cached
                sequence.cached_tokens = msgspec.structs.replace(sequence.cached_tokens, peer=num_peer)
        if event.token_id is None:
            return []
        output = self._outputs.accept_received(sequence, event.token_id, list(event.logprobs))
        sequence.num_prefill = len(sequence.token_ids)  # the new token is the host's: it comes as a chunk of one
        return [output]

    def _launch(self, step: Step, iteration: Iteration) -> None:
        """Launches a pass. If that fails, its rows end with an error, and everything else continues."""
        if self._outputs.num_constrained:
            step.batch.waits_for_masks = has_constrained_rows(step)
        step.launched_s = time.monotonic()  # before: a CPU has computed the pass when the launch returns
        if self._transfers.is_present:
            step.batch.report_layers = self._layer_reporter(self._transfers, step)
        try:
            handle = self._runner.launch(step.batch)
        except RunnerLostError:
            raise
        except Exception as error:
            self._unwind(step)
            iteration.outputs += self._fail(step.sequences, error)
            return
        step.launch_took_s = time.monotonic() - step.launched_s
        self._in_flight.append((handle, step))
        step.kind = self._speculation.launched(step.batch)
        self.scheduler.launched(step)
        self._stats.count_launch(step)
        iteration.has_launched, self._waits_for_masks = True, step.batch.waits_for_masks

    def _admit_compiled(self) -> None:
        """Queues sequences whose grammar is compiled. Ends those with an invalid grammar or a complete output."""
        if not self._constraints.num_compiling:
            return
        is_idle = not (self._in_flight or self.scheduler.running or self.scheduler.waiting)
        for sequence, fault in self._constraints.take_ready(may_wait=is_idle):
            if fault:
                self._ended_already.append(self._outputs.refused(sequence, fault))
            elif sequence.matcher is not None and sequence.matcher.has_ended:
                self._outputs.remove(sequence.request.request_id)
                self._ended_already.append(
                    Output(request_id=sequence.request.request_id, token_ids=[], finish_reason="stop")
                )
            elif (refusal := self.scheduler.add(sequence, time.monotonic())) is not None:
                self._outputs.remove(sequence.request.request_id)
                self._ended_already.append(_refused(sequence.request.request_id, refusal))

    def _sample(self, handle: Any, step: Step) -> list[Output]:
        """Commits the pass that this one follows, since its masks depend on those tokens, and has this one sampled."""
        self._waits_for_masks = False
        outputs = []
        while len(self._in_flight) > self._num_stages:  # the others in flight have none of the rows that sample here
            outputs += self._commit(*self._in_flight.popleft())
        if not self._in_flight:
            return outputs  # the pass before could not be committed, and this one went with it
        guesses = self._runner.guesses(handle) if step.batch.num_drafts else NO_GUESSES
        masks, failed = self._constraints.masks(step, guesses)
        for sequence, reason in failed:
            outputs.append(self._outputs.refused(sequence, reason))
            self._leave(sequence)
        try:
            self._runner.sample(handle, masks)
        except RunnerLostError:
            raise
        except Exception as error:
            self._in_flight.pop()
            outputs += self._fail_all_running(step, error)
        return outputs

    def _commit(self, handle: Any, step: Step) -> list[Output]:
        began_s = time.monotonic()
        try:
            result = self._runner.collect(handle)
        except RunnerLostError:
            self._in_flight.appendleft((handle, step))  # whoever goes on hears the same again
            raise
        except Exception as error:
            return self._fail_all_running(step, error)
        self._failed_passes, now_s = 0, time.monotonic()
        self.scheduler.ended(step)
        self._rate.committed(step, now_s)
        # Passes follow each other on the device: one begins when it is launched, or when the one before has ended.
        seconds = now_s - max(step.launched_s, self._last_commit_s)
        self._last_commit_s = now_s
        is_computed_at_launch = step.launch_took_s > now_s - began_s
        self.scheduler.policy.committed(step, step.launch_took_s if is_computed_at_launch else seconds, now_s)
        self._speculation.committed(step.kind, step.batch, step.sequences, result.tokens, seconds)
        if step.loading_layerwise or result.swap_faults or self._void:
            self._drop_void(step, result)
        if self._transfers.is_present:
            self._give(step)
        return self._outputs.take(step, result)

    def _drop_void(self, step: Step, result: PassResult) -> None:
        """Preempts sequences whose pages or state came back changed from main memory, and drops what was computed from
        them, in this pass and in those in flight: nobody has seen it yet.
        """
        void = self._take_loaded_layerwise(step) | self.scheduler.kv_cache.prove(step, result.swap_faults)
        for sequence in void:
            if sequence.state is not State.FINISHED:
                self._void.add(sequence)
            if sequence.state is State.RUNNING:
                self.scheduler.leave(sequence, State.PREEMPTED)
        for row, sequence in enumerate(step.sequences):
            if sequence in self._void:
                result.drop(row)
                if sequence.in_flight == 1:  # this is its last row
                    self._void.discard(sequence)

    @staticmethod
    def _layer_reporter(connector: GuardedConnector, step: Step) -> Callable[[LayerProgress], None] | None:
        """Returns a function by which the connector sends prompts of this pass to other engines layer by layer, or None
        if no engine waits for them.
        """
        batch = step.batch
        rows = zip(batch.rows[batch.num_decodes :], step.sequences[batch.num_decodes :], strict=True)
        sending = [(sequence, row.start + row.count) for row, sequence in rows if connector.sends(sequence)]
        if not sending:
            return None

        def report(layers: LayerProgress) -> None:
            for sequence, num_tokens in sending:
                connector.launched(sequence, num_tokens, layers)

        return report

    def _give(self, step: Step) -> None:
        """Reports the prompt tokens that this pass computed to the connector, before sequences end and their pages are
        freed.
        """
        num_decodes = step.batch.num_decodes
        for row, sequence in zip(step.batch.rows[num_decodes:], step.sequences[num_decodes:], strict=True):
            if sequence.state is State.RUNNING:
                self._transfers.computed(sequence, row.start + row.count)

    def _fail_all_running(self, step: Step, error: Exception) -> list[Output]:
        """Fails all running sequences: without this pass's result, all that it and later passes computed is unknown.

        The prefix cache is emptied, since its contents are suspect. Sequences that wait or were preempted have lost
        nothing, and those that load blocks of a lower tier go back in line.
        """
        self._void.clear()
        self._unwind(step)
        while self._in_flight:
            handle, later = self._in_flight.popleft()
            with suppress(Exception):
                self._runner.collect(handle)
            self._unwind(later)
        outputs = self._fail(list(self.scheduler.running), error)
        self._tiers.distrust_device()
        for sequence in [one for one in self.scheduler.receiving if one.state is State.LOADING]:
            self._tiers.cancel(sequence)  # it shares pages of the prefix cache
            self.scheduler.not_received(sequence)
        self.scheduler.kv_cache.reset_prefix_cache()
        return outputs

    def _unwind(self, step: Step) -> None:
        """Releases what a pass that will not be committed has pinned, and what it was to copy to main memory or from
        there.
        """
        self.scheduler.failed(step)
        for sequence in step.loading_layerwise:
            self._tiers.cancel(sequence)
        for sequence in step.sequences:
            sequence.in_flight -= 1
            if sequence.is_leaving and not sequence.in_flight:
                self.scheduler.release(sequence, may_swap=False)

    def _fail(self, sequences: Iterable[Sequence], error: Exception) -> list[Output]:
        """Ends these sequences with an error. Sequences that have ended already get no output."""
        self._failed_passes += 1
        self._stats.failed_passes += 1
        logger.error("a forward pass fails, and the requests in it with it", exc_info=error)
        reason = f"the forward pass failed ({type(error).__name__}: {error})"
        outputs = []
        for sequence in sequences:
            request_id = sequence.request.request_id
            if sequence.state is not State.FINISHED and self._outputs.remove(request_id) is not None:
                self.scheduler.leave(sequence, State.FINISHED)
                outputs.append(_failed(request_id, reason))
        if self._failed_passes >= MAX_FAILED_PASSES:
            raise RunnerFailedError(f"{MAX_FAILED_PASSES} passes in a row have failed, the last: {reason}") from error
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache. Returns False, and changes nothing, while there is work."""
        if self.has_work:
            return False
        self._tiers.clear()  # first, as prefetches share pages of the prefix cache
        self.scheduler.kv_cache.reset_prefix_cache()
        return True

    def take_events(self) -> list[KVEvent]:
        """Returns the changes of the prefix cache since the last call, in order for each medium."""
        return self._tiers.take_events() + self.scheduler.kv_cache.take_events()

    def snapshot(self) -> list[BlockStored]:
        """Returns all cached blocks, parents first: the state after the events taken so far and those still to take."""
        return self.scheduler.kv_cache.snapshot() + self._tiers.snapshot()

    def load(self) -> LoadReport:
        """Returns the current load, for gateways. Its `accepted` has the ids of requests added since the last call."""
        scheduler = self.scheduler
        accepted, self._accepted = self._accepted, []
        transfers = self._transfers.stats
        host_tokens_per_s, disk_tokens_per_s = self._tiers.tokens_per_s
        return LoadReport(
            ts=time.time(),
            running=len(scheduler.running) + len(scheduler.receiving),  # all that hold pages
            waiting=len(scheduler.waiting) + self._num_compiling,
            queued_tokens=scheduler.num_queued_tokens,
            kv_usage=scheduler.kv_cache.usage,
            accepted=accepted,
            prefill_tokens_per_s=self._rate.tokens_per_s,
            transfer_bytes_per_s=transfers.bytes_per_s,
            kv_bytes_per_token=transfers.bytes_per_token,
            host_tokens_per_s=host_tokens_per_s,
            disk_tokens_per_s=disk_tokens_per_s,
        )

    def stats(self) -> EngineStats:
        """Returns counters since the start, and current gauges."""
        scheduler, speculation = self.scheduler, self._speculation
        return dataclasses.replace(
            self._stats,
            drafts=speculation.num_drafts,
            draft_tokens=speculation.num_draft_tokens,
            accepted_tokens_by_position=list(speculation.accepted_by_position),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.receiving) + self._num_compiling,
            kv_usage=scheduler.kv_cache.usage,
            preemptions=scheduler.num_preemptions,
            generation_tokens=self._outputs.num_tokens,
            prefill_tokens_per_s=self._rate.tokens_per_s,
            kv_transfer=self._transfers.stats,
            kv_tiers=with_tier(self._tiers.stats, SWAP, scheduler.kv_cache.swap_stats),
        )

    @property
    def _num_compiling(self) -> int:
        """Requests whose grammar is being compiled: they count as waiting."""
        return self._constraints.num_compiling


def _refused(request_id: str, refusal: Refusal) -> Output:
    return Output(
        request_id=request_id,
        token_ids=[],
        finish_reason="error",
        error=refusal.reason,
        retry_after_s=refusal.retry_after_s,
    )


def _failed(request_id: str, reason: str) -> Output:
    return Output(request_id=request_id, token_ids=[], finish_reason="error", error=reason)

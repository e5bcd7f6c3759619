"""One core request's output as the offline API collects it: text, log probabilities by token, times. No engine."""

from mini_infer_engine.core.request import Output, Request, TokenLogprobs
from mini_infer_engine.offline.beams import Logprob
from mini_infer_engine.offline.metrics import RequestStateStats
from mini_infer_engine.offline.sampling_params import RequestOutputKind
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import OutputText
from mini_infer_engine.text.token_bytes import TokenBytes


class LogprobReader:
    """Converts log probabilities to vLLM's form, with the text of each token."""

    def __init__(self, decoder: Decoder | None) -> None:
        self._token_bytes = None if decoder is None else TokenBytes(decoder)
        self._texts: dict[int, str] = {}
        """Texts of token ids that were converted; as many as the vocabulary has at most."""

    def by_token(self, position: TokenLogprobs, *, are_named: bool = False) -> dict[int, Logprob]:
        """Returns the position's own token, then the most likely ones in order, or those that were named."""
        own = position.token_id
        by_token = {own: Logprob(position.logprob, position.rank, self._text(own))}
        tops = zip(position.top_token_ids, position.top_logprobs, strict=True)
        for rank, (token_id, logprob) in enumerate(tops, start=1):
            if token_id != own:
                by_token[token_id] = Logprob(logprob, None if are_named else rank, self._text(token_id))
        return by_token

    def _text(self, token_id: int) -> str | None:
        if self._token_bytes is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._token_bytes.text(token_id)
        return text


class Reply(OutputText):
    """The output of one core request, with its log probabilities and times."""

    def __init__(
        self,
        request: Request,
        decoder: Decoder | None,
        logprobs: LogprobReader,
        arrival_time: float,
        arrived_s: float,
        kind: RequestOutputKind,
    ) -> None:
        """`arrival_time` is the time of day, `arrived_s` the same moment by the monotonic clock."""
        super().__init__(request, decoder)
        self.logprobs_by_token: list[dict[int, Logprob]] = []
        """Log probabilities of each output token."""
        self.arrival_time, self.arrived_s = arrival_time, arrived_s
        self.first_token_ts: float | None = None
        """Time of the first token by the monotonic clock; `last_token_ts` is that of the last token so far."""
        self.last_token_ts: float | None = None
        self.reports_steps = kind is not RequestOutputKind.FINAL_ONLY
        """True if the caller gets outputs before the last one."""
        self._reader = logprobs
        self._new_text: list[str] | None = [] if kind is RequestOutputKind.DELTA else None
        """Text that no output had yet, if outputs are deltas."""

    def take(self, output: Output, now_s: float) -> None:
        """Takes the output of a step."""
        if output.token_ids:
            self.last_token_ts = now_s
            if self.first_token_ts is None:
                self.first_token_ts = now_s
        delta = self.push(output)
        if delta.logprobs:  # now, while the device computes the next pass
            are_named = self.request.sampling.logprob_token_ids is not None
            self.logprobs_by_token += [self._reader.by_token(one, are_named=are_named) for one in delta.logprobs]
        if self._new_text is not None:
            self._new_text.append(delta.text)

    def take_new_text(self) -> str:
        """Returns the text since the last call; only if outputs are deltas."""
        text, self._new_text = "".join(self._new_text or ()), []
        return text

    def fault(self) -> Exception | None:
        """Returns the error that ended it: ValueError if the engine refused the request, RuntimeError if a pass
        failed, None otherwise.
        """
        if self.finish_reason != "error":
            return None
        if self.is_refused:
            return ValueError(self.error)
        return RuntimeError(f"request {self.request.request_id}: {self.error}")

    def prompt_logprobs_by_token(self) -> list[dict[int, Logprob] | None] | None:
        """Returns the log probabilities at each position of the prompt, if they were requested."""
        if self.request.sampling.prompt_logprobs is None:
            return None
        return [None, *map(self._reader.by_token, self.prompt_logprobs)]

    @property
    def stats(self) -> RequestStateStats:
        """The request's times."""
        at = self.arrived_s
        return RequestStateStats(
            num_generation_tokens=len(self.token_ids),
            arrival_time=self.arrival_time,
            queued_ts=at,
            scheduled_ts=None if self.queue_time_s is None else at + self.queue_time_s,
            first_token_ts=self.first_token_ts,
            last_token_ts=self.last_token_ts,
            first_token_latency=None if self.first_token_ts is None else self.first_token_ts - at,
        )

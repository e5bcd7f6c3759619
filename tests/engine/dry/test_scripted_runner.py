from mini_infer_engine.core.batch import Batch, PageCopy, Row, Transfers
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.dry.script import Reply
from mini_infer_engine.dry.scripted_runner import ScriptedRunner, reply_to
from mini_infer_engine.dry.vocabulary import END_ID, TURN_END_ID
from tests.support.tiny_models import sampled

PROMPT = list(b"sixteen letters!and a tail")
SAMPLING_PARAMS = SamplingParams()


def prefill(runner: ScriptedRunner, pages: list[int], start: int = 0, copies: tuple[PageCopy, ...] = ()) -> int | None:
    row = Row(0, start, len(PROMPT) - start, PROMPT[start:], pages, SAMPLING_PARAMS)
    return sampled(runner.collect(runner.launch(Batch([row], 0, Transfers(copies=list(copies))))))[0]


def decode(runner: ScriptedRunner, pages: list[int], count: int) -> list[int | None]:
    tokens = []
    for index in range(1, count + 1):
        row = Row(0, len(PROMPT) + index - 1, 1, None, pages, SAMPLING_PARAMS, output_index=index)
        tokens += sampled(runner.collect(runner.launch(Batch([row], 1))))
    return tokens


def test_scripted_runner_repeats_the_prompt_and_ends() -> None:
    runner = ScriptedRunner(num_pages=8)
    tokens = [prefill(runner, [3, 1, 2, 5]), *decode(runner, [3, 1, 2, 5], len(PROMPT))]
    assert tokens == [*PROMPT, END_ID]


def test_scripted_runner_reads_the_prompt_from_its_pages() -> None:
    runner = ScriptedRunner(num_pages=8)
    prefill(runner, [3, 1])
    assert prefill(runner, [3, 2], start=16) == PROMPT[0]  # a hit: the first page was computed before
    assert prefill(runner, [4, 2], start=16) == END_ID  # a page that nobody computed
    assert prefill(runner, [6, 2], start=16, copies=(PageCopy(3, 6, 16),)) == PROMPT[0]


def test_reply_to_uses_the_first_matching_line() -> None:
    script = (Reply("it rains", when="Result: rain"), Reply("<tool_call>", when="weather"))
    assert reply_to(list(b"the weather?"), script) == [*b"<tool_call>", TURN_END_ID]
    assert reply_to([TURN_END_ID, *b"the weather? Result: rain"], script) == [*b"it rains", TURN_END_ID]
    assert reply_to(list(b"hello"), script) == [*b"hello", END_ID], "as without a script"


def test_scripted_runner_generates_the_matching_reply() -> None:
    runner = ScriptedRunner(num_pages=8, script=(Reply("yes", when="tail"),))
    assert [prefill(runner, [3, 1, 2]), *decode(runner, [3, 1, 2], 3)] == [*b"yes", TURN_END_ID]

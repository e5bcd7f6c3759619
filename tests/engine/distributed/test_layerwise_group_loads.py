"""Blocks of several ranks come from main memory with the pass behind them, and count only if every rank's part does."""

import os
import random
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mini_infer_engine import LLM
from mini_infer_engine.core.batch import RunnerLostError
from mini_infer_engine.core.kv_tiers import tier as tier_module
from mini_infer_engine.core.kv_tiers.tier import Tier
from mini_infer_engine.core.kv_tiers.tier_memory import PageMove
from mini_infer_engine.core.prefix_cache import MISS
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.distributed.step_messages import CopyBlocks, Launch, StepMessage
from mini_infer_engine.kv_host.pool_file import PoolLayout
from tests.support.tiny_models import save_tiny_model

PROMPTS = [[(place * 7 + shift * 13) % 190 + 5 for place in range(90)] for shift in range(3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0)
HIT_TOKENS = 80
"""Tokens of a prompt in whole pages."""
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no file system in memory here")


@dataclass
class Group:
    """An engine of two ranks, which loads whatever is in its main memory."""

    llm: LLM
    pool: Path
    """The shared pool of main memory, in which the other rank has a part of its own."""
    followed: list[list[int]] = field(default_factory=list)
    """Tickets of the loads of each launched pass that follows some."""

    def __post_init__(self) -> None:
        self.engine: Any = self.llm._engine
        self.tiers, self.memory = self.engine._tiers, self.engine._runner.host_memory
        self.engine._rate.committed = lambda step, now_s: None  # a rate that stays
        self.tiers._search.compute_tokens_per_s = 1.0  # so slow that loads always pay
        self.memory.least_load_s = 0.0  # its pages are small
        ranks, send = self.engine._runner.ranks, self.engine._runner.ranks.send

        def noted(message: StepMessage) -> None:
            if isinstance(message, Launch) and message.loads:
                self.followed.append(message.loads)
            send(message)

        ranks.send = noted

    def scored(self, prompt: list[int]) -> list[float]:
        """Returns the scored text of a prompt whose blocks are in main memory alone, if they are anywhere."""
        while self.engine.write_behind():
            self.tiers.wait(1.0)
        self.engine.scheduler.kv_cache.reset_prefix_cache()
        return scored(self.llm, prompt)

    def stats(self) -> Any:
        return self.engine.stats().kv_tiers.tiers["host"]


def _request(prompt: list[int]) -> Request:
    return Request(request_id="only", prompt_token_ids=prompt, sampling=PARAMS)


def scored(llm: LLM, prompt: list[int]) -> list[float]:
    """Returns the tokens that follow a prompt, and the log probability of each, which wrong blocks change first."""
    llm._engine.add(_request(prompt))
    made = list[float]()
    while llm._engine.has_work:
        for output in llm._engine.step():
            made += [*output.token_ids, *(each.logprob for each in output.logprobs)]
    return made


def open_llm(folder: Path, **settings: Any) -> LLM:
    common = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "skip_tokenizer_init": True}
    return LLM(str(folder), kv_cache_memory=4_000_000, **common, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    """The scored texts of one process without tiers."""
    llm = open_llm(folder)
    return [pytest.approx(scored(llm, prompt), abs=1e-4) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=[TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def shared_group(folder: Path, request: pytest.FixtureRequest) -> Iterator[Group]:
    with TemporaryDirectory(dir="/dev/shm") as pool:
        group = Group(open_llm(folder, kv_host_memory=4_000_000, kv_host_path=pool, **request.param), Path(pool))
        for prompt in PROMPTS:
            group.scored(prompt)
        yield group
        group.engine._runner.ranks.close()


@pytest.fixture
def group(shared_group: Group) -> Group:
    shared_group.followed.clear()
    return shared_group


@pytest.mark.parametrize("late", [0, 1])
def test_texts_are_right_when_loads_of_one_rank_come_late(
    group: Group, expected: list[Any], late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its pages are full of one block."""
    send, local, tickets, before = group.memory._send, group.memory._local, count(1 << 40), group.stats()

    def send_late(command: CopyBlocks) -> None:
        if command.way == "load_layerwise":
            # Not the same blocks in another order: attention would not see that.
            wrong = [PageMove(command.moves[0].source, move.target) for move in command.moves] * 400
            if late:
                send(CopyBlocks(next(tickets), "load", wrong))
            else:
                local._loading.requests.put(lambda: [local._load(move) for move in wrong])
        send(command)

    monkeypatch.setattr(group.memory, "_send", send_late)
    assert [group.scored(prompt) for prompt in PROMPTS] == expected
    stats = group.stats()
    assert len(group.followed) == len({ticket for (ticket,) in group.followed}) == len(PROMPTS)
    assert stats.hit_tokens - before.hit_tokens == len(PROMPTS) * HIT_TOKENS
    assert (stats.mismatches, stats.errors) == (before.mismatches, before.errors)


def flip(group: Group, page: int, draw: random.Random) -> None:
    """Flips a bit of the other rank's part of a page."""
    (path,) = Path(group.pool, "rank-1").glob("*.pool")
    with path.open("r+b") as file:
        layout = PoolLayout.of_header(file.read(4096))
        assert layout is not None
        place = layout.pages_at + page * layout.page_bytes + draw.randrange(layout.page_bytes)
        file.seek(place)
        (byte,) = struct.unpack("B", file.read(1))
        file.seek(place)
        file.write(struct.pack("B", byte ^ 1 << draw.randrange(8)))


def test_no_text_is_wrong_when_bits_of_another_rank_have_flipped(
    group: Group, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "MOST_MISMATCHES", 1000)
    draw, before = random.Random(2), group.stats().mismatches
    for number in range(5):
        group.scored(PROMPTS[0])  # they are in main memory as they were
        group.followed.clear()
        flip(group, group.tiers._host.page(draw.choice(group.tiers._host.records).key), draw)
        made = [group.scored(prompt) for prompt in PROMPTS]
        assert made == expected
        assert len(group.followed) == 3
        assert group.stats().mismatches - before == number + 1


def test_text_is_right_when_only_another_rank_cannot_copy(
    group: Group, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    send, errors = group.memory._send, list[str]()
    group.scored(PROMPTS[1])

    def send_wrong(command: CopyBlocks) -> None:
        moves = [PageMove(1 << 40, move.target) for move in command.moves]
        send(CopyBlocks(command.ticket, command.way, moves) if command.way == "load_layerwise" else command)

    monkeypatch.setattr(Tier, "failed", lambda tier, reason: errors.append(reason))  # it stays on for other tests
    with monkeypatch.context() as patched:
        patched.setattr(group.memory, "_send", send_wrong)
        assert group.scored(PROMPTS[1]) == expected[1]
    assert len(errors) == 1
    assert group.scored(PROMPTS[1]) == expected[1]
    assert (len(errors), len(group.followed)) == (1, 3)


def test_text_is_right_when_the_first_rank_alone_cannot_begin(
    group: Group, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = list[str]()
    group.scored(PROMPTS[2])

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(Tier, "failed", lambda tier, reason: errors.append(reason))
    monkeypatch.setattr(group.memory._local, "load_layerwise", fail)
    assert group.scored(PROMPTS[2]) == expected[2]
    assert errors == ["rank 0: MemoryError: no memory"]
    assert not group.tiers.are_copying


class _Silent:
    """The socket of reports of a rank that reports nothing, and is killed while it is waited for."""

    def __init__(self, pid: int) -> None:
        self.pid, self.num_polls = pid, 0

    def poll(self, timeout_ms: int) -> int:
        self.num_polls += 1
        if timeout_ms and self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.pid = 0
        return 0


def test_lost_rank_ends_the_wait_for_its_proof(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(open_llm(folder, kv_host_memory=4_000_000, **TENSOR), Path())
    group.scored(PROMPTS[0])
    (process,) = group.engine._runner.ranks.processes.values()
    send, silent = group.memory._send, _Silent(process.pid)

    def send_without_answer(command: CopyBlocks) -> None:
        if command.way == "load_layerwise":
            monkeypatch.setattr(group.memory, "_reports", silent)
        send(command)

    monkeypatch.setattr(group.memory, "_send", send_without_answer)
    with pytest.raises(RunnerLostError):
        group.scored(PROMPTS[0])
    assert (len(group.followed), silent.pid) == (1, 0)
    with pytest.raises(RunnerLostError):
        group.engine.step()


def test_texts_are_right_when_layers_have_windows(tmp_path: Path) -> None:
    """Each rank's pass follows its parts of the pages of both KV groups."""
    layer_types = ["sliding_attention", "full_attention"] * 2
    save_tiny_model(
        tmp_path, "gemma3_text", num_hidden_layers=4, head_dim=16, sliding_window=40, layer_types=layer_types
    )
    windows = {"disable_hybrid_kv_cache_manager": False}
    alone = open_llm(tmp_path, **windows)
    expected = [pytest.approx(scored(alone, prompt), abs=1e-4) for prompt in PROMPTS]
    with TemporaryDirectory(dir="/dev/shm") as pool:
        llm = open_llm(tmp_path, kv_host_memory=8_000_000, kv_host_path=pool, **TENSOR, **windows)
        group = Group(llm, Path(pool))
        assert [group.scored(prompt) for prompt in PROMPTS] == expected
        assert [group.scored(prompt) for prompt in PROMPTS] == expected
        assert len(group.followed) == len(PROMPTS)
        assert (group.stats().hit_tokens, group.stats().mismatches) == (len(PROMPTS) * HIT_TOKENS, 0)
        found = group.tiers._search.match(group.engine.inputs.unserved(_request(PROMPTS[0])), MISS)
        assert found.places[-1] == (1, 4), "the window's pages come last"
        flip(group, group.tiers._host.page(found.pages[-1].record.key), random.Random(3))
        assert group.scored(PROMPTS[0]) == expected[0]
        assert (len(group.followed), group.stats().mismatches) == (4, 1)
        group.engine._runner.ranks.close()

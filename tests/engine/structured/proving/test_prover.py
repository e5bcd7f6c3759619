"""Workers that check grammars, and what their deaths mean: real processes over the dry run's vocabulary."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from mini_infer_engine.dry.vocabulary import dry_assets
from mini_infer_engine.structured.grammar import Grammar, of_json_schema, of_regex
from mini_infer_engine.structured.limits import MAX_GRAMMAR_BYTES, MAX_SCHEMA_DEPTH
from mini_infer_engine.structured.proving.process import WAITING_WORKERS
from mini_infer_engine.structured.proving.prover import Prover, ProverLostError
from tests.engine.server.dry_server import children_of, wait_until
from tests.support.hostile_grammars import (
    LINKS,
    PRIME,
    chain,
    costly,
    rules_in_a_row,
    terminals_in_a_row,
    unchecked,
    unchecked_lark,
)

SMALL = of_regex("[0-9]{2,6}").text


def made() -> Prover:
    return Prover(lambda: dry_assets().files["tokenizer.json"])


@pytest.fixture(scope="module")
def prover() -> Prover:
    return made()


@pytest.mark.parametrize(
    "grammar",
    [
        *(unchecked(chain(link, 3000)) for link in LINKS.values()),
        unchecked_lark(rules_in_a_row(3000)),
        unchecked_lark(terminals_in_a_row(8000)),
    ],
    ids=[*LINKS, "rules", "terminals"],
)
def test_only_its_worker_ends_when_a_grammar_overflows_the_stack(prover: Prover, grammar: Grammar) -> None:
    before = prover.ends["stack"]
    assert "nests too deeply" in prover.prove(grammar.text).fault
    assert prover.ends["stack"] == before + 1
    assert not prover.prove(SMALL).fault


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_chains_within_the_limit_are_accepted(prover: Prover, link: object) -> None:
    schema = chain(link, MAX_SCHEMA_DEPTH // 2 - 1)  # type: ignore[arg-type]  # a table of functions
    assert not prover.prove(of_json_schema(schema).text).fault


@pytest.mark.parametrize(
    "grammar",
    [
        unchecked(costly(PRIME)),
        unchecked({"type": "number", "multipleOf": PRIME}),
        unchecked({"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(8000)}}),
    ],
    ids=["integer", "number", "properties"],
)
def test_a_worker_ends_when_a_grammar_exceeds_a_limit(prover: Prover, grammar: Grammar) -> None:
    before = prover.ends.total()
    assert "takes more than" in prover.prove(grammar.text).fault
    assert prover.ends.total() == before + 1


def test_a_proof_has_the_memory_of_the_grammar(prover: Prover) -> None:
    small = prover.prove(SMALL)
    large = prover.prove(unchecked({"type": "number", "multipleOf": 100_003}).text)
    assert 0 < small.num_bytes < large.num_bytes < MAX_GRAMMAR_BYTES


def test_a_grammar_is_refused_when_its_first_masks_fail(prover: Prover) -> None:
    assert "too many expressions" in prover.prove(unchecked(costly(100_003)).text).fault


def test_a_schema_is_refused_when_a_property_pattern_matches_nothing(prover: Prover) -> None:
    """Else an output that has written a comma, behind which only such a name may come, would end in an error."""
    schema = {
        "type": "object",
        "properties": {"x_a": {"type": "integer"}},
        "patternProperties": {"^x_a$": {"type": "integer"}},
        "required": ["x_a"],
        "additionalProperties": False,
    }
    assert "patternProperties" in prover.prove(of_json_schema(schema).text).fault
    assert not prover.prove(of_json_schema(schema | {"patternProperties": {"^x_": {"type": "integer"}}}).text).fault
    apart = [{"type": "object", keyword: schema[keyword]} for keyword in ("properties", "patternProperties")]
    apart[1]["additionalProperties"] = False
    assert "patternProperties" in prover.prove(of_json_schema({"allOf": apart}).text).fault


def test_only_its_grammar_fails_when_a_worker_is_killed(prover: Prover) -> None:
    prover.start()
    assert prover.pid is not None
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.001):
            for pid in children_of(prover.pid or 0):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(ProverLostError):
            prover.prove(unchecked({"type": "number", "multipleOf": PRIME}).text)
    finally:
        ended.set()
        killer.join()
    assert prover.ends["lost"] == 1
    assert not prover.prove(SMALL).fault


def test_the_prover_is_restarted_when_it_is_killed() -> None:
    prover = made()
    prover.start()
    first = prover.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not _runs(first))
    assert not prover.prove(SMALL).fault
    assert prover.pid != first


def test_a_worker_waits_for_the_next_grammar_when_one_was_proved() -> None:
    """No client waits for a fork, which takes long where the vocabulary is large."""
    prover = made()
    prover.start()
    assert prover.pid is not None
    wait_until(lambda: len(children_of(prover.pid or 0)) == WAITING_WORKERS)
    first = set(children_of(prover.pid))
    assert not prover.prove(SMALL).fault
    wait_until(lambda: len(set(children_of(prover.pid or 0)) - first) == 1)
    assert len(children_of(prover.pid)) == WAITING_WORKERS


def test_waiting_workers_end_with_the_prover() -> None:
    prover = made()
    prover.start()
    pid = prover.pid
    assert pid is not None
    wait_until(lambda: len(children_of(pid)) == WAITING_WORKERS)
    waiting = children_of(pid)
    del prover
    wait_until(lambda: not any(map(_runs, (pid, *waiting))))


def test_the_provers_process_ends_with_it() -> None:
    prover = made()
    prover.start()
    pid = prover.pid
    assert pid is not None
    del prover
    wait_until(lambda: not _runs(pid))


def test_grammars_are_proved_concurrently(prover: Prover) -> None:
    texts = [of_regex(f"[0-9]{{1,{index + 1}}}").text for index in range(24)]
    texts += [unchecked(chain(LINKS["$ref"], 3000 + index)).text for index in range(4)]
    with ThreadPoolExecutor(8) as threads:
        faults = [proof.fault for proof in threads.map(prover.prove, texts)]
    assert [bool(fault) for fault in faults] == [False] * 24 + [True] * 4


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # it may be gone at any moment
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

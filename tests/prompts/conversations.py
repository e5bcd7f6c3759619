"""Random conversations for hypothesis, in the form that templates read."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.prompts.folders import FRAGMENTS

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""No deadline: the machine may be busy, and the first example may train a tokenizer."""

texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=8).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
arguments = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
functions = st.fixed_dictionaries({"name": texts, "description": texts, "parameters": arguments})
tools = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": functions}), min_size=1, max_size=2)
calls = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": texts, "arguments": arguments})}
)
users = st.fixed_dictionaries({"role": st.just("user"), "content": texts})
assistants = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": texts},
    optional={"reasoning_content": texts, "tool_calls": st.lists(calls, min_size=1, max_size=2)},
)
systems = st.fixed_dictionaries({"role": st.just("system"), "content": texts})
tool_results = st.fixed_dictionaries({"role": st.just("tool"), "content": texts, "tool_call_id": st.just("call_1")})


def _turns(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    return [message for pair in pairs for message in pair]


orderly = st.builds(
    lambda system, turns, last: [*system, *_turns(turns), *last],
    st.lists(systems, max_size=1),
    st.lists(st.tuples(users, assistants), max_size=3),
    st.lists(users, min_size=1, max_size=1),
)
disorderly = st.lists(users | assistants | systems | tool_results, min_size=1, max_size=5)
conversations = orderly | disorderly
documents = st.lists(st.fixed_dictionaries({"title": texts, "text": texts}), max_size=2)

"""What hostile chat templates may cost: a known amount of work and memory, whatever they do."""

import resource
import subprocess
import sys
import time
import tracemalloc

import pytest

from mini_infer_prompts.chat_template import ChatTemplate
from mini_infer_prompts.template_budget import (
    OPERATION,
    TemplateBudgetError,
    UnboundedOperationError,
    rendering_units,
)
from mini_infer_prompts.template_environment import MAX_SOURCE_CHARACTERS, is_bounded
from mini_infer_web.api_errors import ApiError
from tests.prompts import templates

UNITS = 5_000_000
DOUBLE = "{% set ns = namespace(x='a' * 64) %}{% for i in range(60) %}"
SHARED = "{% set a = ['x', 'y'] %}" + "{% set a = [a, a] %}" * 60
HOSTILE = {
    "folded_product": "{% set x = 'a' * 3000000000 %}",
    "folded_in_output": "{{ 'a' * 3000000000 }}",
    "product": "{% set x = messages[0].content * 3000000000 %}",
    "product_reversed": "{% set x = 3000000000 * 'a' %}",
    "list_product": "{% set x = [0] * 300000000 %}",
    "nested_ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested_messages": "{% for a in kwargs_list %}" * 6 + "x" + "{% endfor %}" * 6,
    "filtered_loop": "{% for a in range(99999) if a < 0 %}{% endfor %}" * 50,
    "long_loop_body": "{% for a in range(99999) %}" + "{{ a }}" * 500 + "{% endfor %}",
    "loop_over_slices": "{% for a in range(9999) %}{% set x = messages[0].content[1:] %}{% endfor %}",
    "doubling": DOUBLE + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling_concat": DOUBLE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling_join": DOUBLE + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "doubling_method": DOUBLE + "{% set ns.x = ''.join([ns.x, ns.x]) %}{% endfor %}",
    "doubling_replace": DOUBLE + "{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "doubling_replace_filter": DOUBLE + "{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}",
    "replace_nothing": DOUBLE + "{% set ns.x = ns.x.replace('', 'aaaa') %}{% endfor %}",
    "doubling_block": DOUBLE + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling_macro": DOUBLE + "{% macro m() %}{{ ns.x }}{{ ns.x }}{% endmacro %}{% set ns.x = m() %}{% endfor %}",
    "doubling_list": DOUBLE + "{% set ns.x = ns.x | list + ns.x | list %}{% endfor %}",
    "shared_json": SHARED + "{{ a | tojson }}",
    "shared_shown": SHARED + "{{ a }}",
    "shared_string": SHARED + "{% set x = a | string %}",
    "shared_concat": SHARED + "{% set x = 'x' ~ a %}",
    "shared_compared": SHARED + SHARED.replace(" a ", " b ").replace("[a, a]", "[b, b]") + "{{ a == b }}",
    "shared_in": SHARED + SHARED.replace(" a ", " b ").replace("[a, a]", "[b, b]") + "{{ a in [b] }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "squares": "{% set ns = namespace(x=10) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(200) }}",
    "macro_for_ever": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "caller": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 40
    + "x"
    + "{% endcall %}" * 40,
    "searches": "{% for a in range(99999) %}{% set x = messages[0].content in messages[0].content %}{% endfor %}",
    "counts": "{% for a in range(99999) %}{% set x = messages[0].content.count('ab') %}{% endfor %}",
    "equal": "{% set y = messages[0].content + '' %}"
    "{% for a in range(99999) %}{{ y == messages[0].content }}{% endfor %}",
    "upper": "{% for a in range(99999) %}{% set x = messages[0].content | upper %}{% endfor %}",
    "split": "{% for a in range(99999) %}{% set x = messages[0].content.split('a') %}{% endfor %}",
    "selects": "{% for a in range(99999) %}"
    "{% set x = messages | selectattr('role', 'equalto', 'user') | list %}{% endfor %}",
    "maps": "{% for a in range(9999) %}"
    "{% set x = messages | map(attribute='content') | map('upper') | join %}{% endfor %}",
    "date": "{{ strftime_now('%Y' * 100000000) }}",
    "indent": "{{ messages | tojson(indent=2000000000) }}",
    "replace_by_name": DOUBLE + "{% set ns.x = ns.x | replace(old='a', new='aa') %}{% endfor %}",
    "join_by_name": DOUBLE + "{% set ns.x = [1, 2, 3] | join(d=ns.x) %}{% endfor %}",
    "indent_in_place": "{{ messages | tojson(false, 2000000000) }}",
    "separators": DOUBLE + "{% set ns.x = [1, 2, 3] | tojson(separators=(ns.x, '')) %}{% endfor %}",
    "deep_indent": "{% set ns = namespace(x=[]) %}{% for i in range(900) %}{% set ns.x = [ns.x, 1] %}{% endfor %}"
    "{% for i in range(9999) %}{% set y = ns.x | tojson(indent=16) %}{% endfor %}",
    "precision": "{{ 2.5 | round(1000000000, 'ceil') }}",
    "letters": "{% set x = (messages[0].content * 40) | list %}",
    "words": "{% set x = (messages[0].content * 40).split('a') %}",
    "filter_in_a_list": "{{ ['a'] | map(*['center', 3000000000]) | list }}",
    "many_ranges": "{% for a in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
}
LEFT_TO_A_WORKER = {
    "format": "{{ '{:>3000000000}'.format('x') }}",
    "percent": "{{ '%3000000000d' % 5 }}",
    "percent_of_a_variable": "{% set w = '%3000000000d' %}{{ w % 5 }}",
    "center": "{{ 'a' | center(3000000000) }}",
    "center_in_a_block": "{% autoescape 'a' | center(3000000000) %}{% endautoescape %}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "zfill": "{{ '1'.zfill(3000000000) }}",
    "translate": "{{ ('a' * 1000).translate({97: 'a' * 1000}) }}",
    "expandtabs": "{{ '\\t'.expandtabs(3000000000) }}",
    "bytes": "{{ (1).to_bytes(3000000000) }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "indented": "{{ 'a' | indent(3000000000, true) }}",
    "wordwrap": "{{ messages[0].content | wordwrap(1) }}",
    "batch": "{{ [1] | batch(3000000000, 0) | list }}",
    "slices": "{{ [1] | slice(3000000000) | list }}",
    "recursive": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "cycler": "{% set c = cycler('a') %}{{ c.next() }}",
    "keys": "{% set t = (1, 2) %}{{ {t: 1} }}",
    "long": "a" * (MAX_SOURCE_CHARACTERS + 1),
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep_not": "{{ " + "not " * 900 + "1 }}",
    "deep_if": "{% if a %}" * 300 + "{% endif %}" * 300,
    "sum": "{{ messages | sum(attribute='content', start='') }}",
    "pprint": "{{ messages | pprint }}",
    "xmlattr": "{{ {'a': 'b'} | xmlattr }}",
    "include": "{% include 'other' %}",
}
MESSAGES = [{"role": "user", "content": "ab" * 50_000}]


def render(source: str, strict: bool = True) -> str:
    variables = {"kwargs_list": list(range(1000)), "tools": None}
    with rendering_units(UNITS):
        template = ChatTemplate(source, strict)
        return template.render(MESSAGES, variables, add_generation_prompt=True, continue_final_message=False)


@pytest.mark.parametrize("name", HOSTILE)
def test_work_and_memory_are_bounded_when_a_template_is_hostile(name: str) -> None:
    source = HOSTILE[name]
    if not is_bounded(source):
        return
    tracemalloc.start()
    began_s = time.thread_time()
    try:
        with pytest.raises((TemplateBudgetError, UnboundedOperationError, ApiError)):
            render(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60_000_000
    assert time.thread_time() - began_s < 10.0, "of seconds that tracing multiplies"


def test_a_range_costs_its_length_when_a_filter_reads_it() -> None:
    """A template that lists ranges within a loop took minutes in place of a second."""
    source = "{% for a in range(20) %}{% set x = range(99999) | list %}{% endfor %}"
    with rendering_units(20 * 99_999 * OPERATION), pytest.raises(TemplateBudgetError):
        ChatTemplate(source, strict=True).render(MESSAGES, {}, add_generation_prompt=True, continue_final_message=False)


# A model's own template may use in its own engine what has no bound, such as the filter `center`.
@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - {"filter_in_a_list"}))
def test_a_client_gets_a_400_when_its_own_engine_renders_too_much(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        render(HOSTILE[name], strict=False)
    assert (caught.value.status, caught.value.code) == (400, "chat_template_error")


@pytest.mark.parametrize("name", LEFT_TO_A_WORKER)
def test_a_template_is_not_rendered_in_the_server_when_its_work_is_unknown(name: str) -> None:
    source = LEFT_TO_A_WORKER[name]
    if is_bounded(source):
        with pytest.raises((UnboundedOperationError, TemplateBudgetError)):
            render(source)


@pytest.mark.parametrize("name", ["QWEN_THINKING", "LLAMA3", "MISTRAL_TOOLS", "CHATML", "GEMMA"])
def test_common_templates_are_recognised_as_bounded(name: str) -> None:
    assert is_bounded(getattr(templates, name))


def test_compiling_computes_nothing_when_a_template_has_constants() -> None:
    """In a process with a memory limit of its own, since a failure here would take this one's."""
    code = "import sys; from mini_infer_prompts.chat_template import ChatTemplate; ChatTemplate(sys.argv[1], True)"
    for name in ("folded_product", "folded_in_output", "power"):
        limit = lambda: resource.setrlimit(resource.RLIMIT_DATA, (1 << 29, 1 << 29))  # noqa: E731
        done = subprocess.run(
            [sys.executable, "-c", code, HOSTILE[name]], preexec_fn=limit, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr

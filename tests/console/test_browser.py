"""The console in a real Chromium, on `mini-infer up` with two engines of the demo model. One start for all tests.

Tests run in order: while an engine starts, others talk to those that are there.
"""

import json
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.engine.server.dry_server import wait_until
from tests.support.chromium import Browser
from tests.support.local_up import LocalUp, local_up

QUESTION = "What does textwrap.dedent do?"
ANSWER = "Remove any common leading whitespace"
TOOLS = [
    {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SHORT = json.dumps({"settings": {"maxTokens": "12"}, "columns": [{"model": "", "engine": "", "messages": []}]})
"""What the page has stored: answers of a few tokens, since more prove nothing more."""
PAGES = {"chat": "Send", "fleet": "Engines", "prefixes": "Tokens", "requests": "Outcome"}
"""What each page shows when it is whole."""
LONG = " ".join(["What does textwrap.dedent do, and what does textwrap.indent do?"] * 12)


@pytest.fixture(scope="module")
def up(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalUp]:
    with local_up(tmp_path_factory.mktemp("up")) as run:
        yield run


@pytest.fixture
def page(browser: Browser, up: LocalUp) -> Iterator[Browser]:
    """The console, new; nothing may have gone wrong in it when the test ends."""
    browser("open", url=up.url, storage={"mini-infer-playground": SHORT})
    yield browser
    assert browser("problems") == []


def test_the_consoles_address_is_printed_first_when_everything_is_ready(up: LocalUp) -> None:
    last = up.output.strip().split("\n\n")[1:] or [up.output]
    assert f"Open {up.url}/ in a browser" in last[0]


def test_the_page_is_useful_within_a_second_when_it_is_opened_on_loopback(browser: Browser, up: LocalUp) -> None:
    assert any(browser("open", url=up.url)["took_ms"] < 3000 for _ in range(5))  # 0.3 s where nothing else runs
    browser("until", selector="header", matches="live")


def test_a_chat_streams_and_goes_on_when_a_person_asks_edits_and_regenerates(page: Browser, up: LocalUp) -> None:
    told = page("ask", text=QUESTION)
    assert ANSWER in told["text"]
    assert re.search(r"prompt tokens, .*tokens/s", told["text"], re.DOTALL)
    assert any(engine["name"] in told["text"] for engine in up.engines()), "which engine answered, and why"
    page("ask", text="What does json.dumps do?")
    page("press", name="Regenerate", answers=1)
    assert page("count", selector=".message") == 4
    page("reload")
    assert page("count", selector=".message") == 4, "turns are kept in the browser"
    page("press", name="Edit")
    page("fill", label="Edit the message", text="What does os.getcwd do?")
    told = page("press", name="Send again", answers=1)
    assert page("count", selector=".message") == 2
    assert "working directory" in told["text"]
    assert page("below") <= 1, "the end of the answer is seen"
    page("press", name="New chat")
    assert page("count", selector=".message") == 0


def test_an_answer_stops_when_a_person_stops_it(page: Browser) -> None:
    page("press", name="Reset")
    page("fill", label="System prompt", text="Go on for long.")
    page("fill", label="Message", text=LONG)
    page("press", name="Send")
    told = page("press", name="Stop", answers=1)
    assert "ended: stopped" in told["text"] or ANSWER in told["text"]


def test_two_engines_answer_side_by_side_when_a_person_names_them(page: Browser, up: LocalUp) -> None:
    first, second = (engine["name"] for engine in up.engines()[:2])
    page("check", label="Side by side")
    page("choose", label="Engine", value=second)
    page("ask", text=QUESTION, answers=2)
    shown = page("texts", selector=".column .message.assistant")
    assert len(shown) == 2
    assert all(ANSWER in text for text in shown)
    assert second in shown[1]
    assert first != second


def test_a_prefix_hit_is_explained_when_a_prompt_was_sent_before(page: Browser) -> None:
    page("ask", text=LONG)
    page("go", page="prefixes")
    assert page("value", label="Model")
    page("fill", label="Prompt: a message", text=LONG)
    page("press", name="Explain")
    page("until", selector=".told", matches=r"prompt tokens are cached")
    told = page("text", selector=".told")
    cached, total = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) of ([\d,]+) prompt", told)[0])
    assert total - 32 <= cached < total
    assert "it computes least of the prompt: the rest is cached there" in told
    for scorer in ("Cached prefix", "Queue wait", "Decode slots", "Cache room"):
        assert scorer in told
    page("until", matches="What engines have cached")
    assert page("count", selector="section table tbody th code") >= 1


@pytest.fixture(scope="module")
def victim(up: LocalUp) -> str:
    """An engine whose process is killed."""
    name: str = up.engines()[0]["name"]
    up.kill(name)
    return name


def test_an_engine_is_seen_to_go_when_its_process_is_killed(page: Browser, victim: str) -> None:
    page("go", page="fleet")
    page("until", selector=f'[data-engine="{victim}"]', matches="(?:was killed by SIGKILL|connections to it fail)")
    page("go", page="chat")
    assert ANSWER in page("ask", text=QUESTION)["text"], "the other engine answers meanwhile"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_serious_when_pages_are_dark_or_light_and_wide_or_narrow(
    browser: Browser, up: LocalUp, scheme: str, width: int
) -> None:
    browser("open", url=up.url, bypassCsp=True, storage={"mini-infer-playground": SHORT})  # axe needs an evaluator
    browser("look", scheme=scheme, width=width, height=844)
    browser("ask", text=QUESTION)
    for name, last in PAGES.items():
        browser("go", page=name)
        browser("until", matches=last)
        assert browser("axe") == [], f"the page {name}, {scheme}, {width} pixels wide"
        assert browser("fits"), f"the page {name} is wider than {width} pixels"
    red, green, blue = (int(part) for part in re.findall(r"\d+", browser("colour"))[:3])
    assert (max(red, green, blue) < 80) == (scheme == "dark")


def test_a_request_has_a_timeline_when_it_has_ended(page: Browser) -> None:
    page("ask", text=QUESTION)
    page("go", page="requests")
    page("until", selector="table.requests", matches="/v1/chat/completions")
    page("click", selector="table.requests tbody a")
    page("until", selector=".detail", matches="arrived.*read and tokenised.*sent to an engine.*first byte.*ended")
    assert QUESTION not in page("text", selector="main"), "no text is kept unless it is switched on"
    page("fill", label="Filter", text="no-such-model")
    page("until", matches="0 found")


def test_an_engine_is_seen_to_come_back_when_its_process_was_killed(page: Browser, victim: str) -> None:
    page("go", page="fleet")
    page("until", selector=f'[data-engine="{victim}"][data-state="ready"]', matches=victim)


@pytest.fixture(scope="module")
def old_revisions(up: LocalUp) -> set[str]:
    """The revisions of before the service's file is edited."""
    old = {engine["revision"] for engine in up.engines()}
    up.edit(2048, replicas=1)
    return old


def test_a_rollout_is_seen_when_the_file_is_edited(page: Browser, old_revisions: set[str]) -> None:
    page("go", page="fleet")
    page("until", selector="table.engines", matches="revision")
    page("until", selector=".cards", matches="Rollout: ")
    page("go", page="chat")
    assert ANSWER in page("ask", text=QUESTION)["text"], "clients are answered all the while"


def test_a_tool_is_called_and_its_result_told_when_a_person_pastes_one(page: Browser) -> None:
    page("press", name="Reset")
    page("fill", label="Tools (JSON)", text=json.dumps(TOOLS))
    page("choose", label="Tool choice", value="required")
    told = page("ask", text="What is the weather in Paris?")
    assert "get_weather" in told["text"]
    assert re.search(r'"city": ?"', told["text"])
    page("fill", label="Result of get_weather", text='{"weather": "sunny", "temperature": 21}')
    page("choose", label="Tool choice", value="none")
    page("fill", label="Most tokens", text="12")
    told = page("press", name="Answer the call", answers=1)
    assert page("count", selector=".message") == 4


def test_the_answer_is_of_the_schema_when_a_person_pastes_one(page: Browser) -> None:
    page("press", name="Reset")
    page("fill", label="JSON schema of the answer", text=json.dumps(SCHEMA))
    page("ask", text="Ada is 36 years old.")
    (answer,) = page("texts", selector=".message.assistant pre")
    assert set(json.loads(answer)) == {"name", "age"}
    page("fill", label="JSON schema of the answer", text="{not JSON")
    page("fill", label="Message", text="again")
    page("press", name="Send")
    page("until", selector=".talk", matches="JSON schema: this is no JSON")
    assert page("value", label="Message") == "again", "what was typed is not lost"


def test_probabilities_show_and_thinking_is_apart_when_a_person_asks_for_them(page: Browser) -> None:
    page("check", label="Log probabilities (point at a token)")
    page("ask", text=QUESTION)
    assert re.search(r"^\d+\.\d %\n", page("title", selector=".token"))
    page("press", name="Reset")
    page("fill", label="Most tokens", text="30")
    page("choose", label="Thinking", value="medium")
    page("ask", text=QUESTION)
    assert page("count", selector=".thinking") >= 1


def test_code_to_paste_repeats_the_chat_when_a_person_copies_it(page: Browser, up: LocalUp) -> None:
    page("clipboard")
    page("fill", label="Message", text="it's a \"question\" with \\ and 'quotes'?")
    page("press", name="curl")
    command = page("pasted")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]
    page("press", name="Python")
    compile(page("pasted"), "snippet", "exec")
    assert json.dumps("it's a \"question\" with \\ and 'quotes'?") in page("pasted")
    page("press", name="JavaScript")
    assert f'baseURL: "{up.url}/v1"' in page("pasted")


def test_keys_reach_everything_when_the_window_is_a_phones(page: Browser) -> None:
    page("look", scheme="light", width=390, height=844)
    assert {"Skip to the content", "Playground", "Fleet", "Prefix map", "Requests"} <= set(page("tab", times=12))
    page("choose", label="Colours", value="dark")
    wait_until(lambda: max(map(int, re.findall(r"\d+", page("colour"))[:3])) < 80)  # a person may choose
    page("look", scheme="light", width=1280, height=900)


def test_a_rollout_is_seen_to_pass_when_the_file_was_edited(
    page: Browser, up: LocalUp, old_revisions: set[str]
) -> None:
    page("go", page="fleet")
    page("until", selector=".cards", matches="1 of 1 engines? (?:is|are) ready")
    wait_until(lambda: bool(now := {one["revision"] for one in up.engines()}) and not old_revisions & now)

"""Templates in processes: limits of memory and time, turns between models, and what a failure costs."""

import asyncio
import contextlib
from typing import Any

import psutil
import pytest

from mini_infer_gateway.prompts.template_workers import FAILURES_LIMIT, SUSPENDED_S, RenderFailedError, TemplateWorkers
from mini_infer_prompts.prompt import PromptText

GOOD = "{% for m in messages %}{{ '%s: %s' | format(m.role, m.content) }}{% endfor %}"
SLOW = "{% for a in range(99999) %}{{ '{:>200000}'.format('x') | wordwrap(1) | length }}{% endfor %}"
LARGE = "{{ 'a' | center(3000000000) }}"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def render(workers: TemplateWorkers, name: str, template: str, body: dict[str, Any] = BODY) -> Any:
    return await workers.prompts(name, {"default": template}, {}, "chat_prompts", body, lambda: False)


async def test_a_template_is_rendered_in_a_process_when_its_work_is_unknown() -> None:
    workers = TemplateWorkers(Clock())
    assert await render(workers, "good", GOOD) == [PromptText("user: hi", False)]
    assert await render(workers, "refuses", "{{ raise_exception('no') }}") is None
    await workers.close()


@pytest.mark.parametrize(("template", "reason"), [(SLOW, "time"), (LARGE, "memory")])
async def test_a_limit_costs_one_request_and_then_one_model_when_a_template_is_hostile(
    template: str, reason: str
) -> None:
    clock, failures = Clock(), list[str]()
    workers = TemplateWorkers(clock, failures.append, workers=1)
    for _ in range(FAILURES_LIMIT):
        workers._timeout_s = 1.0 if reason == "time" else 60.0
        with pytest.raises(RenderFailedError):
            await render(workers, "bad", template)
        workers._timeout_s = 60.0  # what renders soon may take a second on a busy machine
        assert await render(workers, "good", GOOD) == [PromptText("user: hi", False)]
    assert set(failures) <= {reason, "memory"}
    assert workers.reason("bad")
    with pytest.raises(RenderFailedError):
        await render(workers, "bad", GOOD)
    assert failures[-1] == "suspended"
    clock.now_s += SUSPENDED_S
    assert not workers.reason("bad")
    assert await render(workers, "bad", GOOD)
    await workers.close()


@pytest.mark.parametrize("value", [10**30, -(2**63) - 1, "nested"])
async def test_others_are_rendered_when_a_body_cannot_be_handed_to_a_process(value: object) -> None:
    failures = list[str]()
    workers = TemplateWorkers(Clock(), failures.append, workers=1)
    if value == "nested":
        value = []
        for _ in range(990):
            value = [value]
    for _ in range(3):
        async with asyncio.timeout(60):
            with contextlib.suppress(RenderFailedError):
                await render(workers, "good", GOOD, BODY | {"more": value})
            assert await render(workers, "good", GOOD) == [PromptText("user: hi", False)]
    assert not failures
    await workers.close()


async def test_other_models_wait_for_no_queue_when_one_models_template_is_slow() -> None:
    """With two processes one of them is free for others at any time, since a model has one turn at a time."""
    workers = TemplateWorkers(Clock(), timeout_s=60.0, workers=2)
    await render(workers, "good", GOOD)
    slow = [asyncio.ensure_future(render(workers, "slow", SLOW)) for _ in range(5)]
    await asyncio.sleep(0)
    for _ in range(5):
        await render(workers, "good", GOOD)
    assert not any(job.done() for job in slow)
    await workers.close()
    for job in slow:
        job.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_processes_get_no_secrets_when_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_INFER_API_KEY", "secret")
    others = set(psutil.Process().children())
    workers = TemplateWorkers(Clock())
    await render(workers, "good", GOOD)

    def started() -> set[psutil.Process]:
        """Returns the running children of this test; other tests of this process may have children of their own."""
        return {one for one in set(psutil.Process().children()) - others if one.status() != psutil.STATUS_ZOMBIE}

    environments = [child.environ() for child in started()]
    assert environments
    assert not any("MINI_INFER_API_KEY" in one for one in environments)
    await workers.close()
    assert not started()

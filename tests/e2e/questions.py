"""What the demo model is asked, and what it must say."""

import textwrap

import httpx

from tests.e2e.cluster import wait_until

QUESTION = [{"role": "user", "content": "What does textwrap.dedent do?"}]
ANSWER = textwrap.dedent.__doc__.strip().split(".")[0]  # type: ignore[union-attr]  # the demo model knows docstrings


def wait_for_answer(url: str, model: str, timeout_s: float) -> None:
    """Waits for the right answer through the gateway, which may hear of a new engine a moment later than we do."""
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 60}

    def answer() -> str:
        try:
            response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        except httpx.TransportError:  # nobody has said yet that the gateway can be reached
            return ""
        return str(response.json()["choices"][0]["message"]["content"]) if response.status_code == 200 else ""

    text = wait_until(f"an answer of {model}", answer, timeout_s=timeout_s)
    assert ANSWER in text, text

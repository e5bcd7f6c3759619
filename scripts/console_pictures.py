"""Makes the pictures of docs/console.md: `python scripts/console_pictures.py`. Needs Chromium, Node and npm.

Starts `mini-infer up` with two engines of the demo model, asks some questions, and takes a picture of each page.
"""

import sys
import tempfile
from pathlib import Path

from tests.engine.server.dry_server import wait_until
from tests.support.chromium import Browser
from tests.support.local_up import LocalUp, local_up

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
SIZE = {"width": 1180, "height": 720}
QUESTIONS = ("What does textwrap.dedent do?", "What does json.dumps do?", "What does shutil.copytree do?")
SYSTEM = "You know Python's standard library. Answer with what its documentation says, and with nothing else."


def shoot(browser: Browser, name: str) -> None:
    """Takes the picture of the page as it is."""
    path = PICTURES / f"console-{name}.png"
    browser("shoot", path=str(path))
    print(f"{path.relative_to(PICTURES.parent)}: {path.stat().st_size / 1000:.0f} kB")


def pictures(browser: Browser, up: LocalUp) -> None:
    """Takes all four."""
    browser("open", url=up.url, **SIZE)
    browser("fill", label="System prompt", text=SYSTEM)
    for question in (*QUESTIONS, *QUESTIONS):
        browser("press", name="New chat")
        browser("ask", text=question)
    browser("ask", text="What does textwrap.indent do?")
    shoot(browser, "playground")
    browser("go", page="prefixes")
    browser("fill", label="Prompt: a message", text=body(QUESTIONS[0]))
    browser("press", name="Explain")
    browser("until", selector=".told", matches="prompt tokens are cached")
    browser("until", matches="What engines have cached")
    shoot(browser, "prefixes")
    browser("go", page="requests")
    browser("click", selector="table.requests tbody a")
    browser("until", selector=".detail", matches="ended")
    shoot(browser, "requests")
    victim = up.engines()[0]["name"]
    browser("go", page="fleet")
    browser("until", selector=f'[data-engine="{victim}"]', matches="ready")
    up.kill(victim)
    browser("until", selector=f'[data-engine="{victim}"]', matches="was killed by SIGKILL")
    shoot(browser, "fleet")
    wait_until(lambda: len(up.engines()) == 2)


def body(question: str) -> str:
    """The chat that was asked before, as JSON."""
    return f'{{"messages": [{{"role": "system", "content": "{SYSTEM}"}}, {{"role": "user", "content": "{question}"}}]}}'


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, Browser() as chromium, local_up(Path(folder)) as running:
        pictures(chromium, running)
    sys.exit(0)

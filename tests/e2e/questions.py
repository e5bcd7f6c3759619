"""What the demo model is asked, and what it must say."""

import textwrap

QUESTION = [{"role": "user", "content": "What does textwrap.dedent do?"}]
ANSWER = textwrap.dedent.__doc__.strip().split(".")[0]  # type: ignore[union-attr]  # the demo model knows docstrings

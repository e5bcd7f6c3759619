"""What vLLM's workers are given beside their own methods (`worker_extension_cls`). Their processes alone use it."""

from typing import Any

import torch

QUALIFIED_NAME = f"{__name__}.Acceptance"


class Acceptance:
    """How many guesses its synthetic rejection sampler takes: one start serves all shares."""

    model_runner: Any
    """The worker's."""

    def set_acceptance(self, share: float) -> None:
        """From the next step on each guess behind right ones is right with this probability."""
        with torch.inference_mode():  # in which the tensor may have been made
            self.model_runner.rejection_sampler.synthetic_conditional_rates.fill_(share)

    def passes_so_far(self) -> int:
        """Passes of the model since the first call."""
        runner = self.model_runner
        if not hasattr(runner, "passes_counted"):
            runner.passes_counted, execute = 0, runner.execute_model

            def counted(*arguments: Any, **named: Any) -> Any:
                runner.passes_counted += 1
                return execute(*arguments, **named)

            runner.execute_model = counted
        return int(runner.passes_counted)

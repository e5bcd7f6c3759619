"""The `mini-infer-operator` command. Names the extra to install if packages are missing."""

from mini_infer_process.endings import ends_quietly
from mini_infer_process.extras import missing_packages_name_the_extra


def main() -> None:
    """Runs the operator."""
    with ends_quietly("mini-infer-operator"), missing_packages_name_the_extra("mini-infer-operator", "operator"):
        from mini_infer_operator.controller.run import main as run

        run()

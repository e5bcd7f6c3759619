"""The `mini-infer-operator` command. Names the extra to install if packages are missing."""

from mini_infer_process.extras import missing_packages_name_the_extra


def main() -> None:
    """Runs the operator."""
    with missing_packages_name_the_extra("mini-infer-operator", "operator"):
        from mini_infer_operator.controller.run import main as run

        run()

"""`mini-infer-operator`: names the extra where packages are missing."""

from mini_infer_process.extras import missing_packages_name_the_extra


def main() -> None:
    """The command."""
    with missing_packages_name_the_extra("mini-infer-operator", "operator"):
        from mini_infer_operator.controller.run import main as run

        run()

"""Starts `mini-infer-compare`, and names the extra to install if packages are missing."""

from mini_infer_process.endings import ends_quietly
from mini_infer_process.extras import missing_packages_name_the_extra


def main() -> int:
    """Runs the command. Returns the exit status."""
    with ends_quietly("mini-infer-compare"), missing_packages_name_the_extra("mini-infer-compare", "engine"):
        from mini_infer_engine.tools.compare.cli import main as compare

        return compare()

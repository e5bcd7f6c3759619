"""`mini-infer-compare`: names the extra where packages are missing."""

from mini_infer_process.extras import missing_packages_name_the_extra


def main() -> int:
    """The command. Returns the exit status."""
    with missing_packages_name_the_extra("mini-infer-compare", "engine"):
        from mini_infer_engine.tools.compare.cli import main as compare

        return compare()

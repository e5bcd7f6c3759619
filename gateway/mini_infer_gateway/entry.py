"""`mini-infer-gateway`: names the extra to install if packages are missing."""

from mini_infer_process.endings import ends_quietly
from mini_infer_process.extras import missing_packages_name_the_extra


def main() -> None:
    """Runs the command."""
    with ends_quietly("mini-infer-gateway"), missing_packages_name_the_extra("mini-infer-gateway", "gateway"):
        from mini_infer_gateway.cli import main as serve

        serve()

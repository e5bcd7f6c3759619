"""Our server under the peer's name."""

from mini_infer_engine.server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Starts, watches and ends the core process from its parent. It knows nothing of the messages between the two."""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from typing import Self

import msgspec

from mini_infer_engine.config.child_start import start_child
from mini_infer_engine.config.socket_folder import socket_folder
from mini_infer_engine.core_process.core_config import CoreConfig
from mini_infer_engine.distributed.exit_reason import ExitReason

_KILL_AFTER_S = 3.0


class CoreProcess:
    """A child that never outlives this process: the kernel kills it, or it notices that its parent is gone."""

    def __init__(self, config: CoreConfig, variables: dict[str, str] | None = None) -> None:
        """Starts the process. `variables` are added to its environment.

        Its socket and its settings are in a folder of its own that only this user can enter.
        """
        self._folder = socket_folder("mini-infer-")
        self.address = f"ipc://{self._folder}/core"
        config_path = self._folder / "config.json"
        self.exit_reason = ExitReason()
        config = msgspec.structs.replace(
            config, address=self.address, parent_pid=os.getpid(), exit_reason_fd=self.exit_reason.writer
        )
        config_path.write_bytes(msgspec.json.encode(config))
        command = [sys.executable, "-m", "mini_infer_engine.core_process.entry", str(config_path)]
        self._process = start_child(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(self.exit_reason.writer,),
            env=os.environ | (variables or {}),
        )
        self.exit_reason.started()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def status(self) -> int | None:
        """Returns the exit status, or None while the process runs."""
        return self._process.poll()

    def watch(self) -> "asyncio.Future[int]":
        """Returns a future of the exit status, which a thread sets once the process has ended."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def report(status: int) -> None:
            if not ended.done():
                ended.set_result(status)

        def wait() -> None:
            status = self._process.wait()
            if not loop.is_closed():
                loop.call_soon_threadsafe(report, status)

        threading.Thread(target=wait, name="core-watch", daemon=True).start()
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Waits a moment for the process, which has been sent `Stop`, after a normal end. Kills it after an error or a
        time-out.
        """
        try:
            self._process.wait(_KILL_AFTER_S if error_type is None else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.exit_reason.close()
        shutil.rmtree(self._folder, ignore_errors=True)

"""The private Redis, killed while it starts."""

import os
import signal

import pytest

from app.errors import StorageError
from app.store.embedded import PrivateServer


class Killed(PrivateServer):
    """Killed from outside right after each of its first starts."""

    def __init__(self, folder, times: int):
        super().__init__(folder)
        self._times = times

    def _launch(self) -> None:
        super()._launch()
        if self._times > 0:
            self._times -= 1
            os.kill(self.pid, signal.SIGKILL)


def test_a_server_that_is_killed_while_it_starts_is_started_again(tmp_path):
    """Twice is bad luck, three times is told."""
    server = Killed(tmp_path / "twice", 2)
    server.start()
    assert server.alive()
    server.stop()
    with pytest.raises(StorageError, match="exit -9"):
        Killed(tmp_path / "thrice", 3).start()

"""The private Redis, killed or ended while it starts."""

import os
import signal

import pytest
from redis.exceptions import RedisError

from app.errors import StorageError
from app.store.connection import connect
from app.store.embedded import PrivateServer
from tests.belt import until


class Unlucky(PrivateServer):
    """Ended from outside right after each of its first starts: killed, or in good order, as by an administrator."""

    def __init__(self, folder, times: int, *, killed: bool):
        super().__init__(folder)
        self._times, self._killed = times, killed

    def _launch(self) -> None:
        super()._launch()
        if self._times > 0:
            self._times -= 1
            if not self._killed:
                until(self._answers, what="it answers")
            os.kill(self.pid, signal.SIGKILL if self._killed else signal.SIGTERM)
            until(lambda: self.pid is None, what="it has ended")

    def _answers(self) -> bool:
        try:
            return bool(connect(self.url).ping())
        except RedisError:
            return False


@pytest.mark.parametrize(("killed", "status"), [(True, "exit -9"), (False, "exit 0")])
def test_a_server_that_is_ended_while_it_starts_is_started_again(killed, status, tmp_path):
    """Twice is bad luck, three times is told."""
    server = Unlucky(tmp_path / "twice", 2, killed=killed)
    server.start()
    assert server.alive()
    server.stop()
    with pytest.raises(StorageError, match=status):
        Unlucky(tmp_path / "thrice", 3, killed=killed).start()

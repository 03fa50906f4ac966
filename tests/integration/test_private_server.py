"""The private Redis, ended while it starts."""

import signal

import pytest

from app.errors import StorageError
from app.store.embedded import PrivateServer
from tests.belt import until


class Ended(PrivateServer):
    """Ended from outside by a signal after each of its first starts, before anybody asked it something."""

    def __init__(self, folder, times: int, number: int):
        super().__init__(folder)
        self._times, self._number, self._log = times, number, folder / "server.log"

    def _launch(self) -> None:
        super()._launch()
        if self._times > 0:
            self._times -= 1
            if self._number == signal.SIGTERM:  # which it obeys in good order, once it listens to it
                until(lambda: "Server initialized" in self._log.read_text(), what="a server that has begun")
                self._log.write_text("")
            self._process.send_signal(self._number)
            self._process.wait(20)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 0)])
def test_a_server_that_is_ended_while_it_starts_is_started_again(tmp_path, number, status):
    """Twice is bad luck, three times is told."""
    server = Ended(tmp_path / "twice", 2, number)
    server.start()
    assert server.alive()
    server.stop()
    with pytest.raises(StorageError, match=f"exit {status}"):
        Ended(tmp_path / "thrice", 3, number).start()

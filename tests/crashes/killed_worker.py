"""A worker is killed while another lives, with tasks longer than every timeout. Played once, by the defaults."""

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from app.celery_app import GENERATE_TASK, make_app
from app.lanes import Lane
from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.connection import connect
from app.store.embedded import PrivateServer
from app.store.keys import CELERY_PREFIX, EPOCH, RunKeys
from tests.acceptance.harness import extra_requests
from tests.belt import lost, manifest, put, until, worker

TASKS = 8  # of each worker
#: 42 s a task: claims expire after 20 s, messages return after 30 s, if nobody keeps them.
SLOW = SimulatorConfig(output_lengths="fixed", output_mean=84, step_seconds=0.5, max_running_requests=1000)


@dataclass(frozen=True)
class Survived:
    """What was seen."""

    elsewhere_seconds: float  #: from the kill until all its tasks ran at the other worker
    of_the_living: int  #: requests beyond one for each task of the worker that lived
    again: int  #: requests for completions that were published already, and whose messages came once more


def play(folder: Path) -> Survived:
    """Two workers with tasks of 42 s; one is killed."""
    folder.mkdir()
    server = PrivateServer(folder / "redis")
    server.start()
    client, keys = connect(server.url), RunKeys("run1")
    client.set(EPOCH, 0)
    try:
        with running_simulator(SLOW) as endpoint:
            run = manifest(endpoint.url, max_new_tokens=100)
            with worker(server.url, folder, "--slots", str(TASKS), name="dies") as dies:
                put(client, server.url, run, TASKS, dataset="dying")
                until(lambda: endpoint.stats()["running"] == TASKS, 60, what="the first worker's tasks run")
                with worker(server.url, folder, name="lives"):
                    living = put(client, server.url, run, TASKS, dataset="living", prompt=30)
                    until(lambda: endpoint.stats()["running"] == 2 * TASKS, 60, what="the second worker's, too")
                    dies.send_signal(signal.SIGKILL)
                    killed = time.monotonic()
                    messages = lost(client, server.url)

                    def reconciled() -> bool:
                        """As the producer does, for the tasks that live: whoever let go of them would lose them now."""
                        return messages.send_again(["living"]) >= 0

                    until(lambda: reconciled() and extra_requests(endpoint) == TASKS, 80, "they run elsewhere")
                    elsewhere = time.monotonic() - killed
                    until(lambda: reconciled() and client.xlen(keys.responses) == TASKS, 60, "the living are done")
                    before = endpoint.stats()["requests"]
                    _deliver_again(client, server.url, living)
                    doubled = extra_requests(endpoint) - TASKS
                    return Survived(elsewhere, doubled, endpoint.stats()["requests"] - before)
    finally:
        client.close()
        server.stop()


def _deliver_again(client, url: str, published: list[str]) -> None:
    """Messages of published keys once more, until they have been taken and acknowledged."""
    celery = make_app(url)
    for key in published:
        celery.send_task(GENERATE_TASK, ("run1", "living", key), queue=Lane.SHORT.queue, ignore_result=True)
    lane, unacked = CELERY_PREFIX + Lane.SHORT.queue, CELERY_PREFIX + "unacked_index"
    until(lambda: client.llen(lane) == 0 and client.zcard(unacked) <= TASKS, what="taken and acknowledged")

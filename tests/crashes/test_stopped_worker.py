"""A worker is stopped (SIGSTOP, a suspended machine) for longer than its claims and messages last, and goes on."""

import signal

import pytest

from app.sglang.simulator import SimulatorConfig, running_simulator
from app.store.connection import connect
from app.store.embedded import PrivateServer
from app.store.keys import EPOCH, EndpointKeys, RunKeys
from app.urls import endpoint_key
from tests.acceptance.harness import extra_requests
from tests.belt import lost, manifest, published, put, until, worker

TASKS = 4
#: 100 s a task: claims expire after 20 s, messages return after 30 s.
SLOW = SimulatorConfig(output_lengths="fixed", output_mean=200, step_seconds=0.5, max_running_requests=1000)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_worker_that_was_stopped_for_long_lets_go_of_what_others_do_by_now(tmp_path):
    """Its tasks run elsewhere once; when it goes on it ends its own requests and holds no lease beside the others'."""
    server = PrivateServer(tmp_path / "redis")
    server.start()
    client = connect(server.url)
    client.set(EPOCH, 0)
    try:
        with running_simulator(SLOW) as endpoint:
            run, leases = manifest(endpoint.url, max_new_tokens=220), EndpointKeys(endpoint_key(endpoint.url)).leases
            with worker(server.url, tmp_path, name="sleeps") as sleeps:
                keys = put(client, server.url, run, TASKS)
                until(lambda: endpoint.stats()["running"] == TASKS, 60, what="its tasks run")
                sleeps.send_signal(signal.SIGSTOP)
                with worker(server.url, tmp_path, name="lives"):
                    messages = lost(client, server.url)

                    def all_run_twice() -> bool:
                        messages.send_again(["d"])  # as the producer does all the time
                        return endpoint.stats()["running"] == 2 * TASKS

                    until(all_run_twice, 90, what="they run elsewhere, too")
                    assert client.zcard(leases) == TASKS
                    sleeps.send_signal(signal.SIGCONT)
                    until(lambda: endpoint.stats()["running"] == TASKS, 25, what="it ends its own requests")
                    assert client.zcard(leases) == TASKS
                    endpoint.faults(slow=0.02)
                    until(lambda: client.xlen(RunKeys("run1").responses) == TASKS, 90, what="all are published")
                    assert sorted(one["key"] for one in published(client)) == sorted(keys)
                    assert extra_requests(endpoint) == TASKS
                    until(lambda: client.zcard(leases) == 0, what="nothing is held")
    finally:
        client.close()
        server.stop()

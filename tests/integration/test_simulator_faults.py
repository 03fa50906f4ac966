"""The simulated server fails as SGLang fails: on demand, on a socket, in this process."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from app.sglang.simulator import Faults, SimulatorConfig, prompt_hash, running_simulator
from tests.integration.simulator_client import call, generate, together, until

BASE = SimulatorConfig(output_lengths="fixed", output_mean=30, speed=20.0, health_seconds=0.0)
CRASH = Faults(freeze_seconds=0.2, down_seconds=0.3)


@pytest.fixture(scope="module")
def server():
    """A server whose faults a test sets, and which has none again afterwards."""
    with running_simulator(BASE) as running:
        yield running


@pytest.fixture
def faulty(server):
    """Sets faults for one test."""
    yield server.faults
    server.faults(**{name: getattr(Faults(), name) for name in Faults.__dataclass_fields__})


def started(config: SimulatorConfig):
    """A server of its own, for tests that kill it."""
    return running_simulator(config)


def poisoned(url: str):
    """Sends an id outside the vocabulary and says how that ended."""
    try:
        return generate(url, [1, BASE.vocab_size])
    except (http.client.HTTPException, ConnectionError) as exc:
        return exc


class TestAnswers:
    """Each answer fault spoils one thing, and is counted."""

    def test_a_good_answer_is_honest(self, server):
        """Ids, counts and text agree; statistics count it under its prompt."""
        answer = generate(server.url, [7, 8, 9]).json
        info = answer["meta_info"]
        assert (info["prompt_tokens"], info["completion_tokens"], len(answer["output_ids"])) == (3, 30, 30)
        assert server.stats()["prompts"][prompt_hash([7, 8, 9])] == {"requests": 1, "completed": 1, "tokens": 30}

    def test_stages_of_one_completion_count_under_one_prompt(self, server):
        """What was made earlier is not the prompt: tokens add up to one completion, so a test can prove 'once'."""
        first = generate(server.url, [70, 71], 12).json["output_ids"]
        second = generate(server.url, [70, 71, *first], 100).json["output_ids"]
        assert first + second == generate(server.url, [70, 71], 100).json["output_ids"]
        assert server.stats()["prompts"][prompt_hash([70, 71])]["tokens"] == 30 + 30

    @pytest.mark.parametrize(("fault", "status"), [("queue_full", 503), ("loading", 503), ("internal_error", 500),
                                                   ("unauthorized", 401)])  # fmt: skip
    def test_a_refusal_has_its_status(self, server, faulty, fault, status):
        """The requests it hits never reach the engine."""
        faulty(**{fault: 1.0})
        before = server.stats()["requests"]
        assert generate(server.url, [1, 2]).status == status
        assert server.stats()["requests"] == before

    @pytest.mark.parametrize(("fault", "broken"), [
        ("abort", lambda a: a["meta_info"]["finish_reason"]["type"] == "abort" and len(a["output_ids"]) == 15),
        ("wrong_prompt_tokens", lambda a: a["meta_info"]["prompt_tokens"] == 1),
        ("wrong_completion_tokens", lambda a: a["meta_info"]["completion_tokens"] == len(a["output_ids"]) + 1),
        ("no_output_ids", lambda a: "output_ids" not in a and "text" in a),
        ("prefixed_output_ids", lambda a: a["output_ids"][:2] == [1, 2] and len(a["output_ids"]) == 32),
        ("no_finish_reason", lambda a: a["meta_info"]["finish_reason"] is None),
        ("nan", lambda a: a["meta_info"]["finish_reason"] == {"type": "stop", "matched": "NaN happened"}),
        ("bad_ids", lambda a: max(a["output_ids"]) >= BASE.vocab_size),
        ("error_object", lambda a: set(a) == {"error"}),
        ("list_body", lambda a: isinstance(a, list) and "output_ids" in a[0]),
        ("truncated_prompt", lambda a: a["meta_info"]["prompt_tokens"] == 1),
    ])  # fmt: skip
    def test_a_spoilt_answer_is_wrong_in_its_own_way(self, server, faulty, fault, broken):
        """200, and one thing is not as it should be."""
        faulty(**{fault: 1.0})
        reply = generate(server.url, [1, 2])
        assert reply.status == 200
        assert broken(reply.json)
        assert server.stats()["faults"][fault] >= 1

    def test_a_body_can_be_no_json_or_cut(self, server, faulty):
        """An HTML page; and a body shorter than it was promised."""
        faulty(not_json=1.0)
        assert generate(server.url, [1, 2]).body.startswith(b"<html>")
        faulty(not_json=0.0, cut_body=1.0)
        with pytest.raises(http.client.IncompleteRead):
            generate(server.url, [1, 2])

    def test_a_reset_comes_after_the_request_was_read(self, server, faulty):
        """The client sees a connection reset, not a refusal."""
        faulty(reset=1.0)
        with pytest.raises(ConnectionResetError):
            generate(server.url, [1, 2])

    def test_a_hanging_request_is_never_answered_while_health_says_ok(self, server, faulty):
        """The lie that a client must find out by itself."""
        faulty(hang=1.0, health="ok")
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=0.2)
        connection.request("POST", "/generate", b'{"input_ids":[1]}', {"Content-Type": "application/json"})
        with pytest.raises(TimeoutError):
            connection.getresponse()
        assert call(server.url, "/health").status == 200
        connection.close()

    def test_health_can_be_bad_while_generate_works(self, server, faulty):
        """503 on /health and /ready is no verdict about /generate."""
        faulty(health="bad")
        assert (call(server.url, "/health").status, call(server.url, "/ready").status) == (503, 503)
        assert generate(server.url, [1, 2]).status == 200

    def test_a_fault_can_be_limited_in_number_and_share(self, server, faulty):
        """`answer_faults_left` spoils so many and no more; a fraction hits about its share."""
        faulty(queue_full=1.0, answer_faults_left=2)
        assert [generate(server.url, [n]).status for n in range(4)] == [503, 503, 200, 200]
        faulty(queue_full=0.5, answer_faults_left=-1)
        refused = sum(reply.status == 503 for reply in together([lambda: generate(server.url, [3])] * 60))
        assert 10 < refused < 50

    def test_faults_are_set_over_http_and_unknown_ones_are_refused(self, server, faulty):
        """POST /_sim/faults takes a part of them; a typing error is a 400 that lists the names."""
        faulty()
        assert call(server.url, "/_sim/faults", {"nan": 1}).json["nan"] == 1
        assert generate(server.url, [5]).json["meta_info"]["finish_reason"]["matched"] == "NaN happened"
        reply = call(server.url, "/_sim/faults", {"nam": 1})
        assert reply.status == 400
        assert "nan" in reply.json["error"]["message"]
        assert call(server.url, "/_sim/stats").json["faults"]["nan"] >= 1

    def test_slow_makes_every_step_longer(self, server, faulty):
        """By its factor, prefill and decode alike."""
        fast = generate(server.url, [1, 2]).json["meta_info"]["e2e_latency"]
        faulty(slow=20.0)
        assert generate(server.url, [1, 2]).json["meta_info"]["e2e_latency"] > 10 * fast


class TestCrash:
    """Freeze, close without a byte, refuse, come back."""

    def test_an_unknown_id_takes_everybody_down_and_the_server_comes_back(self):
        """All in flight, newcomers and health checks hang for the freeze; then closed; then refused; then well."""
        config = replace(BASE, faults=CRASH, output_mean=20_000, max_total_num_tokens=100_000)
        with started(config) as server, ThreadPoolExecutor() as pool:
            victim = pool.submit(generate, server.url, [1, 2], 20_000)
            until(server, running=1)
            began = time.monotonic()
            culprit = pool.submit(poisoned, server.url)
            until(server, crashes=1)
            newcomers = [pool.submit(call, server.url, path) for path in ("/health", "/model_info")]
            for frozen in (victim, *newcomers):
                assert isinstance(frozen.exception(timeout=5), http.client.RemoteDisconnected | ConnectionResetError)
            assert isinstance(culprit.result(timeout=5), http.client.RemoteDisconnected)
            assert time.monotonic() - began >= 0.2
            with pytest.raises(ConnectionRefusedError):
                call(server.url, "/health")
            until(server, restarts=1)
            assert call(server.url, "/health").status == 200
            assert generate(server.url, [1, 2], 5).status == 200
            assert server.stats()["lost"] == 1

    def test_it_can_stay_down_and_the_port_stays_its_own(self):
        """down_seconds -1: refused for ever, and nobody else gets the port meanwhile."""
        with started(replace(BASE, faults=replace(CRASH, freeze_seconds=0.0, down_seconds=-1.0))) as server:
            server.crash()
            deadline = time.monotonic() + 5
            while True:
                with pytest.raises(OSError) as refusal:  # at first still a closed connection
                    call(server.url, "/ready")
                if isinstance(refusal.value, ConnectionRefusedError):
                    break
                assert time.monotonic() < deadline
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", urlsplit(server.url).port))

    def test_after_a_restart_it_loads_and_may_be_another_model(self):
        """While loading: connects, 503 on /health, /ready and /generate, information already there; other ids after."""
        faults = Faults(freeze_seconds=0.0, down_seconds=0.0, load_seconds=0.3, model_after_restart="other",
                        weight_version_after_restart="v2")  # fmt: skip
        with started(replace(BASE, faults=replace(faults, load_seconds=0.0))) as server:
            before = generate(server.url, [1, 2]).json
            server.faults(load_seconds=0.3)
            server.crash()
            until(server, restarts=1)
            assert [call(server.url, path).status for path in ("/health", "/ready")] == [503, 503]
            assert generate(server.url, [1]).status == 503
            assert call(server.url, "/model_info").json["model_path"] == "other"
            while call(server.url, "/ready").status == 503:
                time.sleep(0.01)
            after = generate(server.url, [1, 2]).json
            assert after["output_ids"] != before["output_ids"]
            assert after["meta_info"]["weight_version"] == "v2"

    @pytest.mark.parametrize(("faults", "config", "prompts"), [
        ({"crash_above_running": 3}, {}, 8),
        ({"crash_on_kv_full": True}, {"max_total_num_tokens": 100, "admission": "free_space"}, 6),
        ({"crash_on_token": 0}, {}, 4),
        ({"crash_after_completions": 2}, {}, 4),
    ])  # fmt: skip
    def test_it_crashes_when_it_was_told_to(self, faults, config, prompts):
        """Above so many running, on a full pool, on a poisoned prompt, after so many completions; then as allowed."""
        crash = replace(CRASH, freeze_seconds=0.0, down_seconds=-1.0, **faults)
        with started(replace(BASE, faults=crash, speed=0.5, **config)) as server:
            def ask(n: int):
                try:
                    return generate(server.url, [n, n + 1], 64).status
                except (http.client.HTTPException, ConnectionError):
                    return 0

            statuses = together([lambda n=n: ask(n) for n in range(prompts)])
            assert server.stats()["crashes"] == 1
            assert 0 in statuses
            if "crash_after_completions" in faults:
                assert statuses.count(200) == 2

    def test_crashes_can_be_limited(self):
        """crashes_left 1: the second poisoned prompt is served."""
        crash = replace(CRASH, freeze_seconds=0.0, down_seconds=0.0, crash_on_token=5, crashes_left=1)
        with started(replace(BASE, faults=crash)) as server:
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                generate(server.url, [5])
            until(server, restarts=1)
            assert generate(server.url, [5]).status == 200

    def test_refusing_is_no_crash(self):
        """Connections are closed and refused; nothing is forgotten, and it accepts again on the same port."""
        with started(BASE) as server:
            server.refuse()
            with pytest.raises(ConnectionRefusedError):
                call(server.url, "/ready")
            server.accept()
            assert call(server.url, "/ready").status == 200
            assert server.stats()["crashes"] == 0


class TestLeaving:
    """Clients that leave, servers that are told to go."""

    def test_the_request_of_a_client_that_left_ends_a_while_later(self):
        """It runs on for disconnect_seconds, then it is aborted and its tokens are free."""
        config = replace(BASE, disconnect_seconds=0.1, output_mean=100_000, max_total_num_tokens=150_000,
                         context_length=150_000, speed=1.0)  # fmt: skip
        with started(config) as server:
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
            body = b'{"input_ids":[1],"sampling_params":{"max_new_tokens":100000}}'
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            until(server, running=1)
            connection.close()
            until(server, disconnects=1)
            assert server.stats()["running"] == 1
            until(server, running=0, aborted=1, used_tokens=0)

    def test_sigterm_drains(self):
        """Unhealthy at once, still serving what is in flight and what comes; then the process ends with 0."""
        code = (
            "from app.sglang.simulator import SimulatorConfig, serve\n"
            "serve(SimulatorConfig(output_lengths='fixed', output_mean=200, health_seconds=0), 0, on_ready=print)"
        )
        process = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            url = process.stdout.readline().strip()
            with ThreadPoolExecutor() as pool:
                long = pool.submit(generate, url, [1, 2], 300)
                while not call(url, "/_sim/stats").json["running"]:
                    time.sleep(0.002)
                os.kill(process.pid, signal.SIGTERM)
                while call(url, "/health").status == 200:
                    time.sleep(0.002)
                assert generate(url, [3], 2).status == 200
                assert long.result().json["meta_info"]["finish_reason"]["type"] == "stop"
            assert process.wait(timeout=10) == 0
        finally:
            process.kill()
            process.stdout.close()

    def test_several_servers_live_in_one_process(self):
        """Each with its own port, faults and statistics; the same model gives the same ids."""
        with started(BASE) as one, started(replace(BASE, seed=1)) as two, started(BASE) as three:
            answers = [generate(server.url, [1, 2]).json["output_ids"] for server in (one, two, three)]
            assert answers[0] == answers[2] != answers[1]
            assert one.stats()["requests"] == two.stats()["requests"] == 1

"""compose.yaml and the Dockerfile, as far as a machine without Docker can prove them."""

import json
import signal
import socket
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import jsonschema
import pytest

from app.cli.main import cli
from tests.acceptance.harness import ids, verified
from tests.belt import until
from tests.deploy.services import ROOT, Host, composed, env_file, variables

EXAMPLE = env_file(ROOT / ".env.example")


def seconds(text: str) -> int:
    """`45s`."""
    return int(text.removesuffix("s"))


def listens(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def answers(port: int, login: str) -> tuple[int, int]:
    """HTTP status without and with the login; 0 where nobody listens."""

    def status(headers: dict[str, str]) -> int:
        try:
            with urlopen(Request(f"http://127.0.0.1:{port}/", headers=headers), timeout=5) as response:
                return response.status
        except HTTPError as exc:
            return exc.code
        except OSError:
            return 0

    return status({}), status({"Authorization": f"Basic {b64encode(login.encode()).decode()}"})


def test_it_is_valid_by_the_compose_specification():
    schema = json.loads((ROOT / "tests/data/compose/compose-spec.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(composed(EXAMPLE))


def test_the_example_names_every_variable_and_no_other():
    assert set(EXAMPLE) == variables((ROOT / "compose.yaml").read_text())


def test_no_password_has_a_default():
    with pytest.raises(KeyError, match="REDIS_PASSWORD"):
        composed(EXAMPLE | {"REDIS_PASSWORD": ""})


def test_every_command_exists():
    services = composed(EXAMPLE)["services"]
    commands = {what["command"][0] for name, what in services.items() if name != "redis"}
    assert commands <= set(cli.commands)


def test_draining_fits_into_the_time_that_docker_stop_gives():
    worker = composed(EXAMPLE)["services"]["worker"]
    drain = float(worker["command"][worker["command"].index("--drain-seconds") + 1])
    assert seconds(worker["stop_grace_period"]) >= drain + 10


def test_only_the_services_for_people_are_reachable_from_outside_and_only_from_this_host():
    services = composed(EXAMPLE)["services"]
    published = {name: what["ports"] for name, what in services.items() if "ports" in what}
    assert list(published) == ["flower"]
    assert all(port.startswith("127.0.0.1:") for port in published["flower"])


def test_the_dockerfile_passes_its_linter():
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_holds_what_the_package_needs():
    """Each path that the Dockerfile copies is there and is let through by .dockerignore."""
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    copied = {word for words in copies for word in words}
    assert copied == let_through
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_the_services_run_a_dataset_to_its_end(tmp_path):
    """Each service's own command and environment; two workers, one of which is killed on the way and comes back."""
    data = tmp_path / "data"
    data.mkdir()
    rows = [json.dumps({"prompt": f"Question {n}: how many are {n} and {n}?"}) for n in range(60)]
    (data / "prompts.jsonl").write_text("\n".join(rows))
    env = EXAMPLE | {
        "HEADRACE_DATA_DIR": str(data), "HEADRACE_DATA": "prompts.jsonl", "HEADRACE_OUT_DIR": str(tmp_path / "out"),
        "HEADRACE_MAX_NEW_TOKENS": "64",
    }  # fmt: skip
    host = Host(tmp_path, env)
    out = tmp_path / "out" / "run"
    try:
        host.start("redis")
        until(lambda: listens(host.ports["redis:6379"]), what="Redis")  # as depends_on: service_healthy has it
        host.start("collector")
        host.start("simulator")
        victim, other, flower = host.start("worker"), host.start("worker"), host.start("flower")
        producer = host.start("producer")
        until(lambda: len(ids(out)) > 5, seconds=100, what="first answers")
        victim.kill()
        back = host.start("worker")  # restart: unless-stopped
        assert producer.wait(150) == 0, host.log("producer")
        until(lambda: answers(host.ports["flower:5555"], EXAMPLE["FLOWER_BASIC_AUTH"]) == (401, 200), what="Flower")
        for process in (other, back, flower):
            process.send_signal(signal.SIGTERM)
        assert [process.wait(45) for process in (other, back)] == [0, 0], host.log("worker")
    finally:
        host.end()
    assert len(set(ids(out))) == 60
    assert verified(out)["ok"]

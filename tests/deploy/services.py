"""The services of compose.yaml as processes of this machine: their exact commands and environments.

What containers have and processes don't is put in their place, and nothing else: host names of services become
127.0.0.1 with free ports, mounted volumes become folders, the image's programs are those installed here.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.store.embedded import end_with_parent, server_binary

ROOT = Path(__file__).parent.parent.parent
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def env_file(path: Path) -> dict[str, str]:
    """NAME=VALUE lines."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def variables(text: str) -> set[str]:
    """Names that a compose file takes from its environment."""
    return {name for name, _, _ in _VARIABLE.findall(text)}


def composed(env: dict[str, str]) -> dict[str, Any]:
    """compose.yaml with its variables filled in, as Compose does it."""

    def filled(found: re.Match) -> str:
        name, kind, rest = found.groups()
        if env.get(name):
            return env[name]
        if kind == "?":
            raise KeyError(f"{name}: {rest}")
        return rest or ""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        return _VARIABLE.sub(filled, value) if isinstance(value, str) else value

    return walk(yaml.safe_load((ROOT / "compose.yaml").read_text()))


@dataclass
class Host:
    """This machine in the place of a Docker engine."""

    folder: Path
    env: dict[str, str]
    ports: dict[str, int] = field(default_factory=dict)
    running: list[subprocess.Popen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compose = composed(self.env)
        for name in ("redis:6379", "simulator:30000", "flower:5555"):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports[name] = probe.getsockname()[1]

    def start(self, service: str) -> subprocess.Popen:
        """One more process of a service."""
        what = self.compose["services"][service]
        places = self._places(what.get("volumes", []))
        argv = [self._here(str(word), places) for word in what["command"]]
        if service == "redis":
            argv = [server_binary(), *argv[1:], "--port", str(self.ports["redis:6379"]), "--dir", str(places["/data"])]
        else:
            argv = [str(Path(sys.executable).with_name("headrace")), *argv]
        env = {key: self._here(str(value), places) for key, value in what.get("environment", {}).items()}
        log = (self.folder / f"{service}-{len(self.running)}.log").open("wb")
        process = subprocess.Popen(
            argv, stdout=log, stderr=log, preexec_fn=end_with_parent(),
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)} | env,
            cwd=self._here(what.get("working_dir", str(self.folder)), places),
        )  # fmt: skip
        self.running.append(process)
        return process

    def _places(self, volumes: list[str]) -> dict[str, Path]:
        """Folder on this machine of each mount point."""
        places = {}
        for volume in volumes:
            source, target = volume.split(":")[:2]
            path = (ROOT / source).resolve() if source.startswith(".") else Path(source)
            if not path.is_absolute():
                path = self.folder / f"volume-{source}"
            path.mkdir(parents=True, exist_ok=True)
            places[target] = path
        return places

    def _here(self, text: str, places: dict[str, Path]) -> str:
        for name, port in self.ports.items():
            inside = name.partition(":")[2]
            text = text.replace(name, f"127.0.0.1:{port}")
            if text == inside:
                text = str(port)
        for target, path in places.items():
            if text == target or text.startswith(target + "/"):
                text = str(path) + text[len(target) :]
        return "127.0.0.1" if text == "0.0.0.0" else text

    def log(self, service: str) -> str:
        """What all processes of a service said."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob(f"{service}-*.log")))

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.wait()
        shutil.rmtree(self.folder / "volume-redis", ignore_errors=True)

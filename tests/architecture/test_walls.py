"""The walls between rooms, read from the code itself."""

import ast
import re
from pathlib import Path

import pytest

from benchmarks.lease_cost import OneEndpoint

ROOT = Path(__file__).parent.parent.parent
FILES = [path for room in ("app", "producers", "workers") for path in sorted((ROOT / room).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    """Dotted names of every module a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    """Path below the root, as text."""
    return path.relative_to(ROOT).as_posix()


def users(*packages: str) -> set[str]:
    """Files that import one of these packages."""
    return {
        room(path) for path in FILES
        if any(name == package or name.startswith(package + ".") for name in imports(path) for package in packages)
    }  # fmt: skip


def test_producers_and_workers_never_meet():
    """They share app, and know nothing of each other."""
    assert not {file for file in users("workers") if file.startswith("producers/")}
    assert not {file for file in users("producers") if file.startswith("workers/")}


def test_app_imports_neither_but_for_the_command_line():
    """app.cli is the composition root; everything else in app is below producers and workers."""
    assert {file for file in users("producers", "workers") if file.startswith("app/")} <= {
        file for file in map(room, FILES) if file.startswith("app/cli/")
    }


@pytest.mark.parametrize(
    ("packages", "allowed"),
    [
        (("transformers",), ("app/tokenization.py",)),
        (("huggingface_hub",), ("app/tokenizer_files.py",)),
        (("httpx",), ("app/sglang/client.py", "app/sglang/transport.py")),
        (("aiohttp",), ("app/sglang/transport.py", "app/sglang/simulator/")),
        (("sqlite3",), ("app/ledger/", "app/verify.py", "app/offline/scratch.py")),
        (("pyarrow",), ("producers/readers/", "app/offline/shards.py")),
        (("flower", "tornado"), ("app/flower_server.py",)),
        (("prometheus_client",), ("app/metrics.py",)),
        (("matplotlib",), ("app/offline/plot.py", "app/offline/report/charts.py")),
        (("click", "rich"), ("app/cli/",)),
        (("celery",), ("app/celery_app.py", "workers/", "producers/conveyor.py", "producers/enqueue.py",
          "producers/envelopes.py")),
        (("app.sglang.simulator",), ("app/sglang/simulator/", "app/cli/inspect.py", "app/cli/demo.py")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_a_library_has_its_room(packages, allowed):
    """Whoever swaps a library changes one room."""
    assert {file for file in users(*packages) if not file.startswith(allowed)} == set()


def test_the_redis_room_is_the_only_one_that_makes_connections():
    """Others may catch redis errors or annotate a client; only app/store makes one."""
    makers = {
        room(path) for path in FILES
        if any(word in path.read_text(encoding="utf-8") for word in ("Redis.from_url", "redis.Redis(", "StrictRedis("))
    }  # fmt: skip
    assert makers == {"app/store/connection.py"}


def test_only_the_redis_room_spells_keys():
    """Every key has one owner and one place: app/store/keys.py."""
    spellers = {room(path) for path in FILES if re.search(r'"headrace:\w', path.read_text(encoding="utf-8"))}
    assert spellers <= {"app/store/keys.py"}


@pytest.mark.parametrize("path", sorted((ROOT / "app" / "store" / "lua").glob("*.lua")), ids=lambda path: path.stem)
def test_every_script_says_what_it_does(path):
    """A header with name, KEYS, ARGV and RETURNS; keys come in through KEYS alone."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"-- {path.stem}: ")
    for word in ("-- KEYS:", "-- ARGV:", "-- RETURNS:"):
        assert word in text
    assert "headrace:" not in text


def test_every_room_says_why_it_exists():
    """Each module opens with a docstring."""
    silent = [
        room(path) for path in FILES
        if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]  # fmt: skip
    assert silent == []


def test_every_folder_of_code_says_why_it_is_there():
    """In its first lines, for whoever comes to look for something."""
    folders = {path.parent for top in ("app", "producers", "workers", "tests", "benchmarks") for path in
               (ROOT / top).rglob("*.py") if "data" not in path.relative_to(ROOT).parts}  # fmt: skip
    first = {folder: folder / "__init__.py" for folder in folders}
    texts = {folder: file.read_text() if file.exists() else "" for folder, file in first.items()}
    silent = [room(folder) for folder, text in texts.items() if not ast.get_docstring(ast.parse(text))]
    assert silent == []


def test_the_endpoint_of_lease_cost_has_all_that_admission_asks():
    """Or the benchmark measures a worker that has stopped asking."""
    asked = re.findall(r"self\._endpoints\.(\w+)", (ROOT / "workers" / "admission.py").read_text())
    assert asked
    assert set(asked) <= set(dir(OneEndpoint(1)))

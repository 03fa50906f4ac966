"""The input in chunks: datasets in turn, none of them more than fits."""

from app.settings import RunSettings
from producers import catalog
from producers.catalog import interleave
from producers.inputs import parse_inputs


def chunks(tmp_path, **files: list[bytes]) -> list[tuple[str, list[int] | None]]:
    """(dataset, numbers of its rows) of each chunk of these files."""
    for name, lines in files.items():
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(lines))
    inputs = [str(tmp_path / f"{name}.jsonl") for name in files]
    settings = RunSettings(inputs=inputs, out=tmp_path / "out", endpoints=["http://e"], tokenizer="t")
    found = interleave(parse_inputs(inputs), settings)
    return [(name, None if chunk is None else [raw.number for _, raw in chunk]) for name, chunk in found]


def test_datasets_take_turns_and_each_says_when_it_is_over(tmp_path):
    """A short one is not kept waiting by a long one."""
    short, long = [b'{"prompt":"a"}\n'] * 3, [b'{"prompt":"b"}\n'] * (catalog.CHUNK_ROWS + 1)
    whole = list(range(1, catalog.CHUNK_ROWS + 1))
    assert chunks(tmp_path, long=long, short=short) == [
        ("long", whole), ("short", [1, 2, 3]), ("long", [catalog.CHUNK_ROWS + 1]), ("short", None), ("long", None),
    ]  # fmt: skip


def test_large_rows_make_small_chunks(tmp_path, monkeypatch):
    """Several chunks are in memory at once, in several processes."""
    monkeypatch.setattr(catalog, "_CHUNK_BYTES", 1000)
    rows = [b'{"prompt":"%s"}\n' % (b"x" * size) for size in (400, 400, 400, 5000, 10)]
    assert [numbers for _, numbers in chunks(tmp_path, d=rows)] == [[1, 2, 3], [4], [5], None]

"""The rows of the input, one after the other, each with its identity: for the producer, and for whoever asks later.

Invariant: the same input gives the same rows with the same ids, whoever reads it.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from app.identity import bytes_digest, row_digest
from app.ledger import Bookmark, Ledger
from app.reasons import Reason, Rejected
from app.records import Conversation
from app.settings import RunSettings
from producers.inputs import Dataset
from producers.readers import RawRow, read_lines_behind, read_records
from producers.shapes import ShapeOptions, conversation_of, turns_in

CHUNK_ROWS = 256
_CHUNK_BYTES = 1 << 20  #: from which on a chunk is not added to: rows may be large

Chunk = list[tuple[int, RawRow]]  # (number of the file in its dataset, record)


@dataclass(frozen=True, slots=True)
class InputRow:
    """A row of the input: who it is, what it says (or why it cannot be used), and what the files have of it."""

    dataset: str
    row_id: str
    source_id: str
    number: int
    result: Conversation | Rejected = field(repr=False)
    final: frozenset[int]  #: completion indices that need no generation
    row_verdict: bool  #: the whole row was rejected
    turns: int  #: as many as each of its completions may have


def rows_of(datasets: list[Dataset], settings: RunSettings, ledger: Ledger) -> Iterator[InputRow]:
    """All rows, dataset by dataset, in order; the ledger registers them, as in a pass of the producer."""
    shapes = shape_options(settings)
    ledger.begin_pass(settings.samples, [dataset.name for dataset in datasets])
    for one in datasets:
        for dataset, chunk in interleave([one], settings):
            if chunk is None:
                ledger.end_pass(dataset)
                continue
            read = [(file, raw, *read_row(raw, shapes)) for file, raw in chunk]
            seen = ledger.see_rows(dataset, [(digest, file, raw.number) for file, raw, digest, _ in read])
            for (_, raw, _, result), known in zip(read, seen, strict=True):
                own, turns = "", 1
                if isinstance(result, Conversation):
                    own, turns = source_id_text(result.source_id), turns_in(result, shapes)
                yield InputRow(dataset, known.row_id, own, raw.number, result, known.final, known.row_verdict, turns)


def read_row(raw: RawRow, shapes: ShapeOptions) -> tuple[str, Conversation | Rejected]:
    """Identity of a record, and what it says or why it can't be used."""
    if raw.error is not None:
        return bytes_digest(raw.raw), raw.error
    try:
        conversation = conversation_of(raw.value, shapes)
        return row_digest(conversation), conversation
    except Rejected as verdict:
        return bytes_digest(raw.raw), verdict
    except RecursionError:
        return bytes_digest(raw.raw), Rejected(Reason.UNKNOWN_SHAPE, "it is nested too deeply")


def shape_options(settings: RunSettings) -> ShapeOptions:
    """How rows are recognised, from the run's settings."""
    return ShapeOptions(
        prompt_field=settings.prompt_field, messages_field=settings.messages_field, turns=settings.turns,
        prefill=settings.prefill, system=settings.system,
    )  # fmt: skip


def interleave(
    datasets: Sequence[Dataset], settings: RunSettings, behind: Mapping[str, Bookmark] | None = None
) -> Iterator[tuple[str, Chunk | None]]:
    """Chunks of (file number, record) of each dataset in turn; None as a dataset's last chunk.

    behind: by dataset, where to begin if not at its beginning.
    """
    starts = behind or {}
    readers = {dataset.name: _records(dataset, settings, starts.get(dataset.name)) for dataset in datasets}
    while readers:
        for name, reader in list(readers.items()):
            chunk = _chunk_of(reader)
            if chunk:
                yield name, chunk
            else:
                yield name, None
                del readers[name]


def _chunk_of(reader: Iterator[tuple[int, RawRow]]) -> Chunk:
    chunk, size = [], 0
    for file, raw in itertools.islice(reader, CHUNK_ROWS):
        chunk.append((file, raw))
        size += len(raw.raw)
        if size >= _CHUNK_BYTES:
            break
    return chunk


def _records(dataset: Dataset, settings: RunSettings, start: Bookmark | None) -> Iterator[tuple[int, RawRow]]:
    count, most = 0, settings.max_row_bytes
    for file, path in enumerate(dataset.paths):
        if start and (file < start.file or (file == start.file and start.whole)):
            continue
        if start and file == start.file:
            records = read_lines_behind(path, start.offset, start.number, most)
        else:
            records = read_records(path, max_row_bytes=most)
        for raw in records:
            if settings.limit is not None and count >= settings.limit:
                return
            count += 1
            yield file, raw


def source_id_text(source_id: object) -> str:
    """A row's own id as our files have it, "" for none."""
    if source_id is None:
        return ""
    return source_id if isinstance(source_id, str) else orjson.dumps(source_id).decode()

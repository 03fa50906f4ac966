"""What of the input remains to be done: neither on file nor on its way.

A pass registers every row in the ledger and asks it what the files have; where the ledger knows already which rows lack
something, they are found by their places.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from app.allowances import Allowances
from app.crash import crash_point
from app.identity import task_key
from app.ledger import Bookmark, Ledger, Missing
from app.reasons import Rejected
from app.records import Conversation
from app.rundir import RunDir
from app.settings import RunSettings
from producers.bookmarks import InputPass, rows_at
from producers.catalog import Chunk, read_row, shape_options, source_id_text
from producers.inputs import Dataset
from producers.rendering import Refusal, Row
from producers.shapes import turns_in


def is_complete(settings: RunSettings, datasets: list[Dataset], recipe: str) -> bool:
    """Whether the files have everything that the input asks for: then no server and no Redis is needed.

    Reads the input only if the ledger knew it complete when it was last read.
    """
    with Ledger.open(RunDir(settings.out)) as ledger:
        ledger.catch_up()
        counts = {one.dataset: one for one in ledger.counts()}
        names = [dataset.name for dataset in datasets]
        if new := set(names) - counts.keys():
            ledger.begin_pass(settings.samples, names)  # or the others' completeness would pass for the run's
        if new or not all(counts[name].rows_final for name in names) or ledger.pending_total():
            return False
        reader = Remaining(settings, recipe, ledger)
        for dataset, chunk in InputPass(datasets, settings, ledger).chunks():
            if chunk is None:
                ledger.end_pass(dataset)
            elif any(reader.missing_of(dataset, chunk, set())):
                return False
        return ledger.pending_total() == 0


class Remaining:
    """Records of the input become rows that still need something."""

    def __init__(self, settings: RunSettings, recipe: str, ledger: Ledger):
        self._recipe, self._ledger = recipe, ledger
        self._shapes, self._samples = shape_options(settings), settings.samples
        self._allowances = Allowances(settings.out)

    def missing_of(self, dataset: str, chunk: Chunk, outstanding: set[str]) -> Iterator[Row | Refusal]:
        """Register a chunk in the ledger; what neither files nor `outstanding` keys have, to render or to refuse."""
        read = [(file, raw, *read_row(raw, self._shapes)) for file, raw in chunk]
        crash_point("row_read")
        seen = self._ledger.see_rows(dataset, [(digest, file, raw.number) for file, raw, digest, _ in read])
        crash_point("row_registered")
        for (_, raw, _, result), known in zip(read, seen, strict=True):
            if not known.row_verdict:
                indices = [index for index in range(self._samples) if index not in known.final]
                yield from self._still_to_do(dataset, known.row_id, raw.number, result, indices, outstanding)

    def known_gaps(
        self, dataset: Dataset, gaps: Iterable[Missing], outstanding: set[str], max_row_bytes: int,
        marks: Sequence[Bookmark] = (),
    ) -> Iterator[Row | Refusal]:  # fmt: skip
        """Rows that the ledger knows to lack something, found by their place in the input without reading the rest.

        Only those of JSON Lines that still stand where they stood. marks: bookmarks that hold, to look from. Behind
        them one of two equal rows may be gone, so that only a pass can tell whether there is a second one.
        """
        wanted: dict[int, dict[int, dict[str, list[int]]]] = defaultdict(dict)
        held = marks[-1][:2] if marks else (0, 0)
        for one in gaps:
            if "-" in one.row_id and (one.file, one.number) > held:
                continue
            here = wanted[one.file].setdefault(one.number, {})
            here.setdefault(one.row_id, []).append(one.completion_index)
        for file, path in enumerate(dataset.paths):
            for raw in rows_at(path, wanted[file], [mark for mark in marks if mark.file == file], max_row_bytes):
                digest, result = read_row(raw, self._shapes)
                for row_id, indices in wanted[file][raw.number].items():  # more than one: of a pass broken off
                    if digest == row_id.partition("-")[0]:
                        indices = [index for index in indices if index < self._samples]
                        yield from self._still_to_do(dataset.name, row_id, raw.number, result, indices, outstanding)

    def _still_to_do(
        self, dataset: str, row_id: str, number: int, result: Conversation | Rejected, indices: list[int],
        outstanding: set[str],
    ) -> Iterator[Row | Refusal]:  # fmt: skip
        """What a row is to be rendered or refused for, if neither it nor these completions are on their way."""
        if outstanding:
            keys = {index: task_key(self._recipe, dataset, row_id, 0, index) for index in (-1, *indices)}
            if keys[-1] in outstanding:
                return
            indices = [index for index in indices if keys[index] not in outstanding]
        if isinstance(result, Rejected):
            yield Refusal(Row(dataset, row_id, "", number, None, ()), result.reason, result.detail)
        elif indices:
            own, allowances = source_id_text(result.source_id), self._allowances.of(dataset, row_id)
            turns = turns_in(result, self._shapes)
            yield Row(dataset, row_id, own, number, result, tuple(indices), allowances, turns)

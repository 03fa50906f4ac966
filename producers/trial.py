"""A few rows through the chat template before anything is sent: one that suits no row would reject them all, or make
the same prompt of each, and a run would end complete with nothing in it."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from app.chats import opening
from app.errors import UsageError
from app.reasons import Reason, Rejected
from app.records import Conversation
from app.settings import RunSettings
from app.tokenization import Renderer
from producers.catalog import read_row, shape_options
from producers.inputs import Dataset
from producers.readers import read_records
from producers.shapes import turns_in

_MOST_ROWS = 1000  #: of each file; as a rule the first one does
_BLAMED = (Reason.TEMPLATE_ERROR, Reason.EMPTY_PROMPT)


def refuse_useless_template(datasets: list[Dataset], settings: RunSettings, renderer: Renderer) -> None:
    """Raises UsageError if the template refuses every row that is tried for the same reason, or if no prompt changes
    with what its row asks. Rows that cannot be read are not its fault."""
    refused: dict[str, str] = {}  #: what it said → of which row first
    tried, unmoved = 0, ""
    for place, conversation in _rows(datasets, settings):
        tried += 1
        try:
            ids = renderer.render(conversation)
            if renderer.render(_asked_otherwise(conversation)) != ids:
                return
            unmoved = unmoved or place
        except Rejected as verdict:
            if verdict.reason not in _BLAMED:
                return
            refused.setdefault(verdict.detail, place)
        if len(refused) > 1:
            return
    remedy = "name another with --chat-template, or mend --template-kwargs"
    if unmoved:
        raise UsageError(f"The chat template makes the same prompt of {unmoved} whatever it asks; {remedy}.")
    for said, place in refused.items():
        raise UsageError(f"None of the {tried:,} rows tried gets a prompt, {place} first: {said}; {remedy}.")


def readable_rows(path: Path, settings: RunSettings, most: int) -> Iterator[tuple[int, Conversation, int]]:
    """(number, what it says, turns) of the rows at the beginning of a file that can be read."""
    shapes = shape_options(settings)
    for raw in islice(read_records(path, max_row_bytes=settings.max_row_bytes), min(most, settings.limit or most)):
        _, result = read_row(raw, shapes)
        if isinstance(result, Conversation):
            yield raw.number, result, turns_in(result, shapes)


def _rows(datasets: list[Dataset], settings: RunSettings) -> Iterator[tuple[str, Conversation]]:
    for dataset in datasets:
        for path in dataset.paths:
            for number, conversation, turns in readable_rows(path, settings, _MOST_ROWS):
                yield f"row {number} of {path}", opening(conversation) if turns > 1 else conversation


def _asked_otherwise(conversation: Conversation) -> Conversation:
    *before, last = conversation.messages
    return Conversation([*before, last | {"content": f"A {last['content']} Z"}], conversation.tools)

"""How long the prompts of an input are, before anything is sent: for `headrace plan` and `--dry-run`.

Renders a sample of each dataset and counts the rest, so that the answer comes in seconds however large the input is.
"""

from collections import Counter
from dataclasses import dataclass, field

from app.chats import opening
from app.reasons import Rejected
from app.settings import RunSettings
from app.tokenization import Renderer
from producers.catalog import interleave, read_row, shape_options
from producers.inputs import Dataset
from producers.shapes import turns_in

SAMPLE_ROWS = 2000


@dataclass(slots=True)
class Measured:
    """One dataset: its rows, and what a sample of them rendered to."""

    dataset: str
    rows: int = 0
    sampled: int = 0
    prompt_tokens: list[int] = field(default_factory=list)  #: of the sampled rows that rendered
    refused: Counter[str] = field(default_factory=Counter)  #: of the sampled rows, by reason

    @property
    def mean(self) -> float:
        """Mean prompt tokens of the sample; 0 of none."""
        return sum(self.prompt_tokens) / len(self.prompt_tokens) if self.prompt_tokens else 0.0

    @property
    def runnable(self) -> int:
        """Rows that will be sent, as the sample has it."""
        return round(self.rows * len(self.prompt_tokens) / self.sampled) if self.sampled else 0


def measure(
    datasets: list[Dataset], settings: RunSettings, renderer: Renderer, sample_rows: int = SAMPLE_ROWS
) -> list[Measured]:
    """Read the whole input once; the first `sample_rows` rows of each dataset are rendered."""
    found = {dataset.name: Measured(dataset.name) for dataset in datasets}
    shapes = shape_options(settings)
    for dataset, chunk in interleave(datasets, settings):
        one = found[dataset]
        for _, raw in chunk or ():
            one.rows += 1
            if one.sampled >= sample_rows:
                continue
            one.sampled += 1
            try:
                _, conversation = read_row(raw, shapes)
                if isinstance(conversation, Rejected):
                    raise conversation
                asked = opening(conversation) if turns_in(conversation, shapes) > 1 else conversation
                one.prompt_tokens.append(len(renderer.render(asked)))
            except Rejected as verdict:
                one.refused[verdict.reason.value] += 1
    return list(found.values())

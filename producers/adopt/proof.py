"""What has to hold of a line before it is trusted. The first thing that does not is the reason."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from app.records import ResponseRecord
from app.sglang.sampling import disagreement
from app.tokenization import Renderer
from producers.adopt.foreign import SAMPLING, ForeignLine
from producers.adopt.index import Index, IndexedRow
from producers.adopt.taken import Taker, problem_of
from producers.catalog import source_id_text


class Doubt(StrEnum):
    """Why a line is not trusted: a closed list."""

    NOT_JSON = "not_json"  #: torn, NUL bytes, or no object
    NOT_ASKED = "not_asked"  #: of a dataset, turn or completion that this run has not, or of another recipe
    NO_IDS = "no_ids"  #: no list of prompt ids, or none of output ids
    UNKNOWN_ROW = "unknown_row"  #: no row of the input has its id or its prompt
    ROW_REFUSED = "row_refused"  #: its row gets no prompt in this run
    PROMPT_DIFFERS = "prompt_differs"  #: this run would send other ids for its row
    WRONG_TYPE = "wrong_type"  #: what it says could not stand in a line of ours
    WRONG_COUNT = "wrong_count"  #: a count it states is not the length of its list
    IDS_OUT_OF_VOCABULARY = "ids_out_of_vocabulary"  #: an output id that the model does not have
    BAD_FINISH_REASON = "bad_finish_reason"  #: neither stop nor length, or its ids say otherwise
    OTHER_SAMPLING = "other_sampling"  #: made with another allowance, or other sampling parameters that it names
    OTHER_MODEL = "other_model"  #: names another model than the run, or than the lines before it
    TEXT_DIFFERS = "text_differs"  #: its text is not what its output ids say
    DUPLICATE = "duplicate"  #: its row has all its completions from lines before


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the proof says of a line. doubt None: trusted, as `record` of `row`."""

    row: IndexedRow | None
    doubt: Doubt | None
    detail: str = ""
    record: ResponseRecord | None = None  #: of a trusted line


@dataclass(frozen=True, slots=True)
class Terms:
    """What the answers of this run are held to."""

    sampling: dict[str, Any]
    output_vocab_size: int
    stop_ids: frozenset[int]
    recipes: list[str]  #: fingerprints that a line may name, the run's own first


class Proof:
    """Checks lines one after the other: what was trusted before counts for duplicates and the model."""

    def __init__(
        self, index: Index, renderer: Renderer, terms: Terms, taker: Taker, datasets: list[str], model: str,
        samples: int,
    ):  # fmt: skip
        self._index, self._renderer, self._terms, self._taker = index, renderer, terms, taker
        self._datasets, self._samples = datasets, samples
        self.model = model  #: the one of the run; "" until a trusted line names one

    def of(self, line: ForeignLine) -> Verdict:
        """The verdict on a line."""
        said = line.said
        for name in ("prompt_token_ids", "output_ids"):
            if problem := _ids_problem(name, said.get(name)):
                return Verdict(None, Doubt.NO_IDS, problem)
        if (doubt := self._asked(line)) is not None:
            return Verdict(None, *doubt)
        row, doubt = self._row_of(line)
        if doubt is not None:
            return Verdict(row, *doubt)
        index = said.get("completion_index", self._index.free(row))
        record = self._taker.record_of(line, row, 0 if index is None else index)
        checks = (self._form, self._counts, self._vocabulary, self._ending, self._sampling, self._model, self._text)
        for check in checks:
            if (doubt := check(line, record)) is not None:
                return Verdict(row, *doubt)
        if index is None or not self._index.take(row.seq, index):
            return Verdict(row, Doubt.DUPLICATE, f"row {row.number} has this completion already")
        self.model = self.model or _model_name(record)
        return Verdict(row, None, record=record)

    def _asked(self, line: ForeignLine) -> tuple[Doubt, str] | None:
        """Whether this run asks for such an answer at all, as far as the line says what it is."""
        ours = {
            "dataset": self._datasets, "turn": [0], "turns": [1], "completion_index": range(self._samples),
            "recipe": self._terms.recipes,
        }  # fmt: skip
        for name, values in ours.items():
            said = line.said.get(name, values[0])
            if type(said) is not type(values[0]) or said not in values:
                shown = values[:1] if name == "recipe" else values  # the others differ in nothing that ids would not
                has = f"0 to {values[-1]}" if name == "completion_index" else " or ".join(map(str, shown))
                remedy = " (raise --samples)" if name == "completion_index" and type(said) is int else ""
                detail = f"{name} is {str(said)[:40]!r}, this run has {has}{remedy}"
                return Doubt.NOT_ASKED, f"{detail}; --map {name}=FIELD if it stands elsewhere"
        return None

    # --- whose answer it is ---

    def _row_of(self, line: ForeignLine) -> tuple[IndexedRow | None, tuple[Doubt, str] | None]:
        ids = line.said["prompt_token_ids"]
        named = self._named(line)
        same = [row for row in named if row.prompt is not None and self._index.prompt_ids(row) == ids]
        if same:
            return next((row for row in same if self._index.free(row) is not None), same[0]), None
        others = [row for name in self._datasets_of(line) for row in self._index.with_prompt(name, ids)]
        if named:
            return named[0], self._difference(named[0], ids, others)
        if others:
            return others[0], None
        return None, (Doubt.UNKNOWN_ROW, "no row of the input has its id, and none its prompt")

    def _named(self, line: ForeignLine) -> list[IndexedRow]:
        row_id, own = line.said.get("row_id"), line.said.get("source_id")
        for name in self._datasets_of(line):
            if isinstance(row_id, str) and (found := self._index.named(name, row_id=row_id)):
                return found
            if own is not None and (found := self._index.named(name, source_id=source_id_text(own))):
                return found
        return []

    def _datasets_of(self, line: ForeignLine) -> list[str]:
        own = line.said.get("dataset") or line.file.dataset
        return [own] if own else self._datasets

    def _difference(self, row: IndexedRow, ids: list[int], others: list[IndexedRow]) -> tuple[Doubt, str]:
        if row.prompt is None:
            return Doubt.ROW_REFUSED, row.refusal
        if others:
            return Doubt.PROMPT_DIFFERS, f"its prompt is that of row {others[0].number}, not of row {row.number}"
        ours = self._index.prompt_ids(row)
        at = next((at for at, (a, b) in enumerate(zip(ours, ids, strict=False)) if a != b), min(len(ours), len(ids)))
        where = f"at id {at} it has {ids[at : at + 1] or 'nothing'}, this run {ours[at : at + 1] or 'nothing'}"
        return Doubt.PROMPT_DIFFERS, f"{where} ({len(ids)} and {len(ours)} ids)"

    # --- whether it holds together ---

    def _form(self, line: ForeignLine, record: ResponseRecord) -> tuple[Doubt, str] | None:
        sampling = line.said.get("sampling", {})
        if not isinstance(sampling, dict):
            return Doubt.WRONG_TYPE, f"its sampling parameters are no object but {str(sampling)[:40]!r}"
        problem = problem_of(record)
        if problem is None:
            return None
        kind, detail = problem
        return Doubt.BAD_FINISH_REASON if kind == "bad_finish_reason" else Doubt.WRONG_TYPE, detail

    def _counts(self, line: ForeignLine, _: ResponseRecord) -> tuple[Doubt, str] | None:
        for name, ids in (("num_prompt_tokens", "prompt_token_ids"), ("num_output_tokens", "output_ids")):
            have = len(line.said[ids])
            for stated in line.stated[name]:
                if type(stated) is not int or stated != have:
                    return Doubt.WRONG_COUNT, f"it states {stated} for {name}, and {ids} holds {have}"
        return None

    def _vocabulary(self, line: ForeignLine, _: ResponseRecord) -> tuple[Doubt, str] | None:
        highest = max(line.said["output_ids"])
        if highest >= self._terms.output_vocab_size:
            return Doubt.IDS_OUT_OF_VOCABULARY, f"id {highest}; the model has {self._terms.output_vocab_size}"
        return None

    def _ending(self, line: ForeignLine, record: ResponseRecord) -> tuple[Doubt, str] | None:
        reason, matched, ids = line.said.get("finish_reason"), line.said.get("matched"), line.said["output_ids"]
        ends_in_stop = ids[-1] in self._terms.stop_ids
        if len(set(line.stated["finish_reason"])) > 1:
            return Doubt.BAD_FINISH_REASON, f"it says {' and '.join(map(str, line.stated['finish_reason']))}"
        if reason == "length":
            if matched is not None or ends_in_stop:
                return Doubt.BAD_FINISH_REASON, "it says length, and it ended at a stop"
            return None
        if reason != "stop":
            return Doubt.BAD_FINISH_REASON, f"finish reason {str(reason)[:40]!r}"
        by_text = isinstance(matched, str) and matched in (self._terms.sampling.get("stop") or ())
        if by_text or str(matched) == str(ids[-1]) or (matched is None and ends_in_stop):
            return None
        return Doubt.BAD_FINISH_REASON, f"it says stop at {str(matched)[:40]!r}, and its last id is {ids[-1]}"

    def _sampling(self, line: ForeignLine, record: ResponseRecord) -> tuple[Doubt, str] | None:
        ours, said = self._terms.sampling, line.said
        for theirs in (said.get("sampling", {}), {name: said[name] for name in SAMPLING if name in said}):
            if (differs := disagreement(ours, theirs)) is not None:
                return Doubt.OTHER_SAMPLING, differs
        tokens, most, asked = record.num_output_tokens, ours["max_new_tokens"], record.max_new_tokens
        if tokens > most or tokens > asked or (record.finish_reason == "length" and tokens != most):
            ending = f"{tokens} tokens, {record.finish_reason}, of {asked}"
            return Doubt.OTHER_SAMPLING, f"{ending}; this run asks for {most}"
        return None

    def _model(self, line: ForeignLine, record: ResponseRecord) -> tuple[Doubt, str] | None:
        name = _model_name(record)
        if name in ("", self.model) or not self.model:
            return None
        return Doubt.OTHER_MODEL, f"made by {name}; the run has {self.model}"

    def _text(self, line: ForeignLine, record: ResponseRecord) -> tuple[Doubt, str] | None:
        text, ids, decode = record.text, record.output_ids, self._renderer.decode
        if "text" not in line.said:
            return None
        if record.finish_reason == "stop" and record.matched != str(ids[-1]):
            return None if decode(ids, skip_special_tokens=True).startswith(text) else _OTHER_TEXT
        forms = (decode(some, skip_special_tokens=skip) for some in (ids, ids[:-1]) for skip in (True, False))
        return None if any(_same(text, form) for form in forms) else _OTHER_TEXT


_OTHER_TEXT = (Doubt.TEXT_DIFFERS, "its text is not what its output ids say")


def _ids_problem(name: str, value: Any) -> str:
    """What is wrong with a list of ids, "" if nothing is."""
    if not isinstance(value, list) or not value:
        return f"it has no list of {name}; --map {name}=FIELD names where it stands"
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31:
        return ""
    place, odd = next((n, one) for n, one in enumerate(value) if type(one) is not int or not 0 <= one < 2**31)
    return f"{name} has {str(odd)[:40]!r} at place {place}, which is no token id"


def _model_name(record: ResponseRecord) -> str:
    """Hosts keep the same model under different folders."""
    return record.model.rstrip("/").rsplit("/", 1)[-1]


def _same(text: str, decoded: str) -> bool:
    """A character that was cut in half at the end is left out by some servers."""
    return text == decoded or text.rstrip("\ufffd") == decoded.rstrip("\ufffd")



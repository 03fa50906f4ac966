"""What has to hold of a line before it is trusted. The first thing that does not is the reason."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from app.tokenization import Renderer
from producers.adopt.foreign import ForeignLine
from producers.adopt.index import Index, IndexedRow


class Doubt(StrEnum):
    """Why a line is not trusted: a closed list."""

    NOT_JSON = "not_json"  #: torn, NUL bytes, or no object
    NO_IDS = "no_ids"  #: no list of prompt ids, or none of output ids
    UNKNOWN_ROW = "unknown_row"  #: no row of the input has its id or its prompt
    ROW_REFUSED = "row_refused"  #: its row gets no prompt in this run
    PROMPT_DIFFERS = "prompt_differs"  #: this run would send other ids for its row
    WRONG_COUNT = "wrong_count"  #: a count it states is not the length of its list
    IDS_OUT_OF_VOCABULARY = "ids_out_of_vocabulary"  #: an output id that the model does not have
    BAD_FINISH_REASON = "bad_finish_reason"  #: neither stop nor length, or its ids say otherwise
    OTHER_SAMPLING = "other_sampling"  #: made with another allowance, or other sampling parameters that it names
    OTHER_MODEL = "other_model"  #: names another model than the run, or than the lines before it
    TEXT_DIFFERS = "text_differs"  #: its text is not what its output ids say
    DUPLICATE = "duplicate"  #: its row has all its completions from lines before


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the proof says of a line. doubt None: trusted, as completion `index` of `row`."""

    row: IndexedRow | None
    doubt: Doubt | None
    detail: str = ""
    index: int = -1


@dataclass(frozen=True, slots=True)
class Terms:
    """What the answers of this run are held to."""

    sampling: dict[str, Any]
    output_vocab_size: int
    stop_ids: frozenset[int]


class Proof:
    """Checks lines one after the other: what was trusted before counts for duplicates and the model."""

    def __init__(self, index: Index, renderer: Renderer, terms: Terms, datasets: list[str], model: str):
        self._index, self._renderer, self._terms, self._datasets = index, renderer, terms, datasets
        self.model = model  #: the one of the run; "" until a line names one

    def of(self, line: ForeignLine) -> Verdict:
        """The verdict on a line."""
        said = line.said
        if not _is_ids(said.get("prompt_token_ids")) or not _is_ids(said.get("output_ids")) or not said["output_ids"]:
            return Verdict(None, Doubt.NO_IDS, "it lacks prompt ids or output ids; --map names their fields")
        row, doubt = self._row_of(line)
        if doubt is not None:
            return Verdict(row, *doubt)
        for check in (self._counts, self._vocabulary, self._ending, self._sampling, self._model, self._text):
            if (doubt := check(line)) is not None:
                return Verdict(row, *doubt)
        return self._place(line, row)

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
            if own is not None and (found := self._index.named(name, source_id=str(own))):
                return found
        return []

    def _datasets_of(self, line: ForeignLine) -> list[str]:
        own = line.said.get("dataset")
        if own in self._datasets:
            return [own]
        return [line.file.dataset] if line.file.dataset else self._datasets

    def _difference(self, row: IndexedRow, ids: list[int], others: list[IndexedRow]) -> tuple[Doubt, str]:
        if row.prompt is None:
            return Doubt.ROW_REFUSED, row.refusal
        if others:
            return Doubt.PROMPT_DIFFERS, f"its prompt is that of row {others[0].number}, not of row {row.number}"
        ours = self._index.prompt_ids(row)
        at = next((at for at, (a, b) in enumerate(zip(ours, ids, strict=False)) if a != b), min(len(ours), len(ids)))
        where = f"at id {at} it has {ids[at : at + 1] or 'nothing'}, this run {ours[at : at + 1] or 'nothing'}"
        return Doubt.PROMPT_DIFFERS, f"{where} ({len(ids)} and {len(ours)} ids)"

    def _place(self, line: ForeignLine, row: IndexedRow) -> Verdict:
        given = line.said.get("completion_index")
        index = given if type(given) is int and given >= 0 else self._index.free(row)
        if index is None or not self._index.take(row.seq, index):
            return Verdict(row, Doubt.DUPLICATE, f"row {row.number} has this completion already")
        return Verdict(row, None, index=index)

    # --- whether it holds together ---

    def _counts(self, line: ForeignLine) -> tuple[Doubt, str] | None:
        for name, ids in (("num_prompt_tokens", "prompt_token_ids"), ("num_output_tokens", "output_ids")):
            have = len(line.said[ids])
            for stated in line.stated[name]:
                if stated != have:
                    return Doubt.WRONG_COUNT, f"it states {stated} for {name}, and {ids} holds {have}"
        return None

    def _vocabulary(self, line: ForeignLine) -> tuple[Doubt, str] | None:
        highest = max(line.said["output_ids"])
        if highest >= self._terms.output_vocab_size:
            return Doubt.IDS_OUT_OF_VOCABULARY, f"id {highest}; the model has {self._terms.output_vocab_size}"
        return None

    def _ending(self, line: ForeignLine) -> tuple[Doubt, str] | None:
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

    def _sampling(self, line: ForeignLine) -> tuple[Doubt, str] | None:
        ours, theirs = self._terms.sampling, line.said.get("sampling")
        for name, value in theirs.items() if isinstance(theirs, dict) else ():
            if name != "max_new_tokens" and name in ours and value is not None and value != ours[name]:
                return Doubt.OTHER_SAMPLING, f"{name} {value}; this run has {ours[name]}"
        tokens, most = len(line.said["output_ids"]), ours["max_new_tokens"]
        asked = line.said.get("max_new_tokens", most)
        if tokens > most or tokens > asked or (line.said["finish_reason"] == "length" and tokens != most):
            ending = f"{tokens} tokens, {line.said['finish_reason']}, of {asked}"
            return Doubt.OTHER_SAMPLING, f"{ending}; this run asks for {most}"
        return None

    def _model(self, line: ForeignLine) -> tuple[Doubt, str] | None:
        name = line.said.get("model")
        if not isinstance(name, str):
            return None
        name = name.rstrip("/").rsplit("/", 1)[-1]  # hosts keep the same model under different folders
        self.model = self.model or name
        return None if name == self.model else (Doubt.OTHER_MODEL, f"made by {name}; the run has {self.model}")

    def _text(self, line: ForeignLine) -> tuple[Doubt, str] | None:
        text, ids, decode = line.said.get("text"), line.said["output_ids"], self._renderer.decode
        if not isinstance(text, str):
            return None
        if line.said["finish_reason"] == "stop" and isinstance(line.said.get("matched"), str) \
                and line.said["matched"] != str(ids[-1]):  # fmt: skip
            return None if decode(ids, skip_special_tokens=True).startswith(text) else _OTHER_TEXT
        forms = (decode(some, skip_special_tokens=skip) for some in (ids, ids[:-1]) for skip in (True, False))
        return None if any(_same(text, form) for form in forms) else _OTHER_TEXT


_OTHER_TEXT = (Doubt.TEXT_DIFFERS, "its text is not what its output ids say")


def _is_ids(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) <= {int} and all(0 <= one < 2**31 for one in value)


def _same(text: str, decoded: str) -> bool:
    """A character that was cut in half at the end is left out by some servers."""
    return text == decoded or text.rstrip("\ufffd") == decoded.rstrip("\ufffd")



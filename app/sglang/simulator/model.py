"""The simulated model as a server holds it: a name, a weight version, a token chain, and text both ways.

Invariant: what it answers depends on name, weight version, seed and the ids it is given, and on nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from app.sglang.simulator import bodies
from app.sglang.simulator.chat import ChatTemplate
from app.sglang.simulator.config import SimulatorConfig
from app.sglang.simulator.engine import Request
from app.sglang.simulator.requests import Ask, Refused
from app.sglang.simulator.tokens import TokenChain


@dataclass(slots=True)
class Job:
    """One completion on its way: what was asked, where it will stop, and how its ids are made."""

    ask: Ask
    state: int  #: of the chain, after the input
    already_made: int  #: ids at the end of the input that the model made earlier
    stops: str  #: what its last id is: "eos" | "stop id" | "" (any id; its allowance ends it)
    frame: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  #: ids before and after the chain's
    future: Any = None

    def reaches_stop(self, made: int) -> bool:
        """Whether its end is a stop. The allowance is looked at first: a stop id in its last place is a `length`."""
        return bool(self.stops) and made < self.ask.max_new_tokens


class Model:
    """One model under one weight version."""

    def __init__(self, config: SimulatorConfig, name: str, weight_version: str) -> None:
        self.config, self.name, self.weight_version = config, name, weight_version
        self.chain = TokenChain(
            config.id_low, config.id_high, config.eos_id, f"{name}\0{weight_version}\0{config.seed}",
            config.output_lengths, config.output_mean, config.output_sigma,
        )  # fmt: skip
        self._decode, self._encode = config.decode, config.encode
        self._template: ChatTemplate | None = None
        self.tokenizer_length = config.context_length  #: what /v1/tokenize calls max_model_len: the tokenizer's own
        if config.tokenizer_dir:
            tokenizer = _load_tokenizer(config.tokenizer_dir)
            self._template = ChatTemplate(Path(config.tokenizer_dir), config.version)
            self.tokenizer_length = self._template.tokenizer_length
            self._decode = self._decode or tokenizer.decode
            self._encode = self._encode or (lambda text: tokenizer.encode(text, add_special_tokens=False).ids)

    def knows(self, ids: Sequence[int]) -> bool:
        """Whether all ids are in the vocabulary; others (and no ids at all) kill a real server."""
        return bool(ids) and min(ids) >= 0 and max(ids) < self.config.vocab_size

    def start(self, ask: Ask) -> tuple[Job, Request]:
        """The job of an ask and the engine's request for it."""
        plan = self.chain.plan(ask.ids)
        job = Job(ask, plan.state, plan.made, "", self._frame(plan.state))
        tokens = ask.max_new_tokens
        wanted = max(plan.left, ask.min_new_tokens) + sum(map(len, job.frame))
        if not ask.ignore_eos:
            if wanted <= tokens:
                tokens, job.stops = wanted, "eos"
            place = self.chain.first_of(ask.stop_token_ids, plan.state, tokens - bool(job.stops))
            if place:
                tokens, job.stops = place, "stop id"
        return job, Request(ask.rid, len(ask.ids), ask.max_new_tokens, tokens, payload=job)

    def output_ids(self, job: Job, made: int, over: bool) -> list[int]:
        """The first `made` ids of a job. over: it came to its own end, so a stop id stands there."""
        stop = [self.config.eos_id] if over and job.stops == "eos" else []
        (first, last), count = job.frame, made - len(stop)
        if not job.stops:  # cut: nobody knows what would have come last
            last = ()
        chain = self.chain.ids(job.state, max(0, count - len(first) - len(last)))
        return [*[*first, *chain, *last][:count], *stop]

    def _frame(self, state: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        frames = self.config.frames
        return frames[crc32(state.to_bytes(8, "little")) % len(frames)] if frames else ((), ())

    def text(self, ids: list[int], stopped: bool) -> str:
        """The text of an output, its stop id trimmed."""
        ids = ids[:-1] if stopped else ids
        if self._decode is not None:
            return self._decode(ids)
        return " ".join(f"w{token}" for token in ids[:8]) + (" …" if len(ids) > 8 else "")

    def encode(self, text: str) -> list[int]:
        """Ids of a text: the tokenizer's, or one per word."""
        if self._encode is not None:
            return self._encode(text)
        span = self.config.id_high - self.config.id_low
        return [self.config.id_low + crc32(word.encode()) % span for word in text.split()]

    def chat_ids(self, body: dict[str, Any]) -> list[int]:
        """Ids of a chat request. Raises Refused, also where there is no folder with a chat template."""
        if self._template is None:
            raise Refused(400, bodies.bad_request("Chat template tokenization requires a template manager."))
        return self.encode(self._template.render(body))


def _load_tokenizer(folder: str) -> Any:
    from tokenizers import Tokenizer  # here, so that a server without text starts at once

    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))

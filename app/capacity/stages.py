"""What `--stage-tokens` is worth asking for: a pure function of a job's lengths and a server's pool.

SGLang keeps room for a share of what each running request may yet make, up to 4,096 tokens each, and for all of what
the next one may. Asked for less, it keeps less, and the pool holds more. The share is what its new_token_ratio falls to
while nothing is retracted (schedule_policy.py and schedule_batch.py of 0.5.6 to 0.5.23).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from app.lanes import expected_output_tokens

#: Share of what a running request may yet make that room is kept for, at --schedule-conservativeness 1.
RESERVED_SHARE = 0.7 * 0.14
#: So many answers of all end in their first stage. Fewer cost more prefill than the room is worth.
COVERED = 2 / 3
#: Less than this share of the time is not worth a word.
LEAST_GAIN = 0.05
#: Fewer finished answers say too little of the others.
ENOUGH = 30
_SAMPLE = 500


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be made, and where."""

    kv_tokens: int
    prompt_tokens: float  #: mean
    allowance: int  #: max_new_tokens
    lengths: Sequence[int]  #: of finished answers, any sample of them
    conservativeness: float = 1.0


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A number for --stage-tokens, and what it brings at most."""

    tokens: int
    use: float  #: share of the pool that whole answers fill, by the server's own rule
    staged_use: float  #: ... and answers in stages

    @property
    def gain(self) -> float:
        """Share of the time that is saved where a step takes as long whatever the pool holds. Less where reading the
        pool is most of a step."""
        return 1 - self.use / self.staged_use

    def __str__(self) -> str:
        return (
            f"--stage-tokens {self.tokens}: with it about {self.staged_use:.0%} of the KV pool can be filled, without "
            f"about {self.use:.0%} (up to {self.gain:.0%} less time)"
        )


def suggest(job: Job) -> Suggestion | None:
    """The stage to ask for, None where too little is known or nothing to speak of is won."""
    lengths = sorted(min(length, job.allowance) for length in job.lengths)
    if len(lengths) < ENOUGH:
        return None
    covering = lengths[min(len(lengths) - 1, int(COVERED * len(lengths)))]
    tokens = -(-covering // 50) * 50
    thinned = lengths[:: -(-len(lengths) // _SAMPLE)]
    found = Suggestion(tokens, _use(job, thinned, job.allowance), _use(job, thinned, tokens))
    return found if found.gain >= LEAST_GAIN else None


def _use(job: Job, lengths: Sequence[int], stage: int) -> float:
    """Share of the pool that the server fills while others wait, if it is asked for so much at a time.

    Over all steps of all answers: what a request holds, and what is kept for it.
    """
    steps = sum(lengths)
    held = sum(length * (job.prompt_tokens + length / 2) for length in lengths) / steps
    kept = sum(_kept(length, stage, job.allowance) for length in lengths) / steps
    kept *= RESERVED_SHARE * job.conservativeness
    free = job.kv_tokens - expected_output_tokens(stage) - job.prompt_tokens
    return max(0.0, free) / job.kv_tokens * held / (held + kept)


def _kept(length: int, stage: int, allowance: int) -> float:
    """Sum, over the steps of an answer, of what its stage may yet make."""
    total, made = 0.0, 0
    while made < length:
        asked = min(stage, allowance - made)
        steps, clipped = min(asked, length - made), max(0, asked - expected_output_tokens(asked))
        flat = min(steps, clipped)  # steps at which more is left than is ever kept
        total += flat * expected_output_tokens(asked) + (steps - flat) * (asked - flat - (steps - flat) / 2)
        made += asked
    return total

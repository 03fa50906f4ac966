"""Continuous batching over a KV pool, as arithmetic: no clock, no sockets, no ids, only counts of tokens.

The caller passes the time in; `advance(now)` plays all whole decode steps up to then and returns who finished, and
`next_event()` says when the next interesting moment comes (a finish, a full pool, a chance of admission), so a server
sleeps once instead of once a step, and a benchmark plays hours in a second.
Invariants: used_tokens = sum of prompt + made over the running <= kv_tokens; a retracted request keeps what it made.

Rules, as SGLang's: first come first served; a request is admitted while its tokens and a reserve fit beside the
reserve of those that run (see `_fits`); prefill stops decoding for a while and brings the first token; a step that
does not fit retracts requests, which wait at the end of the queue and are prefilled again with what they had made.
Simplified: a prefix cache only where asked for, and only for requests that say what they go on with (`after`), no
chunked prefill, pages of one token. The default times are those of a 1.7B model on an H200 with a full pool of long
answers (SGLang 0.5.17): 2.6 ms a step, and 42 ns for each token in the pool, as attention reads them all;
tests/unit/test_simulator_engine.py holds it to the throughput measured there.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any, Literal

CLIP_TOKENS = 4096  # no request is reserved more than this
START_RATIO, END_RATIO, DECAY_STEPS = 0.7, 0.7 * 0.14, 600  # new_token_ratio at conservativeness 1
NEVER = 1 << 62  # a step that does not come
RETRACT_STEPS = 20  # a retraction raises the ratio as if all ran on for so many steps
ADMISSION_STEPS = 8  # the reserve decays, so what waits is tried again after so many steps; also after each finish

Outcome = Literal["", "done", "aborted", "aborted_waiting", "queue_full"]


@dataclass(eq=False, slots=True)
class Request:
    """One request as the engine sees it. `tokens` is how many ids it makes if nobody stops it (<= max_new_tokens)."""

    rid: str
    prompt_tokens: int
    max_new_tokens: int
    tokens: int
    payload: Any = field(default=None, repr=False)
    outcome: Outcome = ""
    made: int = 0  #: up to date while waiting and once over; ask `Engine.made` while it runs
    num_retractions: int = 0
    arrived: float = 0.0
    admitted: float = 0.0  #: begin of its first prefill
    prefilled: float = 0.0  #: end of its first prefill
    finished: float = 0.0
    serial: int = 0  #: order of admission; 0 while it does not run
    after: str = ""  #: rid of the request whose prompt and answer its own prompt begins with
    base: int = 0  #: while running: made = engine.step - base


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes in tokens and requests, times in seconds."""

    kv_tokens: int
    max_running: int = 256
    max_queued: int | None = None
    admission: str = "reserve"
    conservativeness: float = 1.0
    retraction: str = "length"
    step_seconds: float = 0.0026
    step_seconds_per_request: float = 0.0
    step_seconds_per_token: float = 42e-9
    prefill_seconds: float = 0.0
    prefill_tokens_per_second: float = 95_000.0
    prefix_cache: bool = False  #: what ended stays in the free part of the pool, the eldest is pushed out first


@dataclass(slots=True)
class Counters:
    """What the engine has done since it was made."""

    completed: int = 0
    aborted: int = 0
    refused: int = 0
    retractions: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    peak_used_tokens: int = 0
    pool_full: int = 0  #: times a step did not fit

    def merged(self, other: "Counters") -> "Counters":
        """Both together: sums, and the higher of two peaks."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Counters(**{name: max(a, b) if name.startswith("peak_") else a + b for name, a, b in pairs})


class Engine:
    """The scheduler of one simulated server."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.clock = 0.0  #: end of the last step or prefill played; may be ahead of `now` by one of them
        self.step = 0
        self.slow = 1.0  #: all work takes so many times as long
        self.running: set[Request] = set()
        self.waiting: deque[Request] = deque()
        self.used_tokens = 0
        self.new_token_ratio = START_RATIO * config.conservativeness
        self.counters = Counters()
        self._over: list[Request] = []
        self._cached: dict[str, int] = {}  # rid → tokens of a request that ended, eldest first
        self._finishes: list[tuple[int, int, Request]] = []  # (step, serial, request); stale ones are skipped
        self._serial = 0
        self._admission_step = 0  # the queue is tried at the first step boundary from this on
        self._blocked = False  # the last trial ended because the pool had no room

    def submit(self, now: float, request: Request) -> bool:
        """Queues a request; False, with outcome "queue_full", if the queue has no room."""
        self.advance_clock(now)
        request.arrived = now
        if not self.waiting:
            self._admission_step = self.step + bool(self.running)  # not in the middle of a step
        return self._enqueue(request)

    def complete(self, now: float, request: Request) -> None:
        """Ends a request at once, with no queue, no pool and no time."""
        request.arrived = request.admitted = request.prefilled = now
        request.made = request.tokens
        self.counters.generated_tokens += request.tokens
        self._end(request, "done", now)

    def abort(self, now: float, prefix: str) -> None:
        """Ends all requests whose rid begins with `prefix` ("" = every one); `take` returns them."""
        self.advance_clock(now)
        for request in [r for r in self.running if r.rid.startswith(prefix)]:
            self._stop_running(request)
            self._end(request, "aborted", now)
        for request in [r for r in self.waiting if r.rid.startswith(prefix)]:
            self.waiting.remove(request)
            self._end(request, "aborted_waiting", now)

    def advance(self, now: float) -> list[Request]:
        """Plays everything up to `now`; the requests that are over since the last call, in order."""
        self.advance_clock(now)
        return self.take()

    def take(self) -> list[Request]:
        """The requests that are over and were not handed out yet."""
        over, self._over = self._over, []
        return over

    def next_event(self) -> float | None:
        """When to call `advance` next; None while nothing runs or waits."""
        if self._over:
            return self.clock
        if self._admission_due():
            return self.clock
        if not self.running:
            return None
        return self.clock + self._seconds_of(self._steps_ahead())

    def made(self, request: Request) -> int:
        """Tokens a request has made so far."""
        return min(self.step - request.base, request.tokens) if request.serial else request.made

    def step_time(self) -> float:
        """Seconds of one decode step of the present batch."""
        config = self.config
        fixed = config.step_seconds + config.step_seconds_per_request * len(self.running)
        return (fixed + config.step_seconds_per_token * self.used_tokens) * self.slow

    def _seconds_of(self, steps: int) -> float:
        """Seconds of so many decode steps: each holds a token more of each request."""
        growth = self.config.step_seconds_per_token * len(self.running) * self.slow
        return steps * self.step_time() + growth * steps * (steps - 1) / 2

    def _steps_in(self, seconds: float) -> int:
        """Whole decode steps in so many seconds."""
        growth, first = self.config.step_seconds_per_token * len(self.running) * self.slow / 2, self.step_time()
        if seconds <= 0:
            return 0
        half = (first - growth) / 2  # growth * steps² + 2 * half * steps = seconds
        return int(seconds / (half + math.sqrt(half * half + growth * seconds)) + 1e-6)

    def throughput(self) -> float:
        """Tokens per second of the present batch."""
        return len(self.running) / self.step_time() if self.running else 0.0

    def advance_clock(self, now: float) -> None:
        """Plays everything up to `now`, leaving who is over for `take`."""
        while self.clock <= now:
            self._finish_due()
            if self._admit():
                continue  # the prefill has moved the clock
            if not self.running:
                self.clock = now
                return
            ahead = self._steps_ahead()
            steps = min(ahead, self._steps_in(now - self.clock))
            if ahead == 0:
                self._retract()
            elif steps == 0:
                return  # in the middle of a step
            else:
                self._decode(steps)

    def _steps_ahead(self) -> int:
        """Decode steps until something happens; 0 if the next one does not fit into the pool."""
        steps = min(self._next_finish() - self.step, (self.config.kv_tokens - self.used_tokens) // len(self.running))
        if self.waiting and len(self.running) < self.config.max_running:
            steps = min(steps, self._admission_step - self.step)
        return steps

    def _decode(self, steps: int) -> None:
        self.clock += self._seconds_of(steps)
        self.step += steps
        self.used_tokens += steps * len(self.running)
        self.counters.generated_tokens += steps * len(self.running)
        self.counters.peak_used_tokens = max(self.counters.peak_used_tokens, self.used_tokens)
        self._push_out()
        floor, start = END_RATIO * self.config.conservativeness, START_RATIO * self.config.conservativeness
        self.new_token_ratio = max(floor, self.new_token_ratio - (start - floor) / DECAY_STEPS * steps)

    # admission

    def _enqueue(self, request: Request) -> bool:
        if self.config.max_queued is not None and len(self.waiting) >= self._queue_room():
            self.counters.refused += 1
            request.outcome, request.finished = "queue_full", self.clock
            self._over.append(request)
            return False
        self.waiting.append(request)
        self.counters.peak_waiting = max(self.counters.peak_waiting, len(self.waiting))
        return True

    def _queue_room(self) -> int:
        """Places in the queue; those that the next trial will take into free slots do not count."""
        free_slots = 0 if self._blocked else self.config.max_running - len(self.running)
        return (self.config.max_queued or 0) + free_slots

    def _admission_due(self) -> bool:
        """Whether the queue is to be tried at this step boundary."""
        slots = len(self.running) < self.config.max_running
        return bool(self.waiting) and slots and (not self.running or self.step >= self._admission_step)

    def _admit(self) -> bool:
        """Prefills as many waiting requests as fit. True if there were any (then the clock has moved)."""
        if not self._admission_due():
            return False
        self._admission_step = self.step + ADMISSION_STEPS
        free = self.config.kv_tokens - self.used_tokens - self._reserved()
        batch: list[Request] = []
        self._blocked = False
        while self.waiting and len(self.running) + len(batch) < self.config.max_running:
            request = self.waiting[0]
            if (self.running or batch) and not self._fits(request, free):
                self._blocked = True
                break
            batch.append(self.waiting.popleft())
            free -= request.prompt_tokens + request.made + 1 + self._reserve(request, request.made)
        if batch:
            self._prefill(batch)
        return bool(batch)

    def _fits(self, request: Request, free: float) -> bool:
        """Room for all its tokens, and (reserve rule) in full for what it may yet make, up to the clip."""
        need = request.prompt_tokens + request.made + 1
        if self.config.admission == "reserve":
            need += min(request.max_new_tokens - request.made, CLIP_TOKENS)
        return need < free

    def _reserved(self) -> float:
        return sum(self._reserve(r, self.step - r.base) for r in self.running)

    def _reserve(self, request: Request, made: int) -> float:
        """Tokens kept free for one running request."""
        if self.config.admission != "reserve":
            return 0.0
        return min(request.max_new_tokens - made, CLIP_TOKENS) * self.new_token_ratio

    def _prefill(self, batch: list[Request]) -> None:
        start = self.clock
        tokens = sum(r.prompt_tokens + r.made - self._cached.pop(r.after, 0) for r in batch)
        self.clock += (self.config.prefill_seconds + tokens / self.config.prefill_tokens_per_second) * self.slow
        for request in batch:
            if not request.prefilled:
                request.admitted, request.prefilled = start, self.clock
            first = 1 if request.made < request.tokens else 0
            self._serial += 1
            request.serial = self._serial
            request.base = self.step - request.made - first
            self.running.add(request)
            self.used_tokens += request.prompt_tokens + request.made + first
            self.counters.generated_tokens += first
            heapq.heappush(self._finishes, (request.base + request.tokens, request.serial, request))
        self._push_out()
        counters = self.counters
        counters.prefilled_tokens += tokens
        counters.peak_running = max(counters.peak_running, len(self.running))
        counters.peak_used_tokens = max(counters.peak_used_tokens, self.used_tokens)

    def _push_out(self) -> None:
        """Cached tokens make room for those in use."""
        over = self.used_tokens + sum(self._cached.values()) - self.config.kv_tokens if self._cached else 0
        while over > 0 and self._cached:
            over -= self._cached.pop(next(iter(self._cached)))

    # leaving the batch

    def _retract(self) -> None:
        """Takes requests out until the next step fits. The pool always holds one: its allowance was clipped to it."""
        self.counters.pool_full += 1
        by_age = self.config.retraction == "newest"
        order = sorted(self.running, key=lambda r: -r.serial if by_age else (self.made(r), -r.prompt_tokens))
        for victim in order:
            if self.used_tokens + len(self.running) <= self.config.kv_tokens or len(self.running) == 1:
                break
            self._stop_running(victim)
            victim.num_retractions += 1
            self.counters.retractions += 1
            self._enqueue(victim)  # a full queue refuses it like a newcomer, half made as it is
        self._admission_step = self.step + ADMISSION_STEPS  # or the victim would come straight back
        made = sum(self.made(r) for r in self.running) + RETRACT_STEPS * len(self.running)
        allowed = sum(r.max_new_tokens for r in self.running) + 1
        self.new_token_ratio = max(self.new_token_ratio, min(1.0, made / allowed))

    def _finish_due(self) -> None:
        while self._next_finish() <= self.step:
            _, _, request = heapq.heappop(self._finishes)
            self._stop_running(request)
            self._end(request, "done", self.clock)

    def _next_finish(self) -> int:
        """Step of the next finish, stale entries (retracted, aborted) dropped."""
        heap = self._finishes
        while heap and heap[0][2].serial != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][0] if heap else NEVER

    def _stop_running(self, request: Request) -> None:
        request.made = self.made(request)
        request.serial = 0
        self.running.discard(request)
        self.used_tokens -= request.prompt_tokens + request.made

    def _end(self, request: Request, outcome: Outcome, now: float) -> None:
        request.outcome, request.finished = outcome, now
        self._admission_step = self.step  # there is room again
        if outcome == "done":
            self.counters.completed += 1
            if self.config.prefix_cache:
                self._cached[request.rid] = request.prompt_tokens + request.made
        else:
            self.counters.aborted += 1
        self._over.append(request)

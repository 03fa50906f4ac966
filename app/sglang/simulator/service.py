"""One simulated scheduler in real time: asks go in, jobs come out when the engine says so. Knows nothing of HTTP.

Invariant: every ask ends in exactly one of four ways: answered, refused (full queue), aborted, or lost in a crash (its
future is then never set, as a dead server never answers).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from random import Random
from typing import Any

from app.sglang.simulator.config import SimulatorConfig
from app.sglang.simulator.engine import Counters, Engine, EngineConfig, Request
from app.sglang.simulator.faults import Faults
from app.sglang.simulator.model import Job, Model
from app.sglang.simulator.requests import Ask
from app.sglang.simulator.tokens import prompt_hash


class Service:
    """Engine, model, faults and statistics of one server. Lives in one event loop."""

    def __init__(self, config: SimulatorConfig, on_crash: Callable[[], None]) -> None:
        self.config, self.faults = config, config.faults
        self.model = Model(config, config.model_path, config.weight_version)
        self.requests: dict[str, Request] = {}  #: those not over, by rid
        self.frozen = self.loading = self.draining = False
        self.counts: Counter[str] = Counter()
        self.fault_counts: Counter[str] = Counter()
        self.rids: Counter[str] = Counter()
        self.prompts: dict[str, dict[str, int]] = {}
        self._ended: dict[str, str] = {}  # prompt → rid of the last completion of it, with a prefix cache
        self._past = Counters()  # of the engines that crashed
        self._answered = 0  # since it came up
        self._random = Random(config.seed)
        self._on_crash = on_crash
        self.running = asyncio.Event()  #: not paused; new requests wait for it
        self.running.set()
        self._paused_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._origin, self._wall_origin = self._loop.time(), time.time()
        self._timer: asyncio.Handle | None = None
        self.engine = self._new_engine()

    # asking

    def submit(self, ask: Ask) -> Request:
        """Starts one completion; its job's future is set when it is over. An unknown id or a poisoned prompt: crash."""
        self.counts["requests"] += 1
        self.rids[ask.rid] += 1
        job, request = self.model.start(ask)
        job.future = self._loop.create_future()
        self._count_prompt(request, requests=1)
        if job.already_made:
            request.after = self._ended.pop(_prompt_of(job), "")
        if not self.model.knows(ask.ids):
            self.crash("unknown id")
        elif self._poisoned(ask.ids):
            self.crash("poison")
        if self.frozen:
            return request
        self.requests[ask.rid] = request
        if self.config.instant:
            self.engine.complete(self.now(), request)
        else:
            self.engine.submit(self.now(), request)
        self.wake()
        return request

    def abort(self, prefix: str) -> None:
        """Ends every request whose rid begins so ("" = all)."""
        self.engine.abort(self.now(), prefix)
        self.wake()

    def abandon(self, request: Request) -> None:
        """The client has gone: the request ends a while later, and with it all whose rid begins with its rid."""

        def give_up() -> None:
            if self.requests.get(request.rid) is request:
                self.abort(request.rid)

        if self.requests.get(request.rid) is request:
            self.counts["disconnects"] += 1
            self._loop.call_later(self.config.disconnect_seconds, give_up)

    @property
    def paused(self) -> bool:
        """Whether somebody paused it."""
        return not self.running.is_set()

    def pause(self, *, abort: bool) -> None:
        """Nothing is generated until `resume`. abort: what runs or waits ends now."""
        if abort:
            self.abort("")
            self._play()
        if not self.paused:
            self._paused_at = self._loop.time()
            self.running.clear()
            self.close()

    def resume(self) -> None:
        """Goes on as if no time had passed."""
        if self.paused:
            away = self._loop.time() - self._paused_at
            self._origin, self._wall_origin = self._origin + away, self._wall_origin + away
            self.running.set()
            self.wake()

    def draw_fault(self) -> str:
        """The fault of the next answer, counted."""
        name = self.faults.draw(self._random)
        if name:
            self.fault_counts[name] += 1
            if self.faults.answer_faults_left > 0:
                self.set_faults({"answer_faults_left": self.faults.answer_faults_left - 1})
        return name

    # time

    def now(self) -> float:
        """Engine time: seconds since the start, times `speed`."""
        return ((self._paused_at if self.paused else self._loop.time()) - self._origin) * self.config.speed

    def wall(self, engine_time: float) -> float:
        """Unix time of an engine time."""
        return self._wall_origin + engine_time / self.config.speed

    @property
    def engine_now(self) -> Engine:
        """The engine as it is now, for figures: between two events it decodes. Who is over is handed out by `_play`."""
        self.engine.advance_clock(self.now())
        return self.engine

    def wake(self, at: float | None = None) -> None:
        """Looks at the engine at that engine time, None = now, and not at the time planned before."""
        self.close()
        if at is None:
            self._timer = self._loop.call_soon(self._play)
        else:
            self._timer = self._loop.call_at(self._origin + at / self.config.speed, self._play)

    def _play(self) -> None:
        """Plays the engine up to now, hands out what is over, and sleeps until the next event."""
        self._timer = None
        for request in self.engine.advance(self.now()):
            self._deliver(request)
            if self._must_crash():
                return self.crash("on demand")
        if self._must_crash():
            return self.crash("on demand")
        event = self.engine.next_event()
        if event is not None and not self.paused:
            self.wake(event)
        return None

    def _deliver(self, request: Request) -> None:
        self.requests.pop(request.rid, None)
        if request.outcome == "done":
            self._answered += 1
            self._count_prompt(request, completed=1, tokens=request.made)
            if self.config.prefix_cache:
                self._ended[_prompt_of(request.payload)] = request.rid
        else:
            self.counts[request.outcome] += 1
        future = request.payload.future
        if not future.done():  # the client may have left
            future.set_result(request)

    # crashing

    def _must_crash(self) -> bool:
        faults = self.faults
        return faults.crashes_left != 0 and (
            faults.crash_now
            or 0 < faults.crash_after_completions <= self._answered
            or 0 < faults.crash_above_running < len(self.engine.running)
            or (faults.crash_on_kv_full and self.engine.counters.pool_full > 0)
        )

    def _poisoned(self, ids: list[int]) -> bool:
        token = self.faults.crash_on_token
        return token >= 0 and self.faults.crashes_left != 0 and token in ids

    def crash(self, cause: str) -> None:
        """All that was in flight is lost; the server goes silent, closes and perhaps comes back (see `Simulator`)."""
        if self.frozen:
            return
        self.frozen = True
        self.counts["crashes"] += 1
        self.counts["lost"] += len(self.requests)
        self.fault_counts[f"crash: {cause}"] += 1
        self.close()
        changes: dict[str, Any] = {"crash_now": False}
        if self.faults.crashes_left > 0:
            changes["crashes_left"] = self.faults.crashes_left - 1
        self.faults = self.faults.updated(changes)
        self._past = self._past.merged(self.engine.counters)
        self.requests.clear()
        self._answered = 0
        self.engine = self._new_engine()
        self._on_crash()

    def restart(self) -> None:
        """A fresh process: perhaps with another model."""
        faults, self.frozen = self.faults, False
        name = faults.model_after_restart or self.model.name
        version = faults.weight_version_after_restart or self.model.weight_version
        self.model = Model(self.config, name, version)
        self.counts["restarts"] += 1

    def close(self) -> None:
        """Plays no more, until woken."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def set_faults(self, changes: dict[str, Any]) -> Faults:
        """Replaces some faults. Raises ValueError for unknown ones."""
        self.faults = self.faults.updated(changes)
        if self.faults.swap_now:
            self.restart()
            self.faults = self.faults.updated({"swap_now": False})
        self.engine.slow = self.faults.slow
        self.wake()
        return self.faults

    def _new_engine(self) -> Engine:
        config = self.config
        engine = Engine(EngineConfig(
            kv_tokens=config.max_total_num_tokens, max_running=config.max_running_requests,
            max_queued=config.max_queued_requests, admission=config.admission,
            conservativeness=config.schedule_conservativeness, retraction=config.retraction_policy,
            step_seconds=config.step_seconds, step_seconds_per_request=config.step_seconds_per_request,
            step_seconds_per_token=config.step_seconds_per_token,
            prefill_seconds=config.prefill_seconds, prefill_tokens_per_second=config.prefill_tokens_per_second,
            prefix_cache=config.prefix_cache,
        ))  # fmt: skip
        engine.clock, engine.slow = self.now(), self.faults.slow
        return engine

    # counting

    def _count_prompt(self, request: Request, **more: int) -> None:
        """All stages of a completion together."""
        counts = self.prompts.setdefault(_prompt_of(request.payload), {"requests": 0, "completed": 0, "tokens": 0})
        for name, number in more.items():
            counts[name] += number

    def stats(self, detail: bool = True) -> dict[str, Any]:
        """Everything counted since the start, crashes included. detail: per rid and per prompt (`prompt_hash`) too."""
        engine = self.engine_now
        stats = {
            **dict.fromkeys(("requests", "refused_400", "queue_full", "aborted", "aborted_waiting", "abort_requests",
                             "disconnects", "crashes", "restarts", "lost"), 0),
            **self.counts, **asdict(self._past.merged(engine.counters)),
            "running": len(engine.running), "waiting": len(engine.waiting), "used_tokens": engine.used_tokens,
            "in_flight": len(self.requests), "max_total_num_tokens": self.config.max_total_num_tokens,
            "new_token_ratio": engine.new_token_ratio, "model": self.model.name,
            "weight_version": self.model.weight_version, "faults": dict(self.fault_counts),
        }  # fmt: skip
        if detail:
            stats |= {"rids": dict(self.rids), "prompts": {name: dict(one) for name, one in self.prompts.items()}}
        return stats


def _prompt_of(job: Job) -> str:
    """Name of the prompt without what the model had made of it."""
    return prompt_hash(job.ask.ids[: len(job.ask.ids) - job.already_made])

"""The story of one task: claim → lease → generate → publish. Everything else in this folder serves it.

Whatever happens, a key ends in one of four ways: published (a response or a rejection; of a chat, a turn made), handed
back (claim released, message returned to the queue), left to whoever has it already, or left in Redis because the run
is halted.
"""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import orjson

from app.crash import crash_point
from app.identity import task_key
from app.manifest import RunManifest
from app.packing import compress, pack_task, unpack_task
from app.reasons import STAGE_OF
from app.records import Made, RejectedRecord, ResponseRecord, Task, line_of
from app.sglang.client import new_rid
from app.sglang.faults import Fault, FaultKind
from app.sglang.wire import EndpointInfo, Generation
from app.store.keys import DEATHS, EndpointKeys, RunKeys
from workers.admission import Past
from workers.context import WorkerContext
from workers.holdings import HOLD_TTL_MS, Claim, Lease, Work
from workers.retries import Again, Halt, Reject, decide, decide_refusal
from workers.stages import Ask, ask_of, is_over, made_of, text_ids, whole
from workers.suspects import INNOCENT, Suspicion, implicate, name_of, parse_suspicion

log = logging.getLogger(__name__)
#: A message whose run Redis does not know waits this long before it goes back: it would come again at once.
UNKNOWN_RUN_SECONDS = 2.0


class HandBack(Exception):
    """The message returns to the queue: its work was not done."""


async def generate(context: WorkerContext, run_id: str, dataset: str, key: str) -> str:
    """Do what a delivery asks for; returns a word about how it ended. Raises HandBack or CancelledError to requeue."""
    if context.draining:
        raise HandBack
    crash_point("message_taken")
    keys = RunKeys(run_id)
    claim = Claim(run_id, dataset, key, f"{context.settings.name}/{uuid.uuid4().hex[:12]}")
    verdict, *rest = await context.courier.script(
        "claim", [keys.payload(dataset), keys.claims(dataset), keys.holders(dataset), keys.halt, DEATHS],
        [key, claim.holder, HOLD_TTL_MS, name_of(run_id, key)],
    )  # fmt: skip
    if verdict != b"claimed":
        return verdict.decode()
    crash_point("key_claimed")
    work = context.holdings.claims[claim] = Work(asyncio.current_task())
    try:
        run = await context.run(run_id)
        if run is None:  # a Redis that forgot it: the producer tells it again
            await asyncio.sleep(UNKNOWN_RUN_SECONDS)
            raise HandBack
        task = unpack_task(rest[0])
        work.id = task.id
        story = _Story(context, run, keys, claim, work, task, Past())
        story.past.suspicion = parse_suspicion(rest[1])
        return await story.tell()
    except BaseException:
        if work.lease is not None:  # at whatever step it ended, also with the answer in hand
            context.admission.release(work.lease)
        await asyncio.shield(_hand_back(context, keys, claim))
        raise
    finally:
        context.holdings.claims.pop(claim, None)


async def _hand_back(context: WorkerContext, keys: RunKeys, claim: Claim) -> None:
    context.holdings.claims.pop(claim, None)
    await context.courier.script(
        "release_claim", [keys.claims(claim.dataset), keys.holders(claim.dataset)], [claim.key, claim.holder]
    )


@dataclass(slots=True)
class _Story:
    """A claimed key on its way to being published."""

    context: WorkerContext
    run: RunManifest
    keys: RunKeys
    claim: Claim
    work: Work
    task: Task
    past: Past

    async def tell(self) -> str:
        """Attempt until the completion is there, the row is given up, or the run is halted."""
        attempts = 0
        while True:
            ask = ask_of(self.run, self.task)
            lease = await self.context.admission.lease(self.run, self.task, ask, self.past)
            crash_point("lease_granted")
            attempts += 1
            self.work.lease, self.work.rid, self.work.recalled = lease, new_rid(), False
            started_at, started = datetime.now(UTC), time.monotonic()
            sent = asyncio.ensure_future(self.context.courier.command("HINCRBY", self.keys.sent, self.task.key, 1))
            try:
                generation, info = await self._request(lease, ask)
            except Fault as fault:
                decision = await self._after(fault, lease, attempts, started)
            else:
                crash_point("request_answered")
                self.context.endpoints.served(lease.url)
                await self.context.refusals.served(self.run.run_id, lease.endpoint)
                seconds = time.monotonic() - started
                self.context.observer.answered(lease, generation, seconds)
                made = made_of(self.task, generation, started_at.isoformat(timespec="milliseconds"), seconds)
                over = self._is_over(ask, generation, made)
                requests = int(await sent)
                if not over:
                    if not await self._stage_made(made):
                        return "made by another"
                    attempts = 0
                    continue
                answer = whole(self.task, ask, generation, made)
                if ids := text_ids(made, generation, answer, self.run.sampling):
                    answer = replace(answer, text=await self._text_of(lease.url, ids) or answer.text)
                record = self._record(answer, made, info, requests)
                if self.task.chat:
                    return await self._turn_made(record)
                return await self._publish("response", line_of(record))
            if isinstance(decision, Reject):
                return await self._publish("rejected", line_of(self._rejection(decision, int(await sent))))
            if isinstance(decision, Halt):
                return await self._halt(decision)
            self.past.last = lease.url
            await asyncio.sleep(decision.after_seconds)
            self.run = await self.context.run(self.run.run_id) or self.run

    async def _request(self, lease: Lease, ask: Ask) -> tuple[Generation, EndpointInfo]:
        info = await self.context.endpoints.known(lease.url, self.run.run_id)
        sent_at = time.monotonic()
        generation = await self.work.request(self.context.client.generate(
            lease.url,
            ask.input_ids,
            {**self.run.sampling, "max_new_tokens": ask.max_new_tokens},
            rid=self.work.rid,
            deadline_seconds=self.run.request_timeout_seconds,
            vocab_size=self.run.output_vocab_size,
            limits=info,
            parameters_proven=True,  # every endpoint answered a canary with them before it was used
        ))  # fmt: skip
        told = generation.meta_info.get("weight_version")
        if told is not None and info.weight_version is not None and told != info.weight_version:
            raise Fault(FaultKind.MIXED_WEIGHTS, f"{lease.url} answers with weights {told}, not {info.weight_version}")
        await self.context.endpoints.confirm(lease.url, sent_at, self.run)
        return generation, info

    async def _text_of(self, url: str, ids: list[int]) -> str | None:
        try:
            skip = self.run.sampling.get("skip_special_tokens", True)
            return await self.context.client.detokenize(url, ids, skip_special_tokens=skip)
        except Fault as fault:
            log.warning("text_of_stages_joined: %s", fault)
            return None  # the ids are right, and the text is for people

    def _is_over(self, ask: Ask, stage: Generation, made: Made) -> bool:
        """Whether the answer is whole; how long it and its stages got is learned from."""
        known = self.context.stop_ids[self.run.run_id]
        if stage.matched.isdecimal():
            known.add(int(stage.matched))  # a server may know more of them than our tokenizer's folder
        over = is_over(ask, stage, known.union(self.run.stop_ids))
        cut = not over or stage.finish_reason == "length"
        if ask.goes_on:
            self.context.observer.ended(ask.stage_kind, stage.num_output_tokens, cut=cut)
        if over:
            self.context.observer.ended(ask.kind, len(made.output_ids), cut=cut)
        return over

    async def _stage_made(self, made: Made) -> bool:
        """Keep what was made; False if the key is somebody else's by now."""
        lease, dataset, keys = self.work.lease, self.claim.dataset, self.keys
        endpoint = EndpointKeys(lease.endpoint)
        self.task, self.past.last, self.work.lease = replace(self.task, made=made), None, None
        self.context.admission.released_by_publish(lease)
        kept = await self._safe(
            "staged",
            [keys.payload(dataset), keys.claims(dataset), keys.holders(dataset), keys.published(dataset),
             endpoint.leases, endpoint.lease_info],
            [self.task.key, self.claim.holder, pack_task(self.task), lease.id],
        )  # fmt: skip
        crash_point("stage_kept")
        return bool(kept)

    def _let_go(self) -> None:
        if self.work.lease is not None:
            self.context.admission.release(self.work.lease)
            self.work.lease = None

    async def _after(self, fault: Fault, lease: Lease, attempts: int, started: float) -> Again | Reject | Halt:
        if fault.kind is FaultKind.QUEUE_FULL:
            self.context.observer.refused(lease)
        try:
            if fault.kind is FaultKind.ABORTED and self.work.recalled:
                return Again(0.0, charged=False)
            if not fault.reached:
                self._let_go()  # it was not there; the others keep their leases: at a death they tell who was
            serves_others = await self.context.endpoints.after_fault(lease.url, fault, started)
            death = await self._death(lease)
        finally:
            self._let_go()
        if fault.kind in (FaultKind.REFUSED, FaultKind.TOO_LONG):
            return await self._after_refusal(fault, lease, started)
        charges = int(await self.context.courier.command("HGET", self.keys.charges, self.task.key) or 0)
        decision = decide(fault, charges, attempts, serves_others, death)
        log.info("attempt_failed %s at %s: %s → %s", self.task.id, lease.url, fault, decision)
        if isinstance(decision, Again) and decision.charged:
            await self.context.courier.command("HINCRBY", self.keys.charges, self.task.key, 1)
        return decision

    async def _death(self, lease: Lease) -> Suspicion:
        """What is known of this task, if the endpoint died while its request was there; else nothing."""
        before = self.past.suspicion
        known = await implicate(self.context.courier, lease.endpoint, self.run.run_id, self.task.key)
        self.past.suspicion = known
        return known if known != before else INNOCENT

    async def _after_refusal(self, fault: Fault, lease: Lease, started: float) -> Again | Reject | Halt:
        again, seconds = lease.url in self.past.refused_by, time.monotonic() - started
        refusals = await self.context.refusals.refused(self.run.run_id, lease.endpoint, seconds, again=again)
        self.past.refused_by.add(lease.url)
        may = self.run.endpoints_for(len(self.task.prompt_token_ids), self.task.max_new_tokens) or self.run.endpoints
        left = not self.past.refused_by.issuperset(may)
        return decide_refusal(fault, refusals, again=again, others_left=left)

    async def _publish(self, kind: str, line: bytes) -> str:
        """One call ends claim and lease in Redis."""
        lease = self._forget()
        endpoint = EndpointKeys(lease.endpoint if lease else "none")
        dataset = self.claim.dataset
        entered = await self._safe(
            "publish",
            [self.keys.responses, self.keys.payload(dataset), self.keys.claims(dataset), self.keys.holders(dataset),
             self.keys.published(dataset), endpoint.leases, endpoint.lease_info, DEATHS],
            [self.task.key, dataset, kind, compress(line), lease.id if lease else "",
             name_of(self.run.run_id, self.task.key)],
        )  # fmt: skip
        crash_point("response_published")
        return kind if entered else "published before"

    async def _turn_made(self, record: ResponseRecord) -> str:
        """Of a chat: what comes next is the producer's to say. What was made is safe, and not made again."""
        lease, dataset, keys = self._forget(), self.claim.dataset, self.keys
        endpoint = EndpointKeys(lease.endpoint)
        made = replace(self.task, prompt_token_ids=[], made=None, chat=self.task.chat + line_of(record))
        kept = await self._safe(
            "turned",
            [keys.turned(dataset), keys.payload(dataset), keys.claims(dataset), keys.holders(dataset),
             keys.published(dataset), keys.sent, keys.charges, endpoint.leases, endpoint.lease_info, DEATHS],
            [self.task.key, self.claim.holder, pack_task(made), lease.id, name_of(self.run.run_id, self.task.key)],
        )  # fmt: skip
        crash_point("turn_made")
        return "turn" if kept else "made by another"

    async def _safe(self, name: str, keys: list[str], args: list) -> object:
        """Run a script that ends a lease already forgotten here: whoever is cancelled meanwhile, it reaches Redis."""
        return await asyncio.shield(self.context.courier.script(name, keys, args))

    def _forget(self) -> Lease | None:
        """Claim and lease are forgotten here before Redis ends them, or a heartbeat could revive them."""
        lease, self.work.lease = self.work.lease, None
        self.context.holdings.claims.pop(self.claim, None)
        if lease is not None:
            self.context.admission.released_by_publish(lease)
        return lease

    async def _halt(self, decision: Halt) -> str:
        """A fault of ours would reject every row: say so once, for everybody, and give the key back."""
        state = orjson.dumps({"exit_code": decision.exit_code, "message": decision.message})
        await self.context.courier.command("SET", self.keys.halt, state, "NX")
        await _hand_back(self.context, self.keys, self.claim)
        return "halted"

    @property
    def _line_key(self) -> str:
        """The key of this turn's line; the task's own is that of turn 0."""
        task = self.task
        if task.turn == 0:
            return task.key
        return task_key(self.run.recipe, task.dataset, task.row_id, task.turn, task.completion_index)

    def _record(self, generation: Generation, made: Made, info: EndpointInfo, sent: int) -> ResponseRecord:
        task = self.task
        return ResponseRecord(
            key=self._line_key, id=task.id, primary_id=f"{task.dataset}:{task.row_id}", dataset=task.dataset,
            row_id=task.row_id, source_id=task.source_id, row_number=task.row_number, turn=task.turn,
            turns=task.turns, completion_index=task.completion_index, prompt_token_ids=task.prompt_token_ids,
            output_ids=generation.output_ids, text=generation.text, finish_reason=generation.finish_reason,
            matched=generation.matched, num_prompt_tokens=len(task.prompt_token_ids),
            num_output_tokens=len(generation.output_ids), max_new_tokens=task.max_new_tokens,
            recipe=self.run.recipe, model=info.model or "", endpoint=info.url,
            server=info.fingerprint, attempt=max(1, sent - made.stages + 1), stages=made.stages,
            started_at=made.started_at, latency_seconds=round(made.latency_seconds, 4),
            meta_info=orjson.dumps(generation.meta_info).decode(),
        )  # fmt: skip

    def _rejection(self, decision: Reject, sent: int) -> RejectedRecord:
        task = self.task
        where = f"turn {task.turn + 1} of {task.turns}: " if task.turns > 1 else ""
        return RejectedRecord(
            key=self._line_key, id=task.id, primary_id=f"{task.dataset}:{task.row_id}", dataset=task.dataset,
            row_id=task.row_id, source_id=task.source_id, row_number=task.row_number,
            stage=STAGE_OF[decision.reason], reason=decision.reason, detail=where + decision.detail,
            attempts=max(1, sent), at=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip

"""The answer to one completion, and the ways in which it can be spoilt on demand.

Invariant: an unspoilt answer is honest (ids, counts and finish_reason agree); a spoilt one is wrong in one way only.
"""

from collections.abc import Callable
from typing import Any

from app.sglang.simulator import bodies
from app.sglang.simulator.engine import Request
from app.sglang.simulator.model import Job
from app.sglang.simulator.service import Service

Answer = dict[str, Any]


def answer(service: Service, request: Request) -> Answer:
    """The body of one finished (or still running) completion."""
    job: Job = request.payload
    over = request.outcome == "done"
    made = request.made if request.outcome else service.engine.made(request)
    if request.outcome in ("aborted_waiting", "queue_full"):
        made = 0
    ids = service.model.output_ids(job, made, over)
    stopped = over and job.reaches_stop(made)
    reason = bodies.finish_reason(request, ids[-1] if stopped else None)
    info = bodies.meta_info(
        request, reason, made, service.model.weight_version, service.wall, service.config.enable_metrics
    )
    body: Answer = {} if service.config.skip_tokenizer_init else {"text": service.model.text(ids, stopped)}
    body |= {"output_ids": ids, "meta_info": info}
    if job.ask.return_prompt_token_ids:
        body["prompt_token_ids"] = job.ask.ids
    return body


def _abort(body: Answer, job: Job, vocab_size: int) -> Answer:
    half = body["output_ids"][: len(body["output_ids"]) // 2]
    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return _with(body, output_ids=half, finish_reason=reason, completion_tokens=len(half))


def _bad_ids(body: Answer, job: Job, vocab_size: int) -> Answer:
    return _with(body, output_ids=[vocab_size + 7, *body["output_ids"][1:]])


def _no_output_ids(body: Answer, job: Job, vocab_size: int) -> Answer:
    return {name: value for name, value in body.items() if name != "output_ids"}


def _prefixed(body: Answer, job: Job, vocab_size: int) -> Answer:
    return _with(body, output_ids=[*job.ask.ids[-5:], *body["output_ids"]])


def _nan(body: Answer, job: Job, vocab_size: int) -> Answer:
    return _with(body, finish_reason={"type": "stop", "matched": "NaN happened"})


#: answer fault -> what it makes of a good body; those not in here are the server's business
SPOILERS: dict[str, Callable[[Answer, Job, int], Any]] = {
    "abort": _abort,
    "wrong_prompt_tokens": lambda body, job, _: _with(body, prompt_tokens=len(job.ask.ids) - 1),
    "wrong_completion_tokens": lambda body, job, _: _with(body, completion_tokens=len(body["output_ids"]) + 1),
    "no_output_ids": _no_output_ids,
    "prefixed_output_ids": _prefixed,
    "no_finish_reason": lambda body, job, _: _with(body, finish_reason=None),
    "nan": _nan,
    "bad_ids": _bad_ids,
    "error_object": lambda body, job, _: {"error": {"message": "Something went wrong."}},
    "list_body": lambda body, job, _: [body],
}


def _with(body: Answer, output_ids: list[int] | None = None, **info: Any) -> Answer:
    changed = {**body, "meta_info": {**body["meta_info"], **info}}
    if output_ids is not None:
        changed["output_ids"] = output_ids
    return changed

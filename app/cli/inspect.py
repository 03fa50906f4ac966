"""The commands that look: status and verify; and `simulate`, which serves."""

import contextlib
import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.capacity.plan import Busy, scheduling_advice
from app.capacity.stages import Job, Suggestion, suggest
from app.cli.talk import show
from app.errors import OK, StorageError, UsageError, VerificationFailed
from app.lock import holder
from app.rundir import RunDir

if TYPE_CHECKING:
    from app.sglang.wire import EndpointInfo, Loads

#: So many of a run's lengths stand for all.
_MOST_LENGTHS = 10_000


def existing_run(out: Path):
    """The run in a directory. Raises UsageError if there is none."""
    from app.manifest import read_run_file
    from app.offline.switch import finish_switch

    rundir = RunDir(out.absolute())
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; give the directory of a run.")
    if not out.exists():
        raise UsageError(f"No such directory: {out}.")
    with contextlib.suppress(UsageError):  # whoever is at it finishes it
        finish_switch(rundir)
    run_file = read_run_file(rundir.run_json)
    if run_file is None:
        meant = f"; did you mean {out.parent}?" if (out.parent / "run.json").exists() else "."
        raise UsageError(f"{out} holds no run (no run.json in it){meant}")
    return rundir, run_file


@dataclass(slots=True)
class Answers:
    """The answers of a run."""

    count: int = 0
    prompt_tokens: float = 0.0  #: mean
    output_tokens: float = 0.0  #: mean
    lengths: list[int] = field(default_factory=list)  #: of some of them, spread over all
    sampling: dict[str, Any] = field(default_factory=dict)


def answers_of(out: Path) -> Answers:
    """What a run's files say of their lengths. Raises UsageError if there are none."""
    from app.offline.redo import responses

    rundir, run_file = existing_run(out)
    found, every = Answers(sampling=run_file.recipe.sampling), 1
    for dataset in rundir.datasets_on_disk():
        for _, line in responses(rundir, dataset):
            found.prompt_tokens += line["num_prompt_tokens"]
            found.output_tokens += line["num_output_tokens"]
            if found.count % every == 0:
                found.lengths.append(line["num_output_tokens"])
            if len(found.lengths) == _MOST_LENGTHS:
                found.lengths, every = found.lengths[::2], every * 2
            found.count += 1
    if not found.count:
        raise UsageError(f"{out}: no answers there yet.")
    found.prompt_tokens /= found.count
    found.output_tokens /= found.count
    return found


def stages_for(kv_tokens: int, answers: Answers, conservativeness: float | None) -> Suggestion | None:
    """The stage that pays for answers like these; None where none does, or their parameters forbid it."""
    from app.sglang.sampling import looks_back

    if looks_back(answers.sampling):
        return None
    allowance = int(answers.sampling["max_new_tokens"])
    return suggest(Job(kv_tokens, answers.prompt_tokens, allowance, answers.lengths, conservativeness or 1.0))


def load_advice(
    info: "EndpointInfo", loads: "Loads", conservativeness: float | None, answers: Answers | None
) -> str | None:
    """What to change at a busy server that tells its KV tokens, in a sentence; answers: of the job that it does."""
    busy = Busy(
        use=loads.used_tokens / info.kv_tokens, waiting=loads.waiting, retracted=loads.retracted or 0,
        conservativeness=conservativeness,
    )  # fmt: skip
    return scheduling_advice(busy, stages_for(info.kv_tokens, answers, conservativeness) if answers else None)


def redis_in(rundir: RunDir) -> str | None:
    """The Redis of the run in a directory: its private server's while that runs, else the one of its settings."""
    from app.settings import load_settings
    from app.store.embedded import noted_address

    if noted := noted_address(rundir.redis):
        return noted
    with contextlib.suppress(UsageError):  # settings that are lost: the files still say what is done
        return load_settings(rundir.private / "settings.json").redis
    return None


def redis_of(out: Path | None, redis_url: str | None) -> str:
    """The Redis that is meant by OUT or --redis. Raises UsageError if there is none."""
    if redis_url is not None:
        return redis_url
    if out is None:
        raise UsageError("Give OUT, the directory of a run that goes on, or --redis URL.")
    url = redis_in(existing_run(out)[0])
    if url is None:
        raise UsageError(f"No run goes on in {out}, and it knows no Redis; start it, or give --redis URL.")
    return url


def status_command(out: Path, redis_url: str | None, as_json: bool) -> int:
    """`headrace status OUT`."""
    from app.cli.watching import Near, troubles
    from app.inventory import render_table

    with contextlib.closing(Near(*existing_run(out), redis_url)) as sight:
        seen = sight.take()
    if as_json:
        show(json.dumps(seen.inventory, ensure_ascii=False))
    else:
        away = troubles(seen.endpoints)
        waiting = f"\nwaiting: {seen.waiting_for}\n" if seen.waiting_for and not away else ""
        show(render_table(seen.inventory) + waiting + away)
    return OK


def verify_command(out: Path, as_json: bool) -> int:
    """`headrace verify OUT`."""
    from app.verify import verify

    rundir, _ = existing_run(out)
    writer = holder(rundir.writer_lock)
    report = verify(rundir)
    show(json.dumps(report.to_json(), ensure_ascii=False) if as_json else report.render())
    if not report.ok:
        if writer is not None:
            raise VerificationFailed(
                f"{out} was read while {writer} could write to it: what came meanwhile may be what is listed above. "
                "Verify again when the run is complete or stopped."
            )
        raise VerificationFailed(f"{out} breaks a promise; the first places are listed above.")
    return OK


def simulate_command(host: str, port: int, config: str | None, faults: str | None) -> int:
    """`headrace simulate`: serves until it is told to stop; prints its URL when it listens."""
    from app.cli.limits import slots_within_limits
    from app.settings import json_option
    from app.sglang.simulator import Faults, SimulatorConfig, serve

    try:
        wanted = Faults().updated(json_option("--faults", faults))
        chosen, known = json_option("--config", config), SimulatorConfig.__dataclass_fields__
        if unknown := [name for name in chosen if name not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
            raise UsageError(f"--config has no field {unknown[0]!r}; {hint}")
        settings = SimulatorConfig(**chosen, faults=wanted)
    except (ValueError, TypeError) as exc:
        raise UsageError(f"--config or --faults: {exc}.") from exc
    slots_within_limits(10_000)
    try:
        serve(settings, port, host, on_ready=show)
    except OSError as exc:
        raise StorageError(f"Cannot listen on {host}:{port}: {exc.strerror}.") from exc
    return OK

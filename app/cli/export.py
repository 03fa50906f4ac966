"""`headrace export`: the samples as Parquet, or the chats with their answers, divided into train and eval."""

import json
import tempfile
from pathlib import Path

import click

from app.cli.inspect import existing_run
from app.cli.offline_renderer import renderer_of
from app.errors import OK, UsageError
from app.ledger import Ledger
from app.manifest import RunFile
from app.offline.export import Lines, Split, folder_as_a_whole, samples_in_order, write_note
from app.offline.switch import alone
from app.offline.torn import mend_run
from app.rundir import RunDir
from app.settings import load_settings

_SAMPLES_PER_SHARD = 10_000


def export_command(
    out: Path, kind: str, to: Path | None, split: Split, inputs: tuple[str, ...], tokenizer: str | None, as_json: bool
) -> int:
    """`headrace export OUT`."""
    rundir, run_file = existing_run(out)
    to = (to or rundir.out / "export" / kind).absolute()
    with alone(rundir, "exporting its samples"), folder_as_a_whole(to) as folder:
        mended = mend_run(rundir, run_file)
        if kind == "parquet":
            counts, left_out = _parquet(rundir, folder, split)
        else:
            counts, left_out = _conversations(rundir, run_file, folder, split, inputs, tokenizer)
        said = {
            "format": kind, "run": run_file.run_id, "recipe": run_file.recipe_fingerprint, "filters": run_file.filters,
            "eval_fraction": split.eval_fraction, "seed": split.seed, **counts,
            "rows_gone": left_out if kind == "conversations" else 0, "damaged": left_out if kind == "parquet" else 0,
            "chats_left_out": mended.set_aside + mended.to_derive,
        }  # fmt: skip
        write_note(folder, said)
    if as_json:
        click.echo(json.dumps({"to": str(to), **said}, ensure_ascii=False))
    else:
        click.echo(f"{to}: {counts['train']:,} train, {counts['eval']:,} eval")
    if str(mended):
        click.echo(str(mended), err=True)
    if left_out:
        rows = "the input no longer has their rows, or " if kind == "conversations" else ""
        click.echo(f"{left_out:,} left out: {rows}their lines are damaged (`headrace verify {out}` tells).", err=True)
    return OK


def _parquet(rundir: RunDir, folder: Path, split: Split) -> tuple[dict[str, int], int]:
    from app.offline.shards import Shards

    left_out = 0
    with Shards(folder, _SAMPLES_PER_SHARD) as shards:
        for dataset in rundir.datasets_on_disk():
            for sample in samples_in_order(rundir, dataset):
                if sample is None:
                    left_out += 1
                else:
                    shards.write(split.side_of(sample["primary_id"]), sample)
    return shards.counts, left_out


def _conversations(
    rundir: RunDir, run_file: RunFile, folder: Path, split: Split, inputs: tuple[str, ...], tokenizer: str | None
) -> tuple[dict[str, int], int]:
    from producers.conversations import conversations
    from producers.inputs import parse_inputs

    saved = rundir.private / "settings.json"
    if not saved.exists():
        raise UsageError(f"{saved} is not there: start the run's own command once, it says how rows are read.")
    settings = load_settings(saved)
    datasets = parse_inputs(inputs or [f"{file.dataset}={file.path}" for file in run_file.datasets])
    renderer = renderer_of(rundir, tokenizer)
    left_out = 0
    with tempfile.TemporaryDirectory(prefix="headrace-export-") as scratch, \
            Ledger.open(rundir, Path(scratch) / "ledger.sqlite") as ledger, \
            Lines(folder, "conversations.jsonl") as lines:  # fmt: skip
        for chat in conversations(rundir, datasets, settings, ledger, renderer):
            if chat is None:
                left_out += 1
            else:
                lines.write(split.side_of(chat["primary_id"]), chat)
    return lines.counts, left_out

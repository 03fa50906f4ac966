"""The commands that need no server: tokenize, retry, adopt, audit, export, report. Options and examples alone."""

from pathlib import Path
from typing import Any

import click

from app.cli.options import Data, Directory, json_flag, option, out_argument
from app.reasons import Reason


class _Explicit(click.Command):
    """A command that changes files by what stands on its line alone: no settings file, no environment."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> click.Context:
        """An empty map instead of the settings file."""
        return super().make_context(info_name, args, parent, **{"default_map": {}} | extra)


_keep_or_drop = click.Choice(["keep", "drop"])
_TOKENIZER = {"type": Data(), "metavar": "DIR|NAME", "help": "Tokenizer (default: the one of the run's settings)."}
_tokenizer = option("--tokenizer", **_TOKENIZER)


@click.command(cls=_Explicit)
@out_argument
@click.option("--truncated", type=_keep_or_drop, help="Answers cut at their allowance.")
@click.option("--max-sample-tokens", type=click.IntRange(0), help="Longer samples are rejected; 0: none is.")
@click.option("--unclosed-thinking", type=_keep_or_drop, help="Answers that end inside their reasoning.")
@click.option("--max-repeat", type=click.IntRange(0), metavar="N",
              help="Answers that end in a loop of more tokens are rejected; 0: none is.")
@click.option("--tokenizer", **_TOKENIZER)
@json_flag
def tokenize(out: Path, tokenizer: str | None, as_json: bool, **filters: Any) -> int:
    """Derive the samples again from raw_responses.jsonl, with other filters; filters not named stay as they are.

    Needs no server. Crash-safe: what is there before is the old state or the new one, never a mix.

    \b
    headrace tokenize out --truncated drop --unclosed-thinking drop
    headrace tokenize out --max-sample-tokens 16384 --max-repeat 512
    headrace tokenize out --max-sample-tokens 0
    """
    from app.cli.redo import tokenize_command

    given = {name: value or None for name, value in filters.items() if value is not None}
    return tokenize_command(out, given, tokenizer, as_json)


@click.command(cls=_Explicit)
@out_argument
@click.option("--reason", required=True, type=click.Choice([reason.value for reason in Reason]), metavar="REASON",
              help="As in rejected.jsonl; `truncated`: every answer cut at its allowance, kept or rejected.")
@click.option("--max-new-tokens", type=int, metavar="N", help="Allowance of these rows alone (default: as before).")
@json_flag
def retry(out: Path, reason: str, max_new_tokens: int | None, as_json: bool) -> int:
    """Make the rows rejected for a reason pending again; the run's own command then generates exactly those.

    Raw lines that are replaced move to superseded.jsonl.

    \b
    headrace retry out --reason truncated --max-new-tokens 16384
    headrace retry out --reason attempts_exhausted
    """
    from app.cli.redo import retry_command

    return retry_command(out, reason, max_new_tokens, as_json)


@click.command()
@out_argument
@click.argument("directory", type=Directory(), metavar="DIR")
@click.argument("inputs", nargs=-1, type=Data(), metavar="[NAME=]DATA...")
@option("--map", "fields", multiple=True, metavar="OURS=THEIRS",
              help="Where a field of ours stands in DIR's lines.")
@option("--model", default="", metavar="NAME", help="Model that made the answers, where the lines do not say.")
@option("--report", type=click.Path(path_type=Path),
              help="A line for each line of DIR (default: OUT/adopt_report.jsonl; none with --dry-run).")
@option("--dry-run", is_flag=True, help="The inventory of DIR and the verdict; nothing is changed.")
@_tokenizer
@option("--max-new-tokens", type=int)
@option("--temperature", type=float)
@option("--top-p", type=float)
@option("--top-k", type=int)
@option("--sampling", metavar="JSON")
@option("--samples", type=int)
@option("--system", metavar="TEXT")
@option("--chat-template", type=click.Path(path_type=Path))
@option("--template-kwargs", metavar="JSON")
@option("--trust-remote-code", is_flag=True, default=None)
@option("--prompt-field", metavar="FIELD")
@option("--messages-field", metavar="FIELD")
@option("--fit-output", is_flag=True, default=None)
@option("--vocab-size", type=int)
@option("--limit", type=int, metavar="N")
@json_flag
def adopt(out: Path, directory: Path, inputs: tuple[str, ...], fields: tuple[str, ...], model: str,
          report: Path | None, dry_run: bool, as_json: bool, **given: Any) -> int:  # fmt: skip
    """Take answers that another script saved in DIR into the run in OUT, if they can be proven.

    The prompts of the input are rendered again and compared id by id; counts, vocabulary, endings, texts and duplicates
    are checked. The next `headrace run` generates the rest. Options without help are those of `run`: give what the run
    has, or nothing where OUT is a run already. Exit 5: some lines are not trusted.

    \b
    headrace adopt out old/ B1=b1.jsonl B2=b2.parquet --tokenizer /models/teacher --dry-run
    headrace adopt out old/ B1=b1.jsonl --tokenizer /models/teacher --max-new-tokens 8192 \\
             --map output_ids=response.token_ids --map source_id=sample
    """
    from app.cli.adopt import Wanted, adopt_command

    return adopt_command(out, inputs, given, Wanted(directory, fields, model, report, dry_run, as_json))


@click.command()
@out_argument
@option("--tokenizer", type=Data(), metavar="DIR|NAME", help="Also decode: tool calls, and ids there and back.")
@option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="A picture: .png .svg .pdf .html.")
@json_flag
def audit(out: Path, tokenizer: str | None, plot: Path | None, as_json: bool) -> int:
    """Bias and quality of a run: lengths, endings, what is missing, repetitions, differences between servers.

    \b
    headrace audit out
    headrace audit out --tokenizer /models/teacher --plot out.png
    headrace audit out --json
    """
    from app.cli.audit import audit_command

    return audit_command(out, tokenizer, plot, as_json)


@click.command()
@out_argument
@click.argument("inputs", nargs=-1, type=Data(), metavar="[NAME=]DATA...")
@option("--format", "kind", required=True, type=click.Choice(["conversations", "parquet"]),
              help="Chats with their answers, or the tokenized samples.")
@option("--to", type=Directory(), metavar="DIR", help="Default: OUT/export/FORMAT.")
@option("--eval-fraction", type=click.FloatRange(0, 1), default=0.01, show_default=True,
              help="Share of rows that go to eval.")
@option("--seed", type=int, default=0, show_default=True, help="Another seed, another choice of these rows.")
@_tokenizer
@json_flag
def export(out: Path, inputs: tuple[str, ...], kind: str, to: Path | None, eval_fraction: float, seed: int,
           tokenizer: str | None, as_json: bool) -> int:  # fmt: skip
    """Write what has a sample as trainers like it, divided into train and eval by row.

    conversations reads the input again for its messages (DATA, where it has moved since).

    \b
    headrace export out --format parquet
    headrace export out --format conversations --to chats --eval-fraction 0.02 --seed 7
    """
    from app.cli.export import export_command
    from app.offline.export import Split

    return export_command(out, kind, to, Split(eval_fraction, seed), inputs, tokenizer, as_json)


@click.command()
@out_argument
@option("--to", type=click.Path(path_type=Path), metavar="FILE", help="Default: OUT/report.html.")
@option("--redis", metavar="URL", help="Redis of a run that goes on, where it is not the one of its settings.")
def report(out: Path, to: Path | None, redis: str | None) -> int:
    """A page about a run, one file without scripts: course, lengths, endpoints, losses, recipe, provenance.

    \b
    headrace report out
    headrace report out --to /tmp/kimi.html
    """
    from app.cli.report import report_command

    return report_command(out, to, redis)


COMMANDS = [tokenize, retry, adopt, audit, export, report]


def add_to(group: click.Group) -> None:
    """Put them into `headrace`."""
    for command in COMMANDS:
        group.add_command(command)

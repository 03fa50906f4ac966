"""The commands that advise before anything is sent: plan and doctor. Options and examples alone."""

from pathlib import Path
from typing import Any

import click

from app.cli.options import Data, Directory, Urls, api_key_option, json_flag, option, redis_option


@click.command()
@click.argument("inputs", nargs=-1, type=Data(), metavar="[[NAME=]DATA...]")
@option("--endpoint", "endpoints", multiple=True, type=Urls(), metavar="URL",
        help="Live SGLang servers to ask; repeatable.")
@option("--kv-tokens", type=click.IntRange(1), metavar="N",
        help="KV tokens of a server (SGLang's max_total_num_tokens).")
@option("--avg-tokens", type=click.IntRange(2), metavar="N", help="Tokens of a finished request, prompt and answer.")
@option("--avg-prompt-tokens", type=click.IntRange(1), metavar="N", help="Its prompt's part (default: a quarter).")
@option("--like", type=Directory(), metavar="OUT", help="Lengths as in the answers of this run.")
@option("--tokenizer", type=Data(), metavar="DIR|NAME", help="Tokenizer, to measure the prompts of DATA.")
@option("--trust-remote-code", is_flag=True, help="Run the tokenizer folder's own Python code.")
@option("--max-new-tokens", type=click.IntRange(1), help="Allowance of each answer (default: 4096).")
@option("--samples", type=click.IntRange(1), default=1, help="Completions a row.")
@option("--rows", type=click.IntRange(1), metavar="N", help="Completions to get, where there is no DATA to count.")
@option("--tokens-per-second", type=click.FloatRange(min=0, min_open=True), metavar="F",
        help="Output tokens per second of all endpoints together, for the time it takes.")
@option("--max-running-requests", type=click.IntRange(1), metavar="N", help="The server's own limit.")
@option("--launch", metavar="LINE", help="A launch line of sglang.launch_server, in quotes.")
@option("--mem-fraction", type=click.FloatRange(0.01, 1), metavar="F", help="Its --mem-fraction-static.")
@option("--try-mem-fraction", type=click.FloatRange(0.01, 1), metavar="F", help="What another one would give.")
@option("--kv-gib", type=click.FloatRange(min=0, min_open=True), metavar="GIB",
        help="KV pool of a GPU (the log's `KV size`).")
@option("--gpu-free-gib", type=click.FloatRange(min=0, min_open=True), metavar="GIB",
        help="Free memory of a GPU before loading (the log's `avail mem`).")
@option("--weights-gib", type=click.FloatRange(min=0), metavar="GIB", help="Weights on a GPU.")
@option("--graph-gib", type=click.FloatRange(min=0), metavar="GIB", help="Captured graphs on a GPU.")
@option("--hicache-size", type=click.FloatRange(min=0, min_open=True), metavar="GB",
        help="--hicache-size, GB of each rank.")
@option("--host-free-gb", type=click.FloatRange(min=0, min_open=True), metavar="GB", help="Free memory of the host.")
@option("--tp", type=click.IntRange(1), metavar="N", help="Ranks on the host (tensor parallel size).")
@api_key_option
@json_flag
def plan(**values: Any) -> int:
    """What fits an endpoint, how long a job takes, what a launch line risks; from live servers or from numbers.

    \b
    headrace plan --endpoint http://gpu1:30000 B1=data/glaive.jsonl --tokenizer /models/teacher
    headrace plan --kv-tokens 231120 --avg-tokens 4000 --rows 83000 --tokens-per-second 5000
    headrace plan --kv-tokens 116171 --kv-gib 14.8 --gpu-free-gib 183.05 --mem-fraction 0.85 --try-mem-fraction 0.93
    headrace plan --hicache-size 48 --tp 8 --host-free-gb 445
    """
    from app.cli.plan import plan_command

    return plan_command(values)


@click.command()
@option("--endpoint", "endpoints", multiple=True, type=Urls(), metavar="URL", help="SGLang servers to ask; repeatable.")
@option("--tokenizer", type=Data(), metavar="DIR|NAME", help="Tokenizer with its chat template.")
@option("--chat-template", type=click.Path(path_type=Path), help="Jinja file instead of the tokenizer's own.")
@option("--trust-remote-code", is_flag=True, help="Run the tokenizer folder's own Python code.")
@option("--out", type=Directory(), help="Directory of the run, there already or not.")
@option("--rows", type=click.IntRange(1), metavar="N", help="Completions to come, to estimate the disk they need.")
@option("--avg-tokens", type=click.IntRange(1), default=4096, show_default=True, metavar="N",
        help="Tokens of each, prompt and answer.")
@redis_option
@api_key_option
@json_flag
def doctor(**values: Any) -> int:
    """Look at every layer that a run stands on: one line each, in order or with its remedy. Changes nothing.

    \b
    headrace doctor
    headrace doctor --endpoint http://gpu1:30000 --tokenizer /models/teacher --out runs/kimi --rows 83000
    headrace doctor --redis redis://box:6379/0 --json
    """
    from app.cli.doctor import doctor_command

    return doctor_command(values)


def add_to(group: click.Group) -> None:
    """Make them commands of `headrace`."""
    group.add_command(plan)
    group.add_command(doctor)

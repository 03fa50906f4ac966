"""The options of `run` and `enqueue`: everything a user can say about a run."""

from pathlib import Path

import click

from app.cli.options import Data, Directory, NumberOrOff, Urls, api_key_option, option, options, redis_option

run_options = options(
    click.argument("inputs", nargs=-1, required=True, type=Data(), metavar="[NAME=]DATA..."),
    option("--endpoint", "endpoints", multiple=True, required=True, type=Urls(), metavar="URL",
           help="SGLang base URL; repeatable (in HEADRACE_ENDPOINT apart by spaces or commas)."),
    option("--tokenizer", required=True, type=Data(), metavar="DIR|NAME", help="Tokenizer with its chat template."),
    option("--out", required=True, type=Directory(),
           help="Directory of this run; what is there is resumed."),
    option("--max-new-tokens", type=int, default=4096, show_default=True, help="Allowance of each answer, in tokens."),
    option("--temperature", type=float, default=1.0, show_default=True),
    option("--top-p", type=float, default=1.0, show_default=True),
    option("--top-k", type=int, default=-1, show_default=True, help="-1: all."),
    option("--sampling", metavar="JSON", help="More of SGLang's sampling parameters, as an object."),
    option("--samples", type=int, default=1, show_default=True, help="Completions a row; may be raised later."),
    option("--turns", type=click.Choice(["last", "all"]), default="last", show_default=True,
           help="last: history as given, one generation. all: every answer of the row, each on those before it."),
    option("--prefill", is_flag=True, help="Continue an answer that a row ends in, instead of making it again."),
    option("--system", metavar="TEXT", help="System message for rows that have none."),
    option("--chat-template", type=click.Path(path_type=Path), help="Jinja file instead of the tokenizer's own."),
    option("--template-kwargs", metavar="JSON", help="Arguments for the chat template, as an object."),
    option("--trust-remote-code", is_flag=True, help="Run the tokenizer folder's own Python code."),
    option("--prompt-field", metavar="FIELD", help="Field (a.b.c) that holds the prompt, where a file is unusual."),
    option("--messages-field", metavar="FIELD", help="Field that holds the messages, where a file is unusual."),
    option("--fit-output", is_flag=True, help="Clip the allowance of prompts too long for it, instead of rejecting."),
    option("--skip-parity", is_flag=True, help="Start even if the server's chat template gives other prompt ids."),
    option("--vocab-size", type=int, help="The model's vocabulary, where tokenizer and endpoint do not tell."),
    option("--limit", type=int, metavar="N", help="Only the first N rows of each dataset."),
    redis_option,
    option("--concurrency", type=int, default=-1, help="Ceiling of requests per endpoint, over all workers."),
    option("--short-concurrency", type=int, default=-1, help="The same for the short lane alone."),
    option("--long-concurrency", type=int, default=-1, help="The same for the long lane alone."),
    option("--requests-per-minute", type=int, default=-1,
           help="Limit per endpoint, over all workers, for servers that have one."),
    option("--require", multiple=True, metavar="FIELD=VALUE",
           help="Use only servers that say so of themselves, as kv_cache_dtype=auto; repeatable."),
    option("--allow-drift", multiple=True, metavar="FIELD",
           help="Use servers that differ in this from the run's first one, as weight_version; repeatable."),
    option("--stage-tokens", type=NumberOrOff(), metavar="N|off",
           help="Ask for answers in stages of N tokens (default off), so that a server with a large --max-new-tokens "
           "runs more of them at once."),
    option("--request-timeout", "request_timeout_seconds", type=float, default=3600.0, show_default=True,
           metavar="SECONDS", help="Deadline of one request."),
    option("--endpoint-wait", "endpoint_wait_seconds", type=float, default=60.0, show_default=True,
           metavar="SECONDS", help="How long to wait at the start for an endpoint that never answered."),
    option("--drift-wait", "drift_wait_seconds", type=float, default=600.0, show_default=True, metavar="SECONDS",
           help="How long endpoints that are away may keep a run going that the others serve no more (exit 6)."),
    option("--high-water", type=int, default=5000, show_default=True, help="Queued tasks per lane."),
    option("--max-row-bytes", type=int, default=64 * 2**20, help="Larger rows are rejected."),
    option("--max-sample-tokens", type=int, help="Longer samples are rejected."),
    option("--truncated", type=click.Choice(["keep", "drop"]), default="keep", show_default=True,
           help="What becomes of answers cut at their allowance."),
    option("--unclosed-thinking", type=click.Choice(["keep", "drop"]), default="keep", show_default=True,
           help="What becomes of answers that end inside their reasoning."),
    option("--max-repeat", type=int, metavar="N", help="Samples that end in a loop of more tokens are rejected."),
    option("--dry-run", is_flag=True, help="Say what would be sent (rows, tokens, disk) and send nothing."),
    api_key_option,
)  # fmt: skip

#: Of `run` alone: what it starts on this machine, and how long.
machine_options = options(
    option("--workers", type=int, default=1, show_default=True, help="Worker processes on this machine."),
    option("--slots", type=int, default=1000, show_default=True, help="Tasks a worker holds at once."),
    option("--limit-seconds", type=float, metavar="SECONDS", help="Stop after this long (exit 3)."),
    option("--drain-seconds", type=float, default=30.0, show_default=True, metavar="SECONDS",
           help="Time for running requests when stopping."),
    option("--metrics-port", type=click.IntRange(0, 65535), metavar="PORT",
           help="Serve metrics for Prometheus there, on loopback (`headrace metrics` does it from elsewhere)."),
    option("--flower", is_flag=True, help="Start Flower on loopback and say where, with a password of its own."),
)  # fmt: skip

"""The help of `run` and `enqueue` in sections: forty options in one list are read by nobody."""

import click

#: Title → options by their parameter's name. Those of no section come last, under "Options".
SECTIONS = {
    "What is needed": ("endpoints", "tokenizer", "out"),
    "Prompts": (
        "limit", "system", "chat_template", "template_kwargs", "trust_remote_code", "prompt_field", "messages_field",
        "max_row_bytes", "vocab_size", "skip_parity",
    ),
    "Answers": (
        "max_new_tokens", "temperature", "top_p", "top_k", "sampling", "samples", "turns", "prefill", "fit_output",
        "stage_tokens",
    ),
    "Which answers become samples": ("truncated", "unclosed_thinking", "max_repeat", "max_sample_tokens"),
    "Servers": (
        "api_key", "endpoint_wait_seconds", "request_timeout_seconds", "concurrency", "short_concurrency",
        "long_concurrency", "requests_per_minute", "require", "allow_drift",
        "drift_wait_seconds", "on_down", "on_up",
    ),
    "The run": (
        "dry_run", "no_wait", "redis", "workers", "slots", "high_water", "limit_seconds", "drain_seconds", "flower",
        "metrics_port",
    ),
}  # fmt: skip


class Sectioned(click.Command):
    """A command whose help shows its options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does, several times."""
        given = (one for one in self.get_params(ctx) if isinstance(one, click.Option))
        left = {one.name: record for one in given if (record := one.get_help_record(ctx))}
        for title, names in SECTIONS.items():
            if records := [left.pop(name) for name in names if name in left]:
                with formatter.section(title):
                    formatter.write_dl(records)
        with formatter.section("Options"):
            formatter.write_dl(list(left.values()))

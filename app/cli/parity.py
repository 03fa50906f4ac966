"""Before the first row: are our prompts the ones that the server's own chat template makes?

A server that offers `/v1/tokenize` with messages (0.5.12 and newer) is asked for the ids of a few rows of each shape. A
difference ends the command: it would be in every sample. Left out are rows whose control tokens were made text (a
server makes turns of them), answers to be continued, and what the server's own checks refuse; and rows with tools where
the run writes tools in another form than the server's version (it began by `adopt`, or with another version): that they
differ is known, and said.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
from pydantic import SecretStr

from app.errors import UsageError
from app.reasons import Rejected
from app.records import Conversation
from app.settings import RunSettings
from app.sglang.client import SGLangClient
from app.sglang.faults import Fault
from app.sglang.tool_dump import ToolForm, tool_form
from app.tokenization import Renderer, RenderOptions
from producers.inputs import Dataset
from producers.trial import readable_rows

_LOOK_ROWS = 200  #: of each file
_ROWS_PER_SHAPE = 3
_MAX_ROWS = 30
_SHOWN_IDS = 12
_DAYS = (0, -1, 1)  #: a server's clock may be in another time zone


@dataclass(frozen=True, slots=True)
class _Probe:
    """A row to compare: where it stands, what it says, and our ids (one per day, where the template prints a date)."""

    place: str
    conversation: Conversation
    ids: tuple[list[int], ...]


def compare(
    settings: RunSettings, datasets: list[Dataset], options: RenderOptions, versions: dict[str, str | None],
    api_key: SecretStr | None, say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """For run.json: rows compared per endpoint (0 where it offers nothing to compare with), and the endpoints whose
    rows with tools were left out. versions: url → SGLang's version. Raises UsageError with the first differing token.
    """
    renderer = Renderer(options)
    probes = list(_probes(settings, datasets, renderer))
    has_tools = any(probe.conversation.tools for probe in probes)
    others = [url for url, version in versions.items() if has_tools and tool_form(version) != options.tool_form]
    if others:
        say(_left_out(others, options.tool_form))
    without_tools = [probe for probe in probes if not probe.conversation.tools]

    async def work() -> dict[str, int]:
        async with SGLangClient(api_key) as client:
            asked = {url: without_tools if url in others else probes for url in versions}
            counts = await asyncio.gather(*(_compare(client, url, some, renderer) for url, some in asked.items()))
            return dict(zip(asked, counts, strict=True))

    return {"skipped": False, "rows": len(probes), "compared": asyncio.run(work()), "without_tools": others}


def _left_out(urls: list[str], form: ToolForm) -> str:
    ours = "as the rows give them, as it was adopted" if form == "given" else "as the version it began with"
    return (
        f"rows with tools are left out of the comparison of prompts: this run writes tools {ours}, and "
        f"{', '.join(urls)} would write them in another form. Rows still to come get the run's form."
    )


async def _compare(client: SGLangClient, url: str, probes: list[_Probe], renderer: Renderer) -> int:
    """How many rows the endpoint could be asked for; they are all equal."""
    compared = 0
    for probe in probes:
        chat = probe.conversation
        try:
            theirs = await client.tokenize(url, as_sent(chat.messages), chat.tools, renderer.options.template_kwargs)
        except Fault:  # it is for the run to find out whether the endpoint is away
            return compared
        if theirs is None:
            continue
        if theirs not in probe.ids:
            raise UsageError(_difference(url, probe, theirs, renderer))
        compared += 1
    return compared


def _difference(url: str, probe: _Probe, theirs: list[int], renderer: Renderer) -> str:
    ours = probe.ids[0]
    place = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
                 min(len(ours), len(theirs)))  # fmt: skip
    before = renderer.decode(ours[max(0, place - _SHOWN_IDS) : place])
    return (
        f"{url} makes another prompt of {probe.place} than we do: after {before!r}, token {place} is "
        f"{_shown(theirs, place, renderer)} there and {_shown(ours, place, renderer)} here. Its tokenizer, chat "
        "template, template kwargs or version are others: mend --tokenizer, --chat-template or --template-kwargs, "
        "or go on with --skip-parity."
    )


def _shown(ids: list[int], place: int, renderer: Renderer) -> str:
    return f"{ids[place]} {renderer.decode(ids[place : place + 1])!r}" if place < len(ids) else "none"


def _probes(settings: RunSettings, datasets: list[Dataset], renderer: Renderer) -> Iterator[_Probe]:
    """A few rows of each shape, from the beginnings of the files."""
    seen: Counter[tuple] = Counter()
    for dataset in datasets:
        for path in dataset.paths:
            for number, conversation, _ in readable_rows(path, settings, _LOOK_ROWS):
                shape = _shape_of(dataset.name, conversation)
                if seen[shape] == _ROWS_PER_SHAPE or seen.total() == _MAX_ROWS or not _is_comparable(
                    conversation, renderer
                ):
                    continue
                try:
                    ids = tuple(_on_days(renderer, conversation))
                except Rejected:
                    continue
                seen[shape] += 1
                yield _Probe(f"row {number} of {path}", conversation, ids)


def _shape_of(dataset: str, conversation: Conversation) -> tuple:
    fields = {(message["role"], *sorted(message)) for message in conversation.messages}
    return dataset, tuple(sorted(fields)), bool(conversation.tools)


def _is_comparable(conversation: Conversation, renderer: Renderer) -> bool:
    return conversation.messages[-1]["role"] != "assistant" and not renderer.holds_control_tokens(conversation)


def _on_days(renderer: Renderer, conversation: Conversation) -> Iterator[list[int]]:
    """Our ids; where the template prints a date, those of today and its neighbours: a server prints its own."""
    for days in _DAYS if renderer.is_dated else ():
        renderer.date = (datetime.now(UTC) + timedelta(days=days)).date()
        yield renderer.render(conversation)
    if not renderer.is_dated:
        yield renderer.render(conversation)


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments of calls as OpenAI's clients send them: JSON in a string."""
    return [
        message | {"tool_calls": [_callas_sent(call) for call in message["tool_calls"]]}
        if "tool_calls" in message else message
        for message in messages
    ]  # fmt: skip


def _callas_sent(call: dict[str, Any]) -> dict[str, Any]:
    arguments = orjson.dumps(call["function"]["arguments"]).decode()
    return call | {"function": call["function"] | {"arguments": arguments}}

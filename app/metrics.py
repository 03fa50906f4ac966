"""Every number of a snapshot for Prometheus. The only importer of prometheus_client.

What is unknown is left out, never -1. Counters and histograms are sums that the collector keeps in Redis: they go on
over restarts of any process, so that Prometheus needs no resets.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from app.errors import StorageError
from app.inventory import UNKNOWN
from app.snapshot import Snapshot, budget_tokens
from app.store.live import EndpointNow, WorkerNow
from app.store.report import LATENCY_SECONDS, TOKENS

Samples = Iterable[tuple[tuple[str, ...], float | None]]  #: label values → number; None or -1: unknown
_DATASET = {
    "rows": "Completions wanted, of the input as far as it was read",
    "tokenized": "Completions that have their sample",
    "pending": "Completions that have neither sample nor rejection",
    "queued": "Completions that wait in Redis",
    "in_flight": "Completions that a worker works on",
}


class Exporter(Collector):
    """What a scrape gets: the snapshot that was shown last."""

    def __init__(self) -> None:
        self._seen: Snapshot | None = None
        self._histograms: dict[tuple, float] = {}

    def show(self, seen: Snapshot, histograms: dict[tuple, float]) -> None:
        """Take a snapshot; histograms as `app.store.live.histograms` reads them (none: keep the last)."""
        self._seen, self._histograms = seen, histograms or self._histograms

    def collect(self) -> Iterator[Metric]:
        """All metrics, at every scrape."""
        seen = self._seen
        if seen is None:
            return
        yield from _of_the_run(seen)
        yield from _of_datasets(seen)
        yield from _of_endpoints(seen.endpoints)
        yield from _of_workers(seen.workers)
        yield from _totals(seen)
        yield from _of_histograms(seen, self._histograms)


def serve(exporter: Exporter, address: str, port: int) -> int:
    """Answer scrapes from threads of their own; returns the port (one that was free, if 0). Raises StorageError."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(exporter)
    try:
        server, _ = prometheus_client.start_http_server(port, address, registry)
    except OSError as exc:
        raise StorageError(f"Cannot listen on {address}:{port}: {exc.strerror}.") from exc
    return server.server_port


def _gauge(name: str, help: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family = GaugeMetricFamily(f"headrace_{name}", help, labels=labels)
    for values, number in samples:
        if number is not None and number != UNKNOWN:
            family.add_metric(values, number)
    return family


def _one(name: str, help: str, number: float) -> Metric:
    return _gauge(name, help, (), [((), number)])


def _of_the_run(seen: Snapshot) -> Iterator[Metric]:
    run = seen.inventory["run"]
    info = ((run["id"], run["out"], run["recipe"], run["state"]), 1)
    yield _gauge("run_info", "Always 1; the run and its state", ("run", "out", "recipe", "state"), [info])
    yield _one("complete", "1 if nothing is pending", seen.complete)
    yield _one("waiting", "1 if the run waits for something (`headrace watch` says what)", bool(seen.waiting_for))
    yield _one("eta_seconds", "Expected time to the end, from tokens", seen.inventory["eta_seconds"])
    yield _one(
        "generating_tokens_per_second", "Output tokens per second of what is under way",
        seen.generating_tokens_per_second,
    )  # fmt: skip
    yield _one("oldest_request_seconds", "Age of the request longest under way", seen.oldest_seconds)
    yield _one("unwritten_answers", "Answers in Redis that the collector has not written yet", seen.unwritten)
    yield _one("collector_age_seconds", "Since the collector gave its last sign", seen.collector_seconds)
    yield _one("redis_up", "1 if Redis answers", seen.memory_bytes != UNKNOWN)
    yield _one("redis_memory_bytes", "Memory that Redis uses", seen.memory_bytes)
    yield _one("redis_memory_limit_bytes", "maxmemory of Redis, 0 if it has none", seen.memory_limit_bytes)
    lanes = (((lane,), number) for lane, number in seen.lanes.items())
    yield _gauge("lane_queued", "Messages in a lane's queue, over all runs", ("lane",), lanes)


def _of_datasets(seen: Snapshot) -> Iterator[Metric]:
    datasets = seen.inventory["datasets"]
    for name, help in _DATASET.items():
        yield _gauge(name, help, ("dataset",), (((one["dataset"],), one[name]) for one in datasets))
    rejected = (
        ((one["dataset"], reason), number) for one in datasets for reason, number in one["rejected_by_reason"].items()
    )
    yield _gauge("rejected", "Completions that get no sample", ("dataset", "reason"), rejected)
    expected = (((name,), number) for name, number in seen.expected_rows.items())
    yield _gauge("expected_rows", "Completions expected, while the input is being read", ("dataset",), expected)
    rates = seen.rates.items()
    yield _gauge(
        "completions_per_second", "Samples and rejections per second over the last minute", ("dataset",),
        (((name,), rate.completions_per_second) for name, rate in rates),
    )  # fmt: skip
    yield _gauge(
        "output_tokens_per_second", "Output tokens written per second over the last minute", ("dataset",),
        (((name,), rate.output_tokens_per_second) for name, rate in rates),
    )  # fmt: skip


def _of_endpoints(endpoints: tuple[EndpointNow, ...]) -> Iterator[Metric]:
    def each(name: str, help: str, number) -> Metric:
        return _gauge(f"endpoint_{name}", help, ("endpoint",), (((one.url,), number(one)) for one in endpoints))

    models = (((one.url, one.model, one.state), 1) for one in endpoints)
    yield _gauge("endpoint_info", "Always 1; the endpoint's model and state", ("endpoint", "model", "state"), models)
    yield each("up", "1 if its breaker is closed", lambda one: one.open_since is None)
    yield each("requests", "Requests under way, over all workers and runs", lambda one: one.requests)
    yield each("running", "Requests that it runs, as it says", lambda one: one.running)
    yield each("waiting", "Requests in its own queue, as it says", lambda one: one.waiting)
    yield each("in_flight_tokens", "KV tokens that our requests hold, about", lambda one: one.tokens)
    yield each("used_tokens", "KV tokens in use, as it says", lambda one: one.used_tokens)
    yield each("kv_tokens", "KV tokens that it can hold", lambda one: one.kv_tokens)
    yield each("budget_tokens", "KV tokens that the predicted peak may fill", budget_tokens)
    yield each("fill", "Share of its KV pool that the predicted peak may fill (f), as learned", lambda one: one.f)
    yield each(
        "tokens_per_second", "Output tokens per second of our requests there",
        lambda one: 1000 * one.pace * one.requests,
    )  # fmt: skip


def _of_workers(workers: tuple[WorkerNow, ...]) -> Iterator[Metric]:
    def each(name: str, help: str, number) -> Metric:
        return _gauge(f"worker_{name}", help, ("worker",), (((one.name,), number(one)) for one in workers))

    yield _one("workers", "Workers that gave a sign of late", len(workers))
    yield each("slots", "Tasks it may hold", lambda one: one.slots)
    yield each("claims", "Tasks it works on", lambda one: one.claims)
    yield each("leases", "Tasks of it at an endpoint", lambda one: one.leases)
    yield each("waiting", "Tasks of it that wait for an endpoint", lambda one: one.waiting)
    yield each("draining", "1 if it takes no more", lambda one: one.draining)


def _totals(seen: Snapshot) -> Iterator[Metric]:
    for name, figure, labels, help in (
        ("answers", "answers", ("dataset", "endpoint", "finish_reason"), "Answers written"),
        ("prompt_tokens", "prompt_tokens", ("dataset", "endpoint"), "Tokens of their prompts"),
        ("output_tokens", "output_tokens", ("dataset", "endpoint"), "Tokens of them"),
        ("extra_generations", "extra", ("dataset",), "Requests beyond the first, of completions on file"),
    ):
        family = CounterMetricFamily(f"headrace_{name}", help, labels=labels)
        for (which, *values), number in sorted(seen.figures.items()):
            if which == figure:
                family.add_metric(values, number)
        yield family


def _of_histograms(seen: Snapshot, found: dict[tuple, float]) -> Iterator[Metric]:
    sums = {key: number / 1000 for key, number in seen.figures.items() if key[0] == "latency_ms"}
    for name in ("prompt", "output"):
        for (which, dataset, *_), number in seen.figures.items():
            if which == f"{name}_tokens":
                sums[name, dataset] = sums.get((name, dataset), 0) + number
    for name, which, bounds, labels, help in (
        ("latency_seconds", "latency", LATENCY_SECONDS, ("dataset", "endpoint"), "From request to answer"),
        ("prompt_length_tokens", "prompt", TOKENS, ("dataset",), "Lengths of prompts"),
        ("answer_length_tokens", "output", TOKENS, ("dataset",), "Lengths of answers"),
    ):
        family = HistogramMetricFamily(f"headrace_{name}", help, labels=labels)
        by_labels: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
        for (kind, *values, bucket), number in found.items():
            if kind == which:
                by_labels[tuple(values)][bucket] = number
        for values, numbers in sorted(by_labels.items()):
            filled = itertools.accumulate(numbers.get(n, 0) for n in range(len(bounds) + 1))
            buckets = list(zip([*map(str, map(float, bounds)), "+Inf"], filled, strict=True))
            total = sums.get(("latency_ms" if which == "latency" else which, *values), 0)
            family.add_metric(values, buckets=buckets, sum_value=total)
        yield family

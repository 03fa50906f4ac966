"""app.metrics: all numbers of the live view reach Prometheus; dashboard and alerts name nothing that does not exist."""

import json
import re
from dataclasses import replace
from pathlib import Path

import prometheus_client
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import Exporter
from app.snapshot import Snapshot, snapshot
from app.store.keys import RunKeys
from app.store.live import Kind, Request, histograms
from app.store.report import Sums, parse_figures
from tests.unit.test_snapshot import FACTS, WORKER, counts, endpoint, exactly, now

BUSY = replace(WORKER, oldest={"run1": Request("chat:a:0:0", "http://gpu1:30000", 900.0)})
DEPLOY = Path(__file__).parent.parent.parent / "deploy"


def summed(client) -> tuple[dict, dict]:
    """Figures and histograms of three answers, through Redis."""
    sums, keys, pipeline = Sums(), RunKeys("run1"), client.pipeline(transaction=False)
    for seconds, tokens, finish in ((0.5, 10, "stop"), (7.0, 300, "stop"), (9999.0, 10**6, "length")):
        sums.answer("chat", "http://gpu1:30000", finish, 100, tokens, seconds)
    sums.attempts("chat", 1)
    sums.attempts("chat", 3)
    sums.hand_over(pipeline, keys)
    pipeline.execute()
    return parse_figures(client.hgetall(keys.figures)), histograms(client, "run1")


def samples(seen: Snapshot, histograms: dict) -> list:
    """A scrape, through the client library's own text form and parser."""
    exporter, registry = Exporter(), prometheus_client.CollectorRegistry()
    exporter.show(seen, histograms)
    registry.register(exporter)
    families = text_string_to_metric_families(prometheus_client.generate_latest(registry).decode())
    return [sample for family in families for sample in family.samples]


def scraped(seen: Snapshot, histograms: dict) -> dict[str, dict[tuple, float]]:
    """Sample name → label values → number."""
    return numbers(samples(seen, histograms))


def numbers(scrape: list) -> dict[str, dict[tuple, float]]:
    found: dict[str, dict[tuple, float]] = {}
    for sample in scrape:
        found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


@pytest.fixture
def exported(redis_client):
    """A scrape of a run of which all is known."""
    figures, found = summed(redis_client)
    kinds = [Kind("short-kind", 40, exactly(1000))]
    seen = snapshot(
        FACTS, [counts(too_long=2), counts("code", final=False)],
        now(figures=figures, expected_rows={"code": 500}, workers=[BUSY], memory_bytes=5, memory_limit_bytes=10,
            kinds={"chat": kinds, "code": kinds}, endpoints=[endpoint(running=9, waiting=1, used_tokens=700)]),
    )  # fmt: skip
    return samples(seen, found)


@pytest.fixture
def everything(exported):
    """The same as numbers."""
    return numbers(exported)


def test_the_numbers_of_the_live_view_are_all_there(everything):
    """Datasets, endpoints, workers, Redis, the collector, under names that say what they are."""
    assert everything["headrace_rows"] == {("chat",): 100, ("code",): 100}
    assert everything["headrace_rejected"][("chat", "too_long")] == 2
    assert everything["headrace_expected_rows"] == {("code",): 500}
    assert everything["headrace_endpoint_in_flight_tokens"] == {("http://gpu1:30000",): 200}
    assert everything["headrace_endpoint_budget_tokens"] == {("http://gpu1:30000",): 900}
    assert everything["headrace_worker_leases"] == {(WORKER.name,): 3}
    assert everything["headrace_extra_generations_total"] == {("chat",): 2}
    assert everything["headrace_redis_memory_limit_bytes"] == {(): 10}
    assert everything["headrace_eta_seconds"][()] > 0


def test_histograms_are_cumulative_and_end_at_all_that_was_seen(everything):
    """What lies beyond the last bound is in +Inf alone; sum and count fit."""
    latency = {key[-1]: n for key, n in everything["headrace_latency_seconds_bucket"].items()}
    assert (latency["1.0"], latency["5.0"], latency["10.0"], latency["3600.0"], latency["+Inf"]) == (1, 1, 2, 2, 3)
    assert everything["headrace_latency_seconds_sum"] == {("chat", "http://gpu1:30000"): 0.5 + 7 + 9999}
    assert everything["headrace_answer_length_tokens_count"] == {("chat",): 3}
    assert everything["headrace_answer_length_tokens_sum"] == {("chat",): 1_000_310}


def test_the_unknown_is_left_out_and_never_minus_one():
    """Redis away: what is on file stays, and nothing is told that nobody knows."""
    found = scraped(snapshot(FACTS, [counts()], None), {})
    assert found["headrace_redis_up"] == {(): 0}
    assert found["headrace_tokenized"] == {("chat",): 40}
    assert "headrace_queued" not in found
    assert -1 not in [number for values in found.values() for number in values.values()]
    silent = scraped(snapshot(FACTS, [counts()], now(endpoints=[endpoint(kv_tokens=None)])), {})
    assert "headrace_endpoint_budget_tokens" not in silent


def expressions() -> list[str]:
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return [rule["expr"] for group in groups for rule in group["rules"]] + [
        target["expr"] for panel in panels for target in panel["targets"]
    ]


def parts(expression: str) -> list[promql_parser.Expr]:
    """Everything in a PromQL expression, as Prometheus's grammar reads it."""
    found: list[promql_parser.Expr] = []
    promql_parser.walk(promql_parser.parse(expression), found.append)
    return found


def grouping(part: promql_parser.Expr) -> list[str]:
    """Labels by which an aggregation groups, or a comparison matches."""
    modifier = getattr(part, "modifier", None)
    matching = modifier if isinstance(part, promql_parser.AggregateExpr) else getattr(modifier, "matching", None)
    return list(matching.labels) if matching else []


@pytest.mark.parametrize("expression", expressions())
def test_dashboard_and_alerts_ask_for_metrics_and_labels_that_exist(expression, exported):
    """A renamed metric would leave an empty panel, or an alert that never comes; so would a label it has not."""
    labels: dict[str, set[str]] = {}
    for sample in exported:
        labels.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
    for part in parts(expression):
        asked = [one for one in parts(part.prettify()) if isinstance(one, promql_parser.VectorSelector)]
        assert {one.name for one in asked} <= labels.keys()
        if isinstance(part, promql_parser.VectorSelector):
            assert {one.name for one in part.matchers.matchers} <= labels[part.name]
        for one in asked:
            assert set(grouping(part)) <= labels[one.name], one.name


def test_alerts_speak_of_labels_that_their_expression_leaves():
    """`{{ $labels.endpoint }}` in a text is empty where the expression has summed the label away."""
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    assert len(group["rules"]) == len({rule["alert"] for rule in group["rules"]}) == 9
    for rule in group["rules"]:
        gone = {name for part in parts(rule["expr"]) for name in grouping(part)} - {"instance", "job"}
        for name in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
            assert name not in gone, rule["alert"]
            assert promql_parser.parse_duration(rule["for"])


def test_every_metric_is_in_the_documentation(everything):
    """docs/operating/monitoring.md lists them all."""
    text = (DEPLOY.parent / "docs" / "operating" / "monitoring.md").read_text()
    names = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in everything}
    assert {name for name in names if f"`{name}`" not in text} == set()

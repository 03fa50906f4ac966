"""One look at Redis: what it takes for true of what others said there."""

from app.store.keys import RunKeys
from app.store.live import look
from app.store.report import Report
from tests.belt import manifest

KEYS = RunKeys("run1")


def test_what_the_collector_of_an_earlier_start_said_last_is_not_this_runs(redis_client):
    """Its counts may be of files that changed since; who does not know when the run began has nothing better."""
    redis_client.set(KEYS.manifest, manifest("http://a").model_dump_json())
    now, _ = redis_client.time()
    redis_client.set(KEYS.report, Report(now - 60.0, now - 90.0, "out", "recipe", True, []).dump())
    assert look(redis_client, "run1").report is not None
    assert look(redis_client, "run1", begun_seconds=100.0).report is not None
    assert look(redis_client, "run1", begun_seconds=10.0).report is None

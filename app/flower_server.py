"""Flower, wired to a run's Redis. The only importer of flower and tornado.

What we decide: loopback and a password, bounded memory, buckets that fit generations, columns that show dataset and
row, both lanes as queues also while no worker takes more of one. FLOWER_… variables of the environment win over all but
the password, which is never left out. Workers send events only as long as Flower asks for them.
"""

import contextlib
import os
import signal
from collections.abc import Callable

from flower.app import Flower
from flower.command import apply_env_options
from flower.urls import settings as flower_settings
from flower.views import BaseHandler
from tornado.options import options

from app.celery_app import GENERATE_TASK, make_app
from app.errors import StorageError
from app.lanes import Lane

#: About 6 KB each.
MOST_TASKS = 10_000
#: Seconds; Flower's own end at ten.
BUCKETS = [1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0]
_COLUMNS = "uuid,state,args,worker,received,runtime"


def serve_flower(redis_url: str, address: str, port: int, basic_auth: str, ready: Callable[[int], None]) -> None:
    """Serve until stopped (SIGTERM, Ctrl-C). basic_auth: "user:password". ready: told the port. Raises StorageError."""
    os.environ.pop("HEADRACE_API_KEY", None)  # nothing here talks to endpoints
    celery = make_app(redis_url)
    celery.task(name=GENERATE_TASK)(lambda run_id, dataset, key: None)  # for its name alone
    defaults = {
        "max_tasks": MOST_TASKS, "task_runtime_metric_buckets": BUCKETS, "tasks_columns": _COLUMNS,
        "natural_time": True, "purge_offline_workers": 600,
    }  # fmt: skip
    for name, value in defaults.items():
        setattr(options, name, value)
    apply_env_options()
    options.address, options.port, options.basic_auth = address, port, [basic_auth]
    BaseHandler.get_active_queue_names = lambda _: sorted(lane.queue for lane in Lane)
    flower = Flower(capp=celery, options=options, **flower_settings)
    try:
        ready(flower.start_http_server())
    except OSError as exc:
        raise StorageError(f"Cannot listen on {address}:{port}: {exc.strerror}.") from exc
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        flower.start()
    flower.stop()

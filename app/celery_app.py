"""Celery as we use it: lanes as queues, late acknowledgement, a short visibility timeout that workers keep alive.

What each setting prevents is measured: docs/architecture.md, "Delivery".
"""

from celery import Celery
from kombu import Queue

from app.lanes import Lane
from app.store.connection import celery_url
from app.store.keys import CELERY_PREFIX

GENERATE_TASK = "headrace.generate"
#: A killed worker's messages return after this long; living workers keep theirs by a heartbeat.
VISIBILITY_TIMEOUT_SECONDS = 30
SWEEP_SECONDS = 5


def make_app(redis_url: str) -> Celery:
    """The Celery application on this Redis."""
    celery = Celery("headrace", broker=celery_url(redis_url), set_as_current=False)
    celery.conf.update(
        result_backend=None, task_ignore_result=True, task_store_errors_even_if_ignored=False,
        task_serializer="json", accept_content=["json"], task_protocol=2, enable_utc=True,
        task_acks_late=True, task_acks_on_failure_or_timeout=False, task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1, worker_disable_prefetch=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_soft_shutdown_timeout=0, worker_hijack_root_logger=False, worker_redirect_stdouts=False,
        worker_send_task_events=False, worker_enable_remote_control=True, task_send_sent_event=False,
        broker_connection_retry_on_startup=True, broker_connection_max_retries=None,
        broker_channel_error_retry=True,  # a full Redis refuses commands: the worker connects again, and does not end
        task_queues=[Queue(lane.queue, routing_key=lane.queue) for lane in Lane],
        task_default_queue=Lane.SHORT.queue, task_create_missing_queues=False,
        broker_transport_options={
            "global_keyprefix": CELERY_PREFIX,
            "visibility_timeout": VISIBILITY_TIMEOUT_SECONDS,
            "unacked_restore_interval": SWEEP_SECONDS, "unacked_restore_throttle": 1, "unacked_mutex_expire": 30,
            "priority_steps": [0], "socket_keepalive": True, "socket_timeout": 30, "socket_connect_timeout": 5,
            "health_check_interval": 25,
        },
    )  # fmt: skip
    return celery

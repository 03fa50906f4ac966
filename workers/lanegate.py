"""A lane whose tasks wait for leases is not consumed further, so that it never fills the worker's slots for the other.

Consuming stops and resumes on the consumer's own thread, from its timer: messages in hand stay, those in the queue are
left to other workers. Without it one lane's waiting tasks would take all slots, and hoard the queue.
"""

import logging

from celery import bootsteps

from app.lanes import Lane
from workers.admission import Admission

log = logging.getLogger(__name__)
#: Tasks of a lane that may wait in a worker; more where the worker holds more leases than this.
WAITING_LEAST = 256
_LOOK_SECONDS = 0.1


def lane_gate(admission: Admission, lanes: tuple[str, ...]) -> type[bootsteps.StartStopStep]:
    """The consumer step that opens and closes these lanes."""

    class LaneGate(bootsteps.StartStopStep):
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def __init__(self, consumer, **kwargs):
            super().__init__(consumer, **kwargs)
            self._entry = None

        def start(self, consumer) -> None:
            for lane in lanes:
                _set_open(consumer, Lane(lane), True)  # a reconnect begins with what was closed before it
            self._entry = consumer.timer.call_repeatedly(_LOOK_SECONDS, adjust, (consumer, admission, lanes))

        def stop(self, consumer) -> None:
            if self._entry is not None:
                self._entry.cancel()
                self._entry = None

    return LaneGate


def adjust(consumer, admission: Admission, lanes: tuple[str, ...]) -> None:
    """Close the lanes of which enough wait here, open those of which markedly fewer do."""
    most = max(WAITING_LEAST, admission.held)
    for lane in map(Lane, lanes):
        waiting = admission.waiting_in(lane)
        if waiting > most:
            _set_open(consumer, lane, False)
        elif waiting < most * 3 / 4:
            _set_open(consumer, lane, True)


def _set_open(consumer, lane: Lane, is_open: bool) -> None:
    if consumer.task_consumer is None or consumer.task_consumer.consuming_from(lane.queue) == is_open:
        return
    log.debug("lane_opened %s" if is_open else "lane_closed %s", lane)
    if is_open:
        consumer.add_task_queue(lane.queue)
    else:
        consumer.cancel_task_queue(lane.queue)

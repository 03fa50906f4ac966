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
#: Between two looks: twice as long each time that nothing moved.
_LOOK_SECONDS, _LOOK_MOST_SECONDS = 0.1, 0.4


def lane_gate(admission: Admission, lanes: tuple[str, ...]) -> type[bootsteps.StartStopStep]:
    """The consumer step that opens and closes these lanes."""

    class LaneGate(bootsteps.StartStopStep):
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def __init__(self, consumer, **kwargs):
            super().__init__(consumer, **kwargs)
            self._entry, self._seen, self._pause = None, (0, 0), _LOOK_SECONDS

        def start(self, consumer) -> None:
            for lane in lanes:
                _set_open(consumer, Lane(lane), True)  # a reconnect begins with what was closed before it
            self._look(consumer)

        def _look(self, consumer) -> None:
            adjust(consumer, admission, lanes)
            before, self._seen = self._seen, (admission.waiting, admission.held)
            self._pause = min(_LOOK_MOST_SECONDS, 2 * self._pause) if self._seen == before else _LOOK_SECONDS
            self._entry = consumer.timer.call_after(self._pause, self._look, (consumer,))

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

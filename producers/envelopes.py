"""Celery's message for a task, made in microseconds: Celery is asked for one of each lane, the others are filled in.

Celery and kombu take some 130 µs for a message, and all but five texts in it are the same for every task of a run. None
of these holds anything that JSON would escape: dataset names are safe folder names, the others numbers and hashes.
"""

from base64 import b64decode, b64encode
from secrets import token_hex

from celery import Celery
from kombu import Connection
from kombu.utils.json import dumps

from app.celery_app import GENERATE_TASK
from app.lanes import Lane
from producers.rendering import Parcel

_DATASET, _KEY, _ID, _SHOWN, _TAG, _BODY = (f"<{name}>" for name in ("dataset", "key", "id", "shown", "tag", "body"))


class Envelopes:
    """The messages of one run, field for field what `send_task` would lay in a lane's list."""

    def __init__(self, celery: Celery, run_id: str):
        self._forms = {lane: _form(celery, run_id, lane) for lane in Lane}

    def message(self, parcel: Parcel) -> str:
        """A message for this task; another one each time, by its delivery tag."""
        body, rest = self._forms[parcel.lane]
        packed = b64encode((body % {"dataset": parcel.dataset, "key": parcel.key}).encode()).decode()
        shown = f"{parcel.dataset} row {parcel.number}"
        return rest % {"id": parcel.task_id, "shown": shown, "tag": token_hex(16), "body": packed}


def _form(celery: Celery, run_id: str, lane: Lane) -> tuple[str, str]:
    """What Celery sends, to be filled in: the body, and what is around it."""
    with Connection("memory://") as connection:
        celery.send_task(
            GENERATE_TASK, (run_id, _DATASET, _KEY), task_id=_ID, queue=lane.queue, ignore_result=True,
            argsrepr=_SHOWN, kwargsrepr="", producer=celery.amqp.Producer(connection),
        )  # fmt: skip
        received = connection.default_channel.basic_get(lane.queue, no_ack=True)
    message = received.serializable()
    body, message["body"] = b64decode(message["body"]).decode(), _BODY
    message["properties"]["delivery_tag"] = _TAG
    return _blanks(body, (_DATASET, _KEY)), _blanks(dumps(message), (_ID, _SHOWN, _TAG, _BODY))


def _blanks(text: str, names: tuple[str, ...]) -> str:
    text = text.replace("%", "%%")
    for name in names:
        text = text.replace(name, f"%({name[1:-1]})s")
    return text

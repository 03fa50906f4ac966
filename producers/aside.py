"""Tasks that wait on disk for room in their lane."""

import struct
import tempfile

from app.errors import StorageError
from app.packing import unpack_task
from producers.rendering import Parcel, parcel_of

_MOST_BYTES = 4 * 2**30


class Aside:
    """A first-in first-out of parcels on disk."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="headrace-aside-")  # noqa: SIM115 - lives as long as the producer
        self._read_at = self._end = 0

    def __bool__(self) -> bool:
        return self._read_at < self._end

    def add(self, parcels: list[Parcel]) -> bool:
        """Set aside; False if there is no room for more."""
        if self._end > _MOST_BYTES:
            return False
        self._file.seek(self._end)
        try:
            for parcel in parcels:
                self._file.write(struct.pack("<I", len(parcel.blob)) + parcel.blob)
            self._file.flush()
        except OSError as exc:
            raise StorageError(f"No room on disk to set tasks aside ({exc.strerror}); free some in TMPDIR.") from exc
        self._end = self._file.tell()
        return True

    def take(self, most: int) -> list[Parcel]:
        """The eldest ones."""
        parcels = []
        self._file.seek(self._read_at)
        while len(parcels) < most and self._read_at < self._end:
            (size,) = struct.unpack("<I", self._file.read(4))
            blob = self._file.read(size)
            parcels.append(parcel_of(unpack_task(blob), blob))
            self._read_at = self._file.tell()
        if not self:
            self._file.truncate(0)
            self._read_at = self._end = 0
        return parcels

"""The data of the next updates, made in the background while the present one is computed.

Because an update's data are a function of its number, whoever asks gets the same, whether it was made ahead or not;
and because nothing here is ever saved, how far ahead the reader is cannot matter.
"""

from __future__ import annotations

import collections
from concurrent.futures import Future, ThreadPoolExecutor

from training_lab.data.batches import UpdateData
from training_lab.data.dataset import Dataset

AHEAD = 2


class ReadingAhead:
    """Gives the data of any update up to the last; a thread makes those that follow it. Entered while it is used."""

    def __init__(self, dataset: Dataset, last_update: int, ahead: int = AHEAD) -> None:
        self.dataset, self.last_update, self.ahead = dataset, last_update, ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reading ahead")
        self._coming: collections.OrderedDict[int, Future[UpdateData]] = collections.OrderedDict()

    def __enter__(self) -> ReadingAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, update: int) -> UpdateData:
        """The data of an update. Raises what making them raised."""
        for other in [number for number in self._coming if number < update or number > update + self.ahead]:
            self._coming.pop(other).cancel()
        for number in range(update, max(update, min(update + self.ahead, self.last_update)) + 1):
            if number not in self._coming:
                self._coming[number] = self._pool.submit(self.dataset.update_data, number)
        return self._coming.pop(update).result()

"""Copies of a run at an address, made in the background, so that a machine that is lost takes nothing with it.

Training never waits for them: it says that there is something new (`notify`), and goes on. One thread brings the
storage to the state of the folder, and tries again for as long as the run lives; what is where stands in
`copies.json`, and as news for the run's events. Only at the end does somebody wait, for as long as they want to.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

from training_lab.copying import Copying, Problem
from training_lab.record import RunFolder
from training_lab.storage import Patience, Storage, said

SHOWN_NAMES = 4


class Waits(NamedTuple):
    """Seconds between one try and the next: the first, and twice as long each time up to the longest."""

    first_s: float = 2.0
    longest_s: float = 300.0

    def after(self, failures: int) -> float:
        return min(self.first_s * 2.0 ** min(failures - 1, 60), self.longest_s)


class Copier:
    """Keeps copies of a run's folder at `<address>/<run id>`, in a thread of its own that ends with the process."""

    def __init__(
        self,
        folder: RunFolder,
        address: str,
        waits: Waits = Waits(),  # noqa: B008 - immutable
        patience: Patience = Patience(),  # noqa: B008
    ) -> None:
        """Begins at once with what the folder has already. Raises UserError for an address that cannot be one, or
        whose package is not installed; `need_copies` says before whether the storage takes copies."""
        address = Storage(address).address
        self.address = f"{address}/{folder.run_id}"
        self._waits = waits
        self._news: deque[dict[str, Any]] = deque()
        self._copying = Copying(folder, Storage(self.address, patience), self._news.append)
        self._told: set[tuple[str, int | None]] = set()
        self._changed = threading.Condition()
        # Counts of notices: those given, those that the last round saw, and those after which all was copied.
        self._asked, self._tried, self._done = 1, 0, 0
        self._problems: list[Problem] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Says that the folder has changed. Returns at once, whatever the storage does."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def news(self) -> list[dict[str, Any]]:
        """What happened since the last call: facts for the run's events, oldest first."""
        news = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def wait(self, timeout_s: float) -> bool:
        """Waits until all that is in the folder now is copied and verified; False if it is not.

        That is said early when only a person can help, as with credentials that are refused.
        """
        with self._changed:
            self._asked += 1
            wanted = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or self._is_settled(wanted), timeout_s)
            return self._done >= wanted

    def close(self, timeout_s: float) -> list[str]:
        """Waits at most so long until all is copied as it is now, and ends; warnings for what is not copied.

        After it nothing of the folder is written any more, even if the storage never answers.
        """
        if self._is_over:
            return []
        is_done = self.wait(timeout_s)
        with self._changed:
            self._is_over = True
            problems = list(self._problems)
            self._changed.notify_all()
        if not is_done and not problems:
            message = f"{self.address}: not finished within {timeout_s:g} s"
            problems = [Problem("late", None, message, False)]
        if not is_done:
            self._copying.mark(problems)
        warnings = [] if is_done else self._warnings(problems)
        self._copying.end()
        return warnings

    def _warnings(self, problems: list[Problem]) -> list[str]:
        """What is not copied and why, and what to do."""
        folder = self._copying.folder
        general = next((one.message for one in problems if one.update is None), f"{self.address}: not finished")
        own = {one.update: one.message for one in problems if one.update is not None}
        missing = self._copying.unverified_checkpoints()
        warnings = [f"checkpoint {one.update} is not copied: {own[one.update]}" for one in missing if one.update in own]
        rest = [str(one.update) for one in sorted(missing) if one.update not in own]
        record = self._copying.unverified_record()
        subjects = [f"checkpoint{'s' if len(rest) > 1 else ''} {', '.join(rest)}"] if rest else []
        if record:
            shown = ", ".join(record[:SHOWN_NAMES])
            subjects.append(shown + (f" and {len(record) - SHOWN_NAMES} more files" if record[SHOWN_NAMES:] else ""))
        if subjects:
            warnings.append(f"not copied: {'; '.join(subjects)}: {general}")
        if warnings:
            warnings[-1] += f". Keep {folder.path}: it has everything; copy it before the machine is given back"
        return warnings

    def _is_settled(self, wanted: int) -> bool:
        """Whether waiting for the notice number `wanted` makes sense no more."""
        is_hopeless = bool(self._problems) and all(problem.is_lasting for problem in self._problems)
        return self._done >= wanted or (self._tried >= wanted and is_hopeless)

    def _work(self) -> None:
        failures = 0
        while True:
            with self._changed:
                pause_s = self._waits.after(failures) if failures else None
                self._changed.wait_for(lambda: self._is_over or self._asked > self._tried, pause_s)
                if self._is_over:
                    return
                if self._asked > self._tried:  # somebody waits, or saved something: not the time to be slow
                    failures = 0
                wanted = self._asked
            problems = self._round()
            failures = failures + 1 if problems else 0
            with self._changed:
                self._problems, self._tried = problems, wanted
                if not problems:
                    self._done = wanted
                self._changed.notify_all()

    def _round(self) -> list[Problem]:
        """One round; each kind of failure is told once, until it has passed."""
        try:
            problems = self._copying.bring()
            if problems:
                self._copying.mark(problems)
        except Exception as error:  # whatever it is, it must not end the copies of a run that goes on for days
            kind = type(error).__name__
            problems = [Problem(kind, None, f"{self.address}: {kind}: {said(error)}", False)]
        kinds = {(problem.kind, problem.update): problem for problem in problems}
        for key, problem in kinds.items():
            if key not in self._told:
                update = problem.update if problem.update is not None else self._newest_missing()
                self._news.append({"event": "not copied", "update": update, "message": problem.message})
        self._told = set(kinds)
        return problems

    def _newest_missing(self) -> int | None:
        missing = [int(update) for update, one in self._copying.checkpoints.items() if one["state"] != "verified"]
        return max(missing, default=None)

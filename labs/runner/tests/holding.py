"""The runner's command line, held in one phase: `holding.py PHASE before|after COMMAND ...`. It waits there as it waits
for anything else, and says so with a file, so that a test can send it a signal in just this phase."""

from __future__ import annotations

import sys
from pathlib import Path

from experiment_runner import cli, flow


def hold(phase: str, moment: str) -> None:
    """Makes the phase wait, before it does anything or when it has done it all."""
    act = getattr(flow.Flow, f"_{phase}")

    def held(self: flow.Flow) -> None:
        if moment == "after":
            act(self)
        Path("held").touch()
        self.interrupts.sleep(60)
        if moment == "before":
            act(self)

    setattr(flow.Flow, f"_{phase}", held)


if __name__ == "__main__":
    hold(*sys.argv[1:3])
    sys.exit(cli.main(sys.argv[3:]))

"""Where a run is mirrored on Weights & Biases, decided before any work, with the reason; never a prompt.

Standard library only, Python 3.9.
"""

from __future__ import annotations

import importlib.util
import netrc
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from training_lab.config import TrackingConfig
from training_lab.errors import UserError

DEFAULT_PROJECT = "llm-training-lab"
DEFAULT_HOST = "api.wandb.ai"
SHORTEST_KEY = 40
HOW_TO_INSTALL = "pip install 'wandb>=0.31,<0.32'"


class WandbChoice(NamedTuple):
    """Whether and how a run goes to W&B."""

    mode: str
    """`online`, `offline` or `off`."""
    reason: str
    project: str = DEFAULT_PROJECT
    entity: str = ""


class Key(NamedTuple):
    """A W&B key as far as may be told: where it is, and what is wrong with it."""

    place: str
    problem: str


def choose_wandb(
    tracking: TrackingConfig,
    environment: Mapping[str, str],
    home: Path | None = None,
    asked_by: str = "tracking.wandb",
) -> WandbChoice:
    """Decides: what the config says, else WANDB_MODE, else by what is installed and whether there is a key.

    Raises UserError if W&B was asked for and cannot work; `asked_by` is what the person would change then.
    """
    project = tracking.project or environment.get("WANDB_PROJECT", "") or DEFAULT_PROJECT
    entity = tracking.entity or environment.get("WANDB_ENTITY", "")
    wanted: str = tracking.wandb
    said_by = asked_by
    if wanted == "auto":
        from_environment = environment.get("WANDB_MODE", "").strip().lower()
        meanings = {"online": "online", "offline": "offline", "disabled": "off", "dryrun": "offline"}
        if from_environment in meanings:
            wanted, said_by = meanings[from_environment], f"WANDB_MODE={from_environment}"
    is_installed = importlib.util.find_spec("wandb") is not None
    if wanted == "off":
        return WandbChoice("off", f"switched off by {said_by}", project, entity)
    if not is_installed:
        if wanted == "auto":
            return WandbChoice("off", f"wandb is not installed ({HOW_TO_INSTALL})", project, entity)
        raise UserError(f"{said_by}: {wanted} needs wandb: {HOW_TO_INSTALL}")
    if wanted == "offline":
        return WandbChoice("offline", f"asked for by {said_by}", project, entity)
    key = find_key(environment, home or Path.home())
    if key is not None and not key.problem:
        reason = f"a key in {key.place}" if wanted == "auto" else f"asked for by {said_by}, with the key in {key.place}"
        return WandbChoice("online", reason, project, entity)
    problem = f"the key in {key.place} {key.problem}" if key else "there is no key (WANDB_API_KEY, or `wandb login`)"
    if wanted == "online":
        raise UserError(f"{said_by}: online is not possible: {problem}; set one, or {asked_by} to offline")
    return WandbChoice("offline", problem, project, entity)


def find_key(environment: Mapping[str, str], home: Path) -> Key | None:
    """The key that wandb would use; None if there is none."""
    if environment.get("WANDB_API_KEY", "").strip():
        return Key("WANDB_API_KEY", problem_of(environment["WANDB_API_KEY"]))
    host = urlsplit(environment.get("WANDB_BASE_URL", "")).hostname or DEFAULT_HOST
    places = [Path(environment["NETRC"])] if environment.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for path in places:
        try:
            entry = netrc.netrc(str(path)).authenticators(host)
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
        if entry and entry[2]:
            return Key(f"{path.name} for {host}", problem_of(entry[2]))
    return None


def problem_of(key: str) -> str:
    """What is wrong with a key; empty if nothing that can be seen."""
    return "" if len(key.strip()) >= SHORTEST_KEY else f"is malformed: it has fewer than {SHORTEST_KEY} characters"

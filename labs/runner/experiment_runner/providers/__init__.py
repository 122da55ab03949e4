"""Where a job can run. Each provider is chosen by its name, here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

from experiment_runner.errors import InputError
from experiment_runner.job import Job
from experiment_runner.providers.base import Provider
from experiment_runner.providers.host import local_host, ssh_host
from experiment_runner.providers.runpod import Runpod
from experiment_runner.providers.runpod_api import DEFAULT_URL, RunpodApi

ACCOUNT_KEY = "RUNPOD_API_KEY"


def make_provider(job: Job, label: str, keys: Mapping[str, str]) -> Provider:
    """The provider of a job. `keys` has what the person keeps secret; the account's key goes nowhere but to its API.

    Raises InputError for settings that it does not have.
    """
    if job.provider == "runpod":
        key = keys.get(ACCOUNT_KEY, "")
        return Runpod(job, label, RunpodApi(key, keys.get("RUNPOD_API_URL") or DEFAULT_URL) if key else None)
    if job.provider == "ssh":
        return ssh_host(job, label)
    if job.provider == "local":
        return local_host(job, label)
    raise InputError(f"{label}: provider: must be runpod, ssh or local, got {job.provider!r}")

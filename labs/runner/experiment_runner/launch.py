"""The commands for a job, whether one machine does it or several: what is about several is here, the rest in
commands.py. A group's overview stands in for a state file in each."""

from __future__ import annotations

from pathlib import Path

from experiment_runner import commands, group
from experiment_runner.commands import AT_WORK, STATES, Here
from experiment_runner.errors import InputError
from experiment_runner.job import Job, job_from_json
from experiment_runner.keys import secrets_of
from experiment_runner.providers import make_provider
from experiment_runner.providers.host import Host
from experiment_runner.reaching import need_all
from experiment_runner.record import need_own_output
from experiment_runner.state import StateFile
from experiment_runner.together import Member, go_together


def start_run(job: Job, label: str, base: Path, output: str, here: Here, *, is_detached: bool = False) -> int:
    """Runs a job to its end, or with `is_detached` until it is at work. Returns the exit code."""
    if not group.is_group(job):
        return commands.start_run(job, label, base, output, here, is_detached=is_detached)
    jobs, hosts = placed(job, label, here)
    commands.need_good_files(job, label, base, here)
    need_all([(host.described, host, one.node) for host, one in zip(hosts, jobs)])
    master = f"{jobs[0].node.master}, port {jobs[0].node.port}"
    here.console.say(f"{len(hosts)} machines answer; they meet at {master}")
    overview = group.new_overview(STATES, job)
    outputs = [output, *(str(overview.with_suffix("") / f"node-{rank}") for rank in range(1, len(jobs)))]
    files = [commands.make_state(one, base, where, here) for one, where in zip(jobs, outputs)]
    entries = group.write_overview(overview, files, [host.described for host in hosts])
    members = [Member(*one, here) for one in zip(entries, files, jobs, hosts)]
    here.console.say(f"the group's states are named in {overview}")
    return go_together(members, overview, here.console, "", AT_WORK if is_detached else ())


def placed(job: Job, label: str, here: Here) -> tuple[list[Job], list[Host]]:
    """The jobs of a group's machines, and the machines. Nobody is asked anything."""

    def hosts_of(jobs: list[Job]) -> list[Host]:
        hosts = [make_provider(one, label, here.keys) for one in jobs]
        return [host for host in hosts if isinstance(host, Host)]  # no other provider has nodes

    nodes = group.nodes_of(job, label)
    master = nodes.master or hosts_of(group.jobs_of(job, nodes, "")[:1])[0].address()
    jobs = group.jobs_of(job, nodes, master)
    return jobs, hosts_of(jobs)


def describe_dry_run(job: Job, label: str, base: Path, here: Here, more: list[str]) -> int:
    """Shows and checks all that a run would do, and does nothing."""
    if not group.is_group(job):
        return commands.describe_dry_run(job, label, base, here, more)
    jobs, hosts = placed(job, label, here)
    listed = [f"  {rank} {host.described}" for rank, host in enumerate(hosts)]
    meeting = f"they meet at {jobs[0].node.master}, port {jobs[0].node.port}; what follows is node 0's"
    return commands.describe_dry_run(jobs[0], label, base, here, [*more, "", "nodes", *listed, f"  {meeting}"])


def go_on(path: Path, here: Here, act: str = "", output: str = "") -> int:
    """Continues what a state file or an overview stands for. An output is for the first machine's results."""
    found = group.read_overview(path, secrets_of(here.keys))
    if found is None:
        return commands.go_on(path, here, act, output=output)
    members = [member_of(entry, file, here) for entry, file in found]
    if output:
        members[0].file.state.output = output
        need_own_output(members[0].file)
    return go_together(members, path, here.console, act)


def member_of(entry: group.Entry, file: StateFile, here: Here) -> Member:
    """A machine of a group that exists already."""
    label = f"{entry.state}: job"
    job = job_from_json(file.state.job, label)
    return Member(entry, file, job, make_provider(job, label, here.keys), here)


def terminate(path: Path, here: Here, may_lose: bool) -> int:
    """Deletes the machine of a run, or all of a group; asks first if that loses something."""
    found = group.read_overview(path, secrets_of(here.keys))
    if found is None:
        return commands.terminate(path, here, may_lose)
    for entry, file in found:
        commands.need_leave_to_lose(file, entry.state, may_lose)
    return go_on(path, here, "terminate")


def refresh_cost(path: Path, here: Here) -> int:
    """Asks what was really billed. Nobody bills for the machines of a group."""
    if group.read_overview(path, secrets_of(here.keys)) is not None:
        raise InputError(f"{path}: a group's machines are its owner's: nobody bills for them")
    return commands.refresh_cost(path, here)

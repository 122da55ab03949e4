"""The commands: what they do, apart from how they are typed."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from experiment_runner.bundle import Bundle, gather
from experiment_runner.console import Console
from experiment_runner.errors import InputError, RunnerError
from experiment_runner.flow import Flow
from experiment_runner.interrupts import Interrupts
from experiment_runner.job import Job, job_from_json
from experiment_runner.keys import ENV_FILE, find_keys, missing_keys, secrets_of
from experiment_runner.providers import ACCOUNT_KEY, make_provider
from experiment_runner.providers.base import Machine, Plan, Provider
from experiment_runner.record import exit_code, keep_record, need_own_output, summary_of
from experiment_runner.state import StateFile, created_and_deadline, load_state, new_state, utc_now

STATES = Path(".runpod")
RUNS = ".runs/{id}"
SSH_TOOLS = ("ssh", "ssh-keygen", "ssh-keyscan")
AT_WORK = ("running", "finished")
Done = Callable[[StateFile], None]
"""Called with a run's state when a command is through with it."""


class Here(NamedTuple):
    """What every command has."""

    console: Console
    keys: Mapping[str, str]
    done: Done


def here(console: Console, done: Done) -> Here:
    """Reads the keys."""
    return Here(console, find_keys(Path.cwd(), console.warn), done)


def start_run(job: Job, label: str, base: Path, output: str, here: Here, *, is_detached: bool = False) -> int:
    """Runs a job to its end, or with `is_detached` until it is at work. Returns the exit code."""
    provider = make_provider(job, label, here.keys)
    need_good_files(job, label, base, here)
    provider.need()
    plan = provider.plan()
    need_budget(job, plan)
    for note in plan.notes:
        here.console.say(f"note: {note}")
    file = make_state(job, base, output, here)
    return drive(file, job, provider, here, AT_WORK if is_detached else ())


def need_good_files(job: Job, label: str, base: Path, here: Here) -> None:
    """Raises InputError for what must not be sent, and says which secrets are missing."""
    secrets = secrets_of(here.keys)
    refuse_secrets(job, label, secrets.find)
    for name in missing_keys(job.secret_names, here.keys):
        here.console.warn(f"{name} is not set: the steps that name it run without it")
    gather(job.files, base, secrets)


def make_state(job: Job, base: Path, output: str, here: Here) -> StateFile:
    """The state of a run that begins, on disk."""
    file = new_state(STATES, job.to_json(), base.resolve(), output, job.limits.max_hours, secrets_of(here.keys))
    need_own_output(file)
    file.save()
    return file


def refuse_secrets(job: Job, label: str, find: Callable[[str], list[str]]) -> None:
    """Raises InputError if the job itself holds a secret: it is written down."""
    found = find(json.dumps(job.to_json(), ensure_ascii=False))
    if found:
        raise InputError(
            f"{label}: holds a secret ({', '.join(found)}); take it out, and name it in a step's `secrets`"
        )


def drive(
    file: StateFile, job: Job, provider: Provider, here: Here, until: tuple[str, ...] = (), act: str = "",
    interrupts: Interrupts | None = None,
) -> int:  # fmt: skip
    """Takes a run further, says how it ended, and returns the exit code."""
    console = here.console
    with interrupts or Interrupts(console.say) as interrupts, file.lock():
        flow = Flow(file, job, provider, here.keys, console, interrupts)
        failure: RunnerError | None = None
        is_interrupted = False
        try:
            getattr(flow, act)() if act else flow.run(until)
        except KeyboardInterrupt:
            is_interrupted = True
            console.warn("left as it is, as you asked")
        except RunnerError as error:
            failure = error
            file.state.message = str(error)
        except OSError as error:
            failure = RunnerError(f"{error.filename or 'the system'}: {error.strerror}")
        except Exception as error:  # a fault of ours must not hide that a machine costs money
            traceback.print_exc()
            failure = RunnerError(f"a fault of the runner: {type(error).__name__}: {error}")
        here.done(file)
        is_interrupted = is_interrupted or interrupts.count > 0
    state = file.state
    code = exit_code(state, is_interrupted)
    if failure is not None:
        code = code if code == 30 else failure.exit_code if state.phase in ("refused", "planned") else code or 20
        console.error(str(failure))
    values = {"code": code, "run": state.run, "verdicts": state.verdicts, "state": str(file.path), "cost": state.cost}
    console.summary(values, summary_of(file, provider.console_url(flow.machine.id)))
    return code


def go_on(path: Path, here: Here, act: str = "", until: tuple[str, ...] = (), output: str = "") -> int:
    """Continues the run of a state file."""
    file = load_state(path, secrets_of(here.keys))
    label = f"{path}: job"
    job = job_from_json(file.state.job, label)
    if output:
        file.state.output = output
        need_own_output(file)
    return drive(file, job, make_provider(job, label, here.keys), here, until, act)


def terminate(path: Path, here: Here, may_lose: bool) -> int:
    """Deletes a run's machine; asks first if that loses something."""
    need_leave_to_lose(load_state(path, secrets_of(here.keys)), path, may_lose)
    return go_on(path, here, "terminate")


def need_leave_to_lose(file: StateFile, path: Path, may_lose: bool) -> None:
    """Raises InputError if results would be lost with a run's machine, and the person does not agree to that."""
    state = file.state
    loses = state.verdicts["results"] != "verified" and state.verdicts["job"] != "none" and not state.has_ended
    if loses and not may_lose:
        question = f"The results of {state.run} are not all here ({state.verdicts['results']}). Delete its machine?"
        if not sys.stdin.isatty() or input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
            raise InputError(f"{path}: the results are not all here ({state.verdicts['results']}): fetch them with "
                             "`collect`, or give --yes to lose them")  # fmt: skip


def terminate_by_id(provider: Provider, machine_id: str, here: Here) -> int:
    """Deletes a machine of ours that has no state file any more."""
    machine = next((machine for machine in provider.owned() if machine.id == machine_id), None)
    if machine is None:
        raise InputError(f"{machine_id}: no machine of this runner has that id; `ls` shows them")
    return 0 if remove(provider, machine, here.console) else 30


def remove(provider: Provider, machine: Machine, console: Console, pause_s: float = 5.0) -> bool:
    """Deletes a machine and looks whether it is gone."""
    provider.delete(machine.id)
    for _ in range(24):
        if provider.is_gone(machine.id):
            console.say(f"{machine.name} ({machine.id}) is deleted, and that was verified")
            return True
        time.sleep(pause_s)
    console.warn(f"{machine.name} ({machine.id}) does not go away: {provider.console_url(machine.id)}")
    return False


def list_machines(provider: Provider, here: Here) -> int:
    """Prints the machines with names of ours, and what this computer knows of each. 30 if one may cost money."""
    machines, known = provider.owned(), known_runs()
    if not machines:
        here.console.say("no machine of this runner exists")
    for machine in sorted(machines, key=lambda machine: machine.name):
        rate = f"{machine.usd_per_hour:g} USD/h" if provider.is_paid else "no cost"
        whose = str(known[machine.name]) if machine.name in known else "no state file here"
        late = ", its time is over" if is_late(machine.name) else ""
        here.console.say(f"{machine.id}  {machine.said}  {rate}  {machine.name}{late}  {whose}")
    return 30 if provider.is_paid and any(machine.status != "stopped" for machine in machines) else 0


def collect_garbage(provider: Provider, here: Here, is_meant: bool) -> int:
    """Deletes the machines of ours whose time is over and for which no run is at work here; without `is_meant` it only
    says which. Touches nothing else."""
    late = [machine for machine in provider.owned() if is_late(machine.name)]
    if not late:
        here.console.say("nothing to remove: no machine of this runner is over its time")
        return 0
    if not is_meant:
        for machine in late:
            here.console.say(f"would delete {machine.id}  {machine.said}  {machine.name}")
        here.console.say("nothing was touched; --yes deletes them, with what is on their disks")
        return 30 if provider.is_paid else 0
    gone = [remove(provider, machine, here.console) for machine in late]
    return 0 if all(gone) else 30


def is_late(name: str) -> bool:
    """Whether a machine's name says that its time is over."""
    times = created_and_deadline(name)
    return times is not None and times[1] < time.time()


def known_runs() -> dict[str, Path]:
    """The runs with a state file here, by name."""
    return {path.stem: path for path in STATES.glob("exp-*.json")}


def refresh_cost(path: Path, here: Here) -> int:
    """Asks what was really billed, and adds it to the state and the record."""
    file = load_state(path, secrets_of(here.keys))
    job = job_from_json(file.state.job, f"{path}: job")
    bill = make_provider(job, str(path), here.keys).bill(str(file.state.resource.get("id", "")))
    if bill is None:
        here.console.say("nobody bills for this machine")
        return 0
    with file.lock():
        file.state.cost["billed"] = {**bill, "utc": utc_now()}
        keep_record(file)
        here.done(file)
    cost = file.state.cost
    said = f"{bill['usd']:.4f} USD billed in {bill['num_records']} records"
    late = "" if bill["num_records"] else "; bills come some time after the run: ask again later"
    here.console.say(f"{said}, {cost['estimated_usd']:.4f} USD estimated{late}")
    return 0


def describe_dry_run(job: Job, label: str, base: Path, here: Here, more: list[str]) -> int:
    """Shows and checks all that a run would do, and does nothing."""
    secrets = secrets_of(here.keys)
    refuse_secrets(job, label, secrets.find)
    provider = make_provider(job, label, here.keys)
    bundle = gather(job.files, base, secrets)
    plan = provider.plan()
    lines = [f"Dry run of {job.name} on {job.provider}: nothing is made", *more, *describe_bundle(bundle), "", "steps"]
    for step in job.steps:
        has = [name for name in step.secrets if here.keys.get(name)]
        lacks = [f"{name} (not set)" for name in step.secrets if not here.keys.get(name)]
        secret = f"  secrets: {', '.join(has + lacks)}" if step.secrets else ""
        lines += [f"  {step.name} (at most {step.timeout:g} s, in {step.cwd}){secret}", f"    {step.run}"]
    request = json.dumps(plan.request, indent=2, ensure_ascii=False).splitlines()
    lines += ["", "request", *(f"  {line}" for line in request), "", "limits"]
    lines += [f"  {name}: {value:g}" for name, value in job.to_json()["limits"].items()]
    lines += ["", *describe_price(job, plan), *(f"note: {note}" for note in plan.notes)]
    text = secrets.redact("\n".join(lines))
    values = {"job": job.to_json(), "files": bundle.manifest(), "sha256": bundle.sha256, "request": plan.request}
    here.console.summary({**values, "candidates": [one._asdict() for one in plan.candidates]}, text.splitlines())
    return 0


def describe_bundle(bundle: Bundle) -> list[str]:
    """Each file with its size and hash."""
    lines = ["", f"files: {len(bundle.files)}, {bundle.num_bytes:,} bytes, SHA-256 over all {bundle.sha256}"]
    return [*lines, *(f"  {file.sha256[:12]}  {len(file.content):>9,}  {file.path}" for file in bundle.files)]


def describe_price(job: Job, plan: Plan) -> list[str]:
    """What it would cost at the worst. Raises InputError where the limits leave less than an hour."""
    lines = []
    limits = job.limits
    for candidate in plan.candidates:
        if candidate.usd_per_hour is None:
            lines.append(f"price     {candidate.name}: not known; at most {limits.max_usd:g} USD by limits.max_usd")
            continue
        need_budget(job, plan)
        worst = min(limits.max_usd, candidate.usd_per_hour * limits.max_hours)
        stock = {None: "", True: "", False: ", none free now"}[candidate.is_available]
        lines.append(
            f"price     {candidate.name}: {candidate.usd_per_hour:g} USD an hour{stock}; at the worst {worst:.2f} USD"
        )
    return lines


def need_budget(job: Job, plan: Plan) -> None:
    """Raises InputError if no candidate can be paid for an hour."""
    prices = [candidate.usd_per_hour for candidate in plan.candidates if candidate.usd_per_hour is not None]
    if prices and min(prices) > job.limits.max_usd:
        raise InputError(
            f"limits.max_usd = {job.limits.max_usd:g} is less than one hour's price, {min(prices):g} USD; raise it, or "
            "choose a cheaper machine"
        )


def doctor(provider_of: Callable[[], Provider], here: Here) -> int:
    """Says what works here and what does not. 0 if nothing is missing, else 1."""
    checks = [
        (f"Python {platform.python_version()}", sys.version_info >= (3, 9), "needs 3.9 or newer"),
        *((tool, shutil.which(tool) is not None, "install OpenSSH's client") for tool in SSH_TOOLS),
        (f"{ENV_FILE} or environment has {ACCOUNT_KEY}", bool(here.keys.get(ACCOUNT_KEY)), "see .env.example"),
    ]  # fmt: skip
    num_bad = 0
    for what, is_good, advice in checks:
        num_bad += not is_good
        here.console.say(f"{'ok ' if is_good else 'BAD'}  {what}" + ("" if is_good else f": {advice}"))
    ssh = shutil.which("ssh")
    if ssh:
        said = subprocess.run([ssh, "-V"], capture_output=True, check=False).stderr.decode("utf-8", "replace").strip()
        here.console.say(f"ok   {said}")
    if here.keys.get(ACCOUNT_KEY):
        try:
            machines = provider_of().owned()
            here.console.say(f"ok   the API answers and takes the key; {len(machines)} machines of this runner exist")
        except RunnerError as error:
            num_bad += 1
            here.console.say(f"BAD  {error}")
    return 1 if num_bad else 0

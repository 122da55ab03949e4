"""What goes wrong before a machine runs commands: prices, capacity, refusals, answers that are none, boots that never
end. Nothing is made twice, and nothing that was made is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
from fakefaults import Reply
from fakerunpod import NO_INSTANCES
from lab import GPU, Lab, one_line, says

OTHER = "NVIDIA GeForce RTX 4090"
HTML = Reply(503, body=b"<html><title>Bad gateway</title></html>", content_type="text/html")
NONE, DELETED = ("none", "none", "none"), ("none", "none", "deleted_verified")


def test_without_a_fault_everything_comes_home(lab: Lab) -> None:
    outcome = lab.run()
    assert outcome.code == 0, outcome
    lab.check_whole()
    assert lab.phases() == [
        "creating", "booting", "ready", "uploading", "running", "finished", "collecting", "collected", "deleting",
        "done",
    ]  # fmt: skip
    assert not list((lab.folder / ".runpod").glob("*/id_ed25519*")), "the key of a machine that is gone is forgotten"
    body = lab.fake.pod.body
    assert body["gpu"] == {"id": GPU, "count": 1, "minCudaVersion": "12.8"}
    assert body["mounts"]["persistent"]["path"] == str(lab.folder / "volume")
    assert set(body["env"]) == {"PUBLIC_KEY"}
    assert body["name"] == lab.state["run"]


class Case(NamedTuple):
    """A fault, and how the run must end."""

    arrange: Callable[[Lab], object]
    code: int
    error: str
    verdicts: tuple[str, str, str] = NONE


def script(operation: str, *replies: Reply) -> Callable[[Lab], object]:
    return lambda lab: lab.fake.script(operation, *replies)


def always(operation: str, reply: Reply) -> Callable[[Lab], object]:
    return lambda lab: lab.fake.always(operation, reply)


def without(status: str) -> Callable[[Lab], object]:
    def arrange(lab: Lab) -> None:
        lab.fake.stuck_at = status

    return arrange


def options(**given: object) -> Callable[[Lab], object]:
    return lambda lab: lab.fake.pod_options.update(given)


def system_says(line: str) -> Callable[[Lab], object]:
    def arrange(lab: Lab) -> None:
        lab.fake.stuck_at = "STARTING"
        lab.job["limits"]["boot"] = 60
        lab.fake.pod_options["system_lines"] = [line]

    return arrange


def price(rate: float) -> Callable[[Lab], object]:
    def arrange(lab: Lab) -> None:
        lab.fake.price_override = rate

    return arrange


REFUSED = {
    "no capacity": Case(script("create", Reply(400, NO_INSTANCES)), 40, "no machine: .*no longer any instances"),
    "a host without the resources": Case(
        script("create", Reply(400, "This machine does not have the resources to deploy your pod.")), 40, "no machine"
    ),
    "no balance": Case(script("create", Reply(402, "insufficient funds")), 50, "HTTP 402: .*balance"),
    "a pool that is not allowed": Case(script("create", Reply(403, "pool not allowed")), 40, "pool not allowed"),
    "an unknown volume": Case(script("create", Reply(404, "network volume not found")), 50, "volume not found"),
    "too large a body": Case(script("create", Reply(413, "body too large")), 50, "HTTP 413"),
    "a field that is wrong": Case(
        script("create", Reply(422, "invalid", body=b'{"title": "x", "status": 422, "detail": "invalid", '
                               b'"errors": ["$.gpu.bogus: unknown"]}')), 50, r"HTTP 422: invalid; \$\.gpu\.bogus"
    ),
    "another refusal": Case(script("create", Reply(400, "gpu and cpu exclude each other")), 50, "exclude each other"),
    "a key that is not accepted": Case(always("gpus", Reply(401, "unauthorized")), 50, "HTTP 401: .*RUNPOD_API_KEY"),
    "a key without the right": Case(always("gpus", Reply(403, "forbidden")), 50, "HTTP 403: .*right"),
    "the edge that dislikes the program": Case(
        always("gpus", Reply(403, body=b"error code: 1010", content_type="text/plain")), 50, "refused the program, not"
    ),
    "a retired API": Case(always("gpus", Reply(410, "Gone")), 50, "HTTP 410: .*retired"),
    "a web page as catalog": Case(always("gpus", HTML), 50, r"a web page \(Bad gateway\)"),
    "garbage as catalog": Case(always("gpus", Reply(200, body=b"[[", content_type="application/json")), 50,
                               "instead of JSON"),
    "a catalog without GPUs": Case(always("gpus", Reply(200, body=b"{}")), 50, "the catalog has no GPUs"),
    "the account asked too often": Case(always("gpus", Reply(429, "slow down", headers={"Retry-After": "0"})), 50,
                                        "HTTP 429: .*too many requests"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_line_and_nothing_is_made(name: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiment_runner.providers.runpod_api.time.sleep", lambda seconds: None)
    case = REFUSED[name]
    case.arrange(lab)
    outcome = lab.run()
    assert outcome.code == case.code, outcome
    assert says(outcome, case.error), outcome
    one_line(outcome.err)
    assert (lab.fake.creates, lab.fake.billing_now()) == (0, [])
    if list((lab.folder / ".runpod").glob("exp-*.json")):
        assert lab.verdicts == NONE


def test_the_next_part_is_taken_where_one_may_be(lab: Lab) -> None:
    lab.runpod["gpus"] = [GPU, OTHER]
    lab.fake.script("create", Reply(400, NO_INSTANCES))
    outcome = lab.run()
    assert outcome.code == 0
    assert lab.state["resource"]["gpu"] == OTHER
    assert says(outcome, "more than one GPU is allowed")


def test_a_422_is_never_tried_again(lab: Lab) -> None:
    lab.runpod["gpus"] = [GPU, OTHER]
    lab.fake.always("create", Reply(422, "no"))
    assert lab.run().code == 50
    assert sum(request.method == "POST" for request in lab.fake.requests) == 1


def test_a_429_is_waited_for_as_long_as_it_says(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("experiment_runner.providers.runpod_api.RunpodApi.pause", lambda self, s: waited.append(s))
    lab.fake.script("create", Reply(429, "slow", headers={"Retry-After": "7"}),
                    Reply(429, "slow", headers={"RateLimit": '"minute";r=0;t=12, "hour";r=3;t=999'}))  # fmt: skip
    assert lab.run().code == 0
    assert waited[:2] == [7.0, 12.0]


AMBIGUOUS = {
    "an error after the pod was made": Reply(500, "internal", perform=True),
    "a web page after the pod was made": replace(HTML, perform=True),
    "no answer after the pod was made": Reply(perform=True, drop=True),
    "nonsense after the pod was made": Reply(200, body=b"{}", perform=True),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_pod_that_was_made_without_an_answer_is_found_by_its_name(name: str, lab: Lab) -> None:
    lab.fake.create_listed_after_polls = 2
    lab.fake.script("create", AMBIGUOUS[name])
    outcome = lab.run()
    assert outcome.code == 0, outcome
    lab.check_whole()
    assert lab.fake.creates == 1


@pytest.mark.parametrize(
    "reply", [Reply(500, "internal"), Reply(drop=True), HTML], ids=["500", "dropped", "a web page"]
)
def test_where_nobody_can_tell_the_code_says_that_money_may_be_spent(reply: Reply, lab: Lab) -> None:
    lab.fake.script("create", reply)
    outcome = lab.run()
    assert outcome.code == 30
    assert "look again with `ls`" in one_line(outcome.err).lower()
    assert lab.verdicts == ("none", "none", "maybe")
    assert sum(request.method == "POST" for request in lab.fake.requests) == 1, "no second create"


BOOTS = {
    "provisioning for ever": Case(without("PROVISIONING"), 40, "the machine is PROVISIONING", DELETED),
    "starting for ever": Case(without("STARTING"), 40, "the machine is STARTING", DELETED),
    "an error of the machine": Case(without("ERROR"), 40, "the machine is ERROR", DELETED),
    "a driver that is too old": Case(
        system_says("nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8"), 40,
        "unsatisfied condition: cuda", DELETED,
    ),
    "an image that is asked for too often": Case(
        system_says("error pulling image: toomanyrequests: You have reached your pull rate limit"), 40,
        "toomanyrequests", DELETED,
    ),
    "no SSH server": Case(options(no_sshd=True), 40, "did not become ready", DELETED),
    "a log without the host key": Case(options(silent=True), 40, "has not printed its host key", DELETED),
    "another host key than the printed one": Case(options(wrong_host_key=True), 40, "did not become ready", DELETED),
    "a price above the ceiling": Case(price(9.5), 40, "costs 9.5 USD an hour, and 4 are allowed", DELETED),
    "no Python": Case(lambda lab: lab.runpod.update(python="no-python-3"), 40, "no-python-3", DELETED),
}  # fmt: skip


@pytest.mark.parametrize("name", BOOTS)
def test_a_machine_that_is_of_no_use_is_given_back(name: str, lab: Lab) -> None:
    case = BOOTS[name]
    lab.job["limits"].update(boot=2, silence=1, reconnect=1)
    case.arrange(lab)
    outcome = lab.run()
    assert outcome.code == case.code, outcome
    assert says(outcome, case.error), outcome
    assert lab.fake.billing_now() == []
    assert lab.verdicts == case.verdicts


def test_a_word_for_a_status_that_nobody_knows_is_no_error(lab: Lab) -> None:
    lab.fake.status_override["*"] = "MIGRATING"
    lab.job["limits"]["boot"] = 1
    outcome = lab.run()
    assert outcome.code == 40
    assert says(outcome, "the machine is MIGRATING")


def test_a_pod_that_vanishes_while_it_boots_is_said_to_be_gone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.fake.stuck_at = "STARTING"
    lab.job["limits"]["boot"] = 30
    monkeypatch.setattr("experiment_runner.flow.BOOT_LOG_EVERY", 1)

    def vanish(_: object, pod: str) -> str:
        lab.fake.delete(pod)
        return ""

    monkeypatch.setattr("experiment_runner.providers.runpod.Runpod.boot_problem", vanish)
    outcome = lab.run()
    assert outcome.code == 40, outcome
    assert lab.verdicts == ("none", "none", "gone_externally")


def test_a_catalog_price_above_the_ceiling_makes_nothing(lab: Lab) -> None:
    lab.job["limits"]["max_usd_per_hour"] = 1
    outcome = lab.run()
    assert outcome.code == 40
    assert "costs 2.99 USD an hour, and 1 are allowed" in one_line(outcome.err)
    assert lab.fake.creates == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"gpus": ["NVIDIA H100 80GB HBM2"]}, "HBM2'; the nearest is 'NVIDIA H100 80GB HBM3'"),
        ({"gpu_count": 999}, "at most"),
        ({"gpuz": []}, "settings.runpod.gpuz: unknown key; the nearest is settings.runpod.gpus"),
        ({"volume_gb": 5}, "volume_gb: must be at least 10, got 5: without it a stop loses everything"),
        ({"min_cuda": "twelve"}, "min_cuda: must be a version such as 12.8"),
        ({"cloud": "CLOUD9"}, "cloud: must be SECURE or COMMUNITY"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arguments", [(), ("--dry-run",)])
def test_settings_that_are_wrong_are_said_before_anything(
    change: dict[str, object], error: str, arguments: tuple[str, ...], lab: Lab
) -> None:
    lab.runpod.update(change)
    outcome = lab.run(*arguments)
    assert outcome.code == 2
    assert error in one_line(outcome.err)
    assert lab.fake.creates == 0
    assert not (lab.folder / ".runpod").exists()


def test_a_network_volume_is_mounted_where_the_work_is_and_outlives_the_pod(lab: Lab) -> None:
    lab.fake.network_volumes.add("vol-1")
    lab.runpod["network_volume"] = "vol-1"
    lab.runpod["data_centers"] = ["us-ks-2"]
    assert lab.run().code == 0
    body = lab.fake.pod.body
    assert body["mounts"] == {"network": [{"volumeId": "vol-1", "path": str(lab.folder / "volume")}]}
    assert body["dataCenterIds"] == ["US-KS-2"], "small letters are not understood"
    assert (lab.folder / "volume").is_dir()


def test_a_budget_below_one_hour_is_refused(lab: Lab) -> None:
    lab.job["limits"]["max_usd"] = 2
    outcome = lab.run()
    assert outcome.code == 2
    assert "limits.max_usd = 2 is less than one hour's price, 2.99 USD" in one_line(outcome.err)
    assert not (lab.folder / ".runpod").exists()


def test_the_dry_run_shows_all_and_makes_nothing(lab: Lab) -> None:
    outcome = lab.run("--dry-run")
    assert outcome.code == 0
    for part in (
        "work.py",
        '"minCudaVersion": "12.8"',
        "2.99 USD an hour; at the worst 8.97 USD",
        "MY_TOKEN",
        "cat extra",
    ):
        assert part in outcome.out
    assert lab.fake.creates == 0
    assert not (lab.folder / ".runpod").exists()

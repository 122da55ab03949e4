"""What goes wrong when a machine is to go: deletions that fail or are not seen, stops that are refused, orphans. A
machine that may cost money is never called gone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from fakefaults import Reply
from fakerunpod import NO_INSTANCES
from lab import GPU, Lab, one_line, says, when_the_log_has


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer looks, so that giving up takes less time."""
    monkeypatch.setattr("experiment_runner.tenancy.DELETE_POLLS", 6)
    monkeypatch.setattr("experiment_runner.providers.runpod_api.RunpodApi.pause", lambda self, seconds: None)


def make_other_pod(lab: Lab, name: str) -> str:
    """A pod in the account that this run did not make."""
    body = {"name": name, "image": "other", "gpu": {"id": GPU, "count": 1}, "disk": 10, "ports": ["22/tcp"]}
    lab.others.append(str(lab.fake_api().call("POST", "/pods", body).body["id"]))
    return lab.others[-1]


def test_a_pod_that_is_listed_for_a_while_after_its_deletion(lab: Lab) -> None:
    lab.fake.deleted_listed_polls = 3
    assert lab.run().code == 0
    lab.check_whole()
    assert lab.state["deleted"]["times"] == 2


def test_a_pod_that_answers_for_a_while_after_its_deletion(lab: Lab) -> None:
    lab.fake.deleted_get_polls = 3
    assert lab.run().code == 0
    assert lab.state["deleted"]["lookup"] in ("not found", "TERMINATED")


def test_a_deletion_that_fails_once_is_tried_again(lab: Lab, quick: None) -> None:
    lab.fake.script("delete", Reply(500, "internal"), Reply(drop=True))
    assert lab.run().code == 0
    lab.check_whole()


def test_a_deletion_that_always_fails_says_what_goes_on_costing(lab: Lab, quick: None) -> None:
    lab.fake.always("delete", Reply(500, "internal"))
    outcome = lab.run()
    assert outcome.code == 30
    assert lab.verdicts == ("succeeded", "verified", "delete_unverified")
    pod = lab.fake.pod.id
    assert says(outcome, "THE MACHINE MAY STILL COST MONEY: .* 2.99 USD an hour")
    assert f"https://console.runpod.io/pods?id={pod}" in outcome.out
    assert f"terminate {lab.state_path.relative_to(lab.folder)}" in outcome.out
    lab.fake.never("delete")
    assert lab.again("terminate").code == 0
    assert lab.verdicts[2] == "deleted_verified"


def test_a_listing_that_fails_proves_nothing(lab: Lab, quick: None) -> None:
    lab.fake.always("list", Reply(500, "internal"))
    outcome = lab.run()
    assert outcome.code == 30
    assert lab.verdicts[2] == "delete_unverified"
    lab.fake.never("list")
    assert lab.again("monitor").code == 0


def test_a_page_that_is_missing_from_the_listing_proves_nothing(lab: Lab, quick: None) -> None:
    lab.fake.always("list", Reply(200, body={"pods": [], "pagination": {"hasNextPage": True, "nextCursor": "x"}}))
    lab.fake.problems.clear()
    lab.fake.always("list", Reply(200, body=b"{}"))
    assert lab.run().code == 30


def test_a_pod_that_survives_its_deletion_is_seen_in_the_listing(lab: Lab, quick: None) -> None:
    lab.fake.always("delete", Reply(204))
    outcome = lab.run()
    assert outcome.code == 30
    assert lab.verdicts[2] == "delete_unverified"
    assert lab.fake.billing_now() == [lab.fake.pod.id]


@pytest.mark.parametrize("status", [400, 409])
def test_a_stop_that_is_refused_because_it_stopped_already_is_a_stop(status: int, lab: Lab, quick: None) -> None:
    lab.work("pass")
    lab.fake.script("stop", Reply(status, "not valid now", perform=True))
    assert lab.run().code == 20
    assert lab.verdicts == ("succeeded", "partial", "stopped")


@pytest.mark.parametrize("status", [400, 409, 500])
def test_a_stop_that_never_works_says_what_goes_on_costing(status: int, lab: Lab, quick: None) -> None:
    lab.work("pass")
    lab.fake.always("stop", Reply(status, "no"))
    outcome = lab.run()
    assert outcome.code == 30
    one_line(outcome.err)
    assert says(outcome, "THE MACHINE MAY STILL COST MONEY")
    assert lab.verdicts == ("succeeded", "partial", "running")
    lab.fake.never("stop")
    assert lab.again("stop").code == 20
    assert lab.fake.billing_now() == []


def test_a_start_without_a_free_gpu_leaves_it_stopped(lab: Lab, quick: None) -> None:
    lab.work("pass")
    assert lab.run().code == 20
    lab.fake.script("start", Reply(400, "There are not enough free GPUs on the host machine to start this pod."))
    outcome = lab.again("start")
    assert outcome.code == 20, outcome
    assert "no free GPU now" in one_line(outcome.err)
    assert lab.verdicts[2] == "stopped"
    assert lab.again("start").code == 30, "it runs now, and costs money"
    assert lab.again("terminate", "--yes").code == 20


def test_a_new_port_and_an_old_one_in_the_answer_after_a_start(lab: Lab, quick: None) -> None:
    lab.work("pass")
    assert lab.run().code == 20
    old = json.loads((lab.state_path).read_text())["resource"]["ssh"]["port"]
    lab.fake.old_port_polls = 3
    assert lab.again("start").code == 30
    assert lab.state["resource"]["ssh"]["port"] != old
    assert lab.again("collect").code == 30
    assert lab.again("terminate", "--yes").code == 20


def test_a_host_key_of_the_image_that_changes_at_a_start_is_learned_anew(lab: Lab, quick: None) -> None:
    lab.runpod["start"] = ""
    lab.work("pass")
    assert lab.run().code == 20
    before = lab.state["resource"]["host_key_sha256"]
    assert "fingerprint was printed by the container" in lab.state["resource"]["host_key"]
    assert lab.again("start").code == 30
    assert lab.state["resource"]["host_key_sha256"] != before
    assert lab.again("terminate", "--yes").code == 20


def test_terminate_asks_before_results_are_lost(lab: Lab, quick: None) -> None:
    lab.work("pass")
    assert lab.run().code == 20
    refused = lab.again("terminate")
    assert refused.code == 2
    assert "fetch them with `collect`, or give --yes" in one_line(refused.err)
    assert lab.fake.pod.status == "EXITED"
    assert lab.again("terminate", "--yes").code == 20
    assert lab.verdicts[2] == "deleted_verified"
    assert lab.again("terminate").code == 20, "a second time changes nothing"
    assert lab.again("monitor").code == 20
    assert says(lab.again("collect"), "the machine is gone")


def test_somebody_elses_machines_are_never_touched(lab: Lab, quick: None) -> None:
    others = [make_other_pod(lab, name) for name in ("training", "exp-", "exp-a-b-c-d", "expensive-1-2-3-12345678")]
    assert lab.command("ls").code == 0
    assert lab.command("gc", "--yes").code == 0
    assert lab.command("terminate", "--id", others[0], "--yes").code == 2
    lab.fake.page_size = 1
    assert lab.run().code == 0
    assert all(not lab.fake.pods[pod].is_deleted for pod in others)


def test_an_orphan_is_found_by_its_name_and_removed_when_its_time_is_over(lab: Lab, quick: None) -> None:
    now = int(time.time())
    young = make_other_pod(lab, f"exp-small-{now}-{now + 1000}-0123abcd")
    old = make_other_pod(lab, f"exp-small-{now - 2000}-{now - 1000}-0123abcd")
    listed = lab.command("ls")
    assert listed.code == 30
    assert says(listed, f"{old} .*its time is over.*no state file here")
    assert says(listed, f"{young} .*no state file here")
    assert lab.command("gc").code == 30
    assert not lab.fake.pods[old].is_deleted, "without --yes nothing is touched"
    assert says(lab.command("gc"), "nothing was touched")
    lab.command("gc", "--yes")
    assert lab.fake.pods[old].is_deleted
    assert not lab.fake.pods[young].is_deleted, "somebody may still be at work with it"
    assert lab.command("terminate", "--id", young).code == 2, "without --yes"
    assert lab.command("terminate", "--id", young, "--yes").code == 0
    assert lab.fake.pods[young].is_deleted


def test_a_pod_for_which_nobody_comes_stops_itself_and_its_results_can_be_fetched_later(lab: Lab) -> None:
    lab.job["limits"]["collect_grace"] = 0.5
    assert lab.run("--detach").code == 30
    assert lab.state["facts"]["guard"] == "armed"
    deadline = time.monotonic() + 30
    while lab.fake.billing_now() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert lab.fake.billing_now() == [], "it stopped itself, with the key that it has for itself alone"
    assert not any(lab.fake.key in request.headers.get("authorization", "") for request in lab.fake.requests
                   if request.path == "/graphql")  # fmt: skip
    assert lab.again("monitor").code == 20
    assert lab.verdicts[2] == "stopped"
    assert lab.again("start").code == 30
    assert lab.again("monitor").code == 0
    lab.check_whole()


def test_a_pod_does_not_stop_itself_while_somebody_is_there(lab: Lab) -> None:
    lab.job["limits"]["collect_grace"] = 5
    lab.work("open(f'{results}/answer.txt', 'wb').write(os.urandom(12_000_000))\nprint('line', flush=True)")
    thread = when_the_log_has(lab, "line", lambda: lab.fake.pod.proxy.throttle(1e6))
    outcome = lab.run()
    thread.join()
    assert outcome.code == 0, outcome
    assert not any(request.path == "/graphql" for request in lab.fake.requests)


def test_a_pod_without_a_key_of_its_own_is_said_to_be_unprotected(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    helpless = lab.folder.parent / "guard.py"
    helpless.write_text("raise SystemExit(1)\n")
    monkeypatch.setattr("experiment_runner.providers.runpod.GUARD", helpless)
    outcome = lab.run()
    assert outcome.code == 0
    assert says(outcome, "nothing protects you if this computer goes away")
    assert lab.state["facts"]["guard"] == "none"


def test_what_was_billed_comes_into_the_record_later(lab: Lab, quick: None) -> None:
    assert lab.run().code == 0
    lab.fake.script("billing", Reply(200, body={
        "records": [], "metadata": {"query": {}, "recordCount": 0, "uniquePodCount": 0, "totals": {}},
    }))  # fmt: skip
    assert says(lab.again("cost"), "bills come some time after the run")
    assert lab.again("cost").code == 0
    record = json.loads((lab.home / "remote.json").read_text())
    assert record["cost"]["billed"]["num_records"] >= 1
    assert record["cost"]["estimated_usd"] > 0


def test_no_capacity_afterwards_is_no_matter(lab: Lab) -> None:
    assert lab.run().code == 0
    lab.fake.always("create", Reply(400, NO_INSTANCES))
    assert lab.again("monitor").code == 0


def test_doctor_says_what_is_missing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    good = lab.command("doctor")
    assert good.code == 0
    assert says(good, "the API answers and takes the key")
    lab.fake.always("list", Reply(401, "unauthorized"))
    assert lab.command("doctor").code == 1
    monkeypatch.delenv("RUNPOD_API_KEY")
    assert says(lab.command("doctor"), r"BAD  \.env or environment has RUNPOD_API_KEY: see \.env\.example")
    monkeypatch.setenv("PATH", str(Path("nothing").absolute()))
    assert says(lab.command("doctor"), "BAD  ssh-keyscan: install OpenSSH's client")

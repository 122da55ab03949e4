"""Large and many results over connections that break: every byte once, each file verified."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest
from lab import Lab, says
from processes import Process

MADE = "open(f'{results}/answer.txt', 'w').write('42\\n')\n"
MB = 1_000_000


def test_300_mb_over_a_connection_that_breaks_five_times_resume_each_time(lab: Lab) -> None:
    size = 300 * MB
    lab.work(
        f"{MADE}with open(f'{{results}}/large.bin', 'wb') as f:\n    for _ in range(300): f.write(os.urandom({MB}))"
    )
    lab.job["limits"]["reconnect"] = 30

    def arm() -> None:
        while not lab.fake.pods or not any(
            "ended with 0" in p.read_text() for p in lab.folder.glob(".runpod/*/log.txt")
        ):
            time.sleep(0.02)
        lab.fake.pod.proxy.cut_after(50 * MB, direction="down", times=5)

    thread = threading.Thread(target=arm)
    thread.start()
    began = time.monotonic()
    outcome = lab.run()
    thread.join()
    assert outcome.code == 0, outcome
    proxy = lab.fake.pod.proxy
    assert proxy.num_cuts == 5
    assert (lab.home / "large.bin").stat().st_size == size
    assert proxy.passed_bytes["down"] < 1.1 * size, "what is here is not fetched again"
    print(f"300 MB, five cuts: {time.monotonic() - began:.1f} s, {proxy.passed_bytes['down'] / MB:.1f} MB passed")


def test_ten_thousand_files(lab: Lab) -> None:
    lab.work(
        f"{MADE}for number in range(10_000):\n"
        "    folder = f'{results}/{number // 1000}'\n    os.makedirs(folder, exist_ok=True)\n"
        "    open(f'{folder}/{number}.txt', 'w').write(str(number) * 10)"
    )
    began = time.monotonic()
    assert lab.run().code == 0
    assert lab.state["results"]["num_files"] == 10_001
    assert (lab.home / "9/9999.txt").read_text() == "9999" * 10
    print(f"10,000 files: {time.monotonic() - began:.1f} s in all, {lab.state['seconds']['collecting']:.1f} s to fetch")


def test_a_runner_that_is_killed_in_the_download_goes_on_with_what_is_there(lab: Lab) -> None:
    size = 40 * MB
    lab.work(f"{MADE}open(f'{{results}}/large.bin', 'wb').write(os.urandom({size}))")
    process = Process(lab, "-m", "experiment_runner", "run", "job.json")
    process.wait_for(lambda: bool(lab.fake.pods))
    lab.fake.pod.proxy.throttle(8 * MB)

    def half() -> bool:
        return any(path.stat().st_size > size / 2 for path in lab.folder.glob(".runs/.*.incoming/large.bin"))

    process.wait_for(half)
    process.signal(signal.SIGKILL)
    process.end()
    lab.fake.pod.proxy.throttle(None)
    assert lab.again("monitor").code == 0
    assert (lab.home / "large.bin").stat().st_size == size
    assert lab.fake.pod.proxy.passed_bytes["down"] < 1.2 * size


def test_the_progress_of_a_long_download_is_shown(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.work(f"{MADE}open(f'{{results}}/large.bin', 'wb').write(os.urandom({8 * MB}))")
    monkeypatch.setattr("experiment_runner.console.LINE_EVERY_S", 0.0)
    assert says(lab.run(), r"results 8\.0 of 8\.0 MB \(100%\)")


def test_json_lines_tell_a_program_everything(lab: Lab) -> None:
    outcome = lab.run("--json")
    assert outcome.code == 0
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert {line["event"] for line in lines} == {"note", "log", "summary"}
    assert lines[-1]["verdicts"] == {"job": "succeeded", "results": "verified", "resource": "deleted_verified"}
    assert lines[-1]["code"] == 0
    assert "line 4\n" in "".join(line["text"] for line in lines if line["event"] == "log")


def test_an_output_that_appears_meanwhile_is_not_written_into(lab: Lab) -> None:
    lab.work("import time\ntime.sleep(1)\n" + MADE)
    made = threading.Event()

    def meddle() -> None:
        while not lab.fake.pods:
            time.sleep(0.02)
        folder = lab.folder / ".runs" / lab.fake.pod.id
        folder.mkdir(parents=True)
        (folder / "precious.txt").write_text("mine")
        made.set()

    thread = threading.Thread(target=meddle)
    thread.start()
    outcome = lab.run()
    thread.join()
    assert made.is_set()
    assert outcome.code == 20, outcome
    assert "is not empty, and not of this run" in outcome.out + outcome.err
    assert lab.verdicts == ("succeeded", "failed", "stopped")
    assert [path.name for path in Path(lab.home).iterdir()] == ["precious.txt"]
    assert lab.again("start").code == 30
    assert lab.again("collect", "--output", "recovered").code == 30
    assert lab.again("terminate").code == 0

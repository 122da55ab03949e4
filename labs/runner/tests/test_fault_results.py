"""Results that are odd, hostile, too many, or change while they are fetched. What is here is verified; what is not is
named; nothing is written anywhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from lab import Lab, says

from experiment_runner.transfer import TransferFailed, make_folders, safe_files

MADE = "open(f'{results}/answer.txt', 'w').write('42\\n')\n"
HOSTILE = ["../out.txt", "/etc/cron.d/x", "a/../../x", "a//b", "./a", "", "a\\..\\b", "C:/x", "a/./b", "..", "a\0b"]


def skipped(lab: Lab) -> dict[str, str]:
    found: dict[str, str] = lab.state["results"]["skipped"]
    return found


def test_links_pipes_and_devices_stay_there_and_are_named(lab: Lab, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("not yours")
    lab.work(
        f"{MADE}os.symlink({str(outside)!r}, f'{{results}}/link.txt')\nos.symlink('/etc', f'{{results}}/folder')\n"
        "os.mkfifo(f'{results}/pipe')\nos.symlink('answer.txt', f'{results}/latest-run')\n"
        "import socket\nos.chdir(results)\nsocket.socket(socket.AF_UNIX).bind('socket')"
    )
    outcome = lab.run()
    assert outcome.code == 0, outcome
    assert skipped(lab) == {
        "link.txt": "a symbolic link", "folder": "a symbolic link", "latest-run": "a symbolic link",
        "pipe": "not a regular file", "socket": "not a regular file",
    }  # fmt: skip
    assert {path.name for path in lab.home.iterdir()} == {"answer.txt", "remote.json", "remote-log.txt"}
    assert says(outcome, "not fetched: folder: a symbolic link")


def test_names_that_are_odd_come_home_as_they_are_or_are_named(lab: Lab) -> None:
    lab.work(
        f"{MADE}os.makedirs(f'{{results}}/한글/ sp ace')\n"
        "for name in ('한글/ sp ace/a\\nb.txt', '-rf', '$(touch x)', \"it's\", 'back\\\\slash', 'q?*'):\n"
        "    open(f'{results}/{name}', 'w').write(name)\n"
        "open(os.fsencode(results) + b'/\\xff.txt', 'w').close()"
    )
    assert lab.run().code == 0
    for name in ("한글/ sp ace/a\nb.txt", "-rf", "$(touch x)", "it's", "q?*"):
        assert (lab.home / name).read_text() == name
    assert skipped(lab) == {
        "'\\udcff.txt'": "its name is not UTF-8", "back\\slash": "its name leads out of the results",
    }  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leads_out_is_refused(name: str) -> None:
    safe, refused = safe_files({name: {"bytes": 1, "sha256": "0"}, "a/b.txt": {"bytes": 1, "sha256": "1"}})
    assert list(safe) == ["a/b.txt"]
    assert list(refused) == [name]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_target_that_lies_about_its_names_writes_nothing(
    name: str, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiment_runner.target import Target

    honest = Target.manifest

    def lying(self: Target) -> dict[str, object]:
        said = honest(self)
        return {**said, "files": {**said["files"], name: {"bytes": 5, "sha256": "0" * 64}}}

    monkeypatch.setattr(Target, "manifest", lying)
    before = sorted(lab.folder.parent.iterdir())
    assert lab.run().code == 0
    assert name in skipped(lab)
    assert sorted(lab.folder.parent.iterdir()) == before
    assert not Path("/etc/cron.d/x").exists()


def test_a_folder_that_became_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    output = tmp_path / "output"
    output.mkdir()
    (output / "a").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(TransferFailed, match="is a symbolic link"):
        make_folders(output, output / "a" / "b")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_that_changes_between_listing_and_reading_is_fetched_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiment_runner.target import Target

    honest, asked = Target.manifest, []

    def late(self: Target) -> dict[str, object]:
        said = honest(self)
        asked.append(1)
        if len(asked) == 1:
            (answer,) = (lab.folder / "volume").glob("exp-*/job/results/answer.txt")
            answer.write_text("43 and more\n")
        return said

    monkeypatch.setattr(Target, "manifest", late)
    assert lab.run().code == 0
    assert (lab.home / "answer.txt").read_text() == "43 and more\n"
    assert len(asked) == 2


def test_a_file_that_never_holds_still_stops_the_machine_and_can_be_fetched_later(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiment_runner.target import Target

    honest = Target.manifest

    def restless(self: Target) -> dict[str, object]:
        said = honest(self)
        for answer in (lab.folder / "volume").glob("exp-*/job/results/answer.txt"):
            answer.write_text(f"{os.urandom(8).hex()}\n")
        return said

    monkeypatch.setattr(Target, "manifest", restless)
    outcome = lab.run()
    assert outcome.code == 20, outcome
    assert lab.verdicts == ("succeeded", "failed", "stopped")
    assert says(outcome, r"1 of 2 results did not arrive as they are there: answer\.txt \(arrived with another size")
    monkeypatch.setattr(Target, "manifest", honest)
    assert lab.again("collect").code == 20, "a stopped machine is started first"
    assert lab.again("start").code == 30
    assert lab.again("collect", "--output", "recovered").code == 30
    assert len((lab.folder / "recovered/answer.txt").read_text()) == 17
    assert json.loads((lab.folder / "recovered/remote.json").read_text())["verdicts"]["results"] == "verified"
    assert lab.again("terminate").code == 0
    assert lab.verdicts == ("succeeded", "verified", "deleted_verified")


def test_more_than_is_allowed_is_not_fetched(lab: Lab) -> None:
    lab.work(f"{MADE}open(f'{{results}}/large.bin', 'wb').write(bytes(3_000_000))")
    lab.job["results"]["max_gb"] = 0.001
    outcome = lab.run()
    assert outcome.code == 20
    assert says(outcome, "the results have 0.00 GB, which exceeds results.max_gb = 0.001; nothing was fetched")
    assert lab.verdicts == ("succeeded", "failed", "stopped")


def test_no_room_here_is_said_before_anything_is_fetched(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("experiment_runner.transfer.shutil.disk_usage", lambda path: Usage)
    outcome = lab.run()
    assert outcome.code == 20
    assert says(outcome, "make room, then `collect`")
    assert lab.verdicts == ("succeeded", "failed", "stopped")


def test_a_disk_here_that_fills_up_keeps_the_results_there(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> object:
        raise OSError(28, "No space left on device", "answer.txt")

    monkeypatch.setattr("experiment_runner.transfer.open_part", full)
    lab.job["results"]["live"] = []
    outcome = lab.run()
    assert outcome.code == 20, outcome
    assert says(outcome, "No space left on device")
    assert lab.verdicts == ("succeeded", "failed", "stopped")


def test_a_result_that_is_required_and_missing_keeps_the_machines_disk(lab: Lab) -> None:
    lab.work("pass")
    outcome = lab.run()
    assert outcome.code == 20
    assert says(outcome, "the job succeeded, and made no answer.txt")
    assert lab.verdicts == ("succeeded", "partial", "stopped")


def test_what_is_excluded_stays_there(lab: Lab) -> None:
    lab.work(f"{MADE}os.makedirs(f'{{results}}/wandb')\nopen(f'{{results}}/wandb/debug.log', 'w').write('x')")
    lab.job["results"]["exclude"] = ["wandb/*"]
    assert lab.run().code == 0
    assert skipped(lab) == {"wandb/debug.log": "excluded by the job"}
    assert not (lab.home / "wandb").exists()


def test_the_same_content_under_two_names_comes_once(lab: Lab) -> None:
    lab.work(f"{MADE}for name in 'abc': open(f'{{results}}/{{name}}.bin', 'wb').write(b'x' * 4_000_000)")
    assert lab.run().code == 0
    assert {(lab.home / f"{name}.bin").stat().st_size for name in "abc"} == {4_000_000}
    assert lab.fake.pod.proxy.passed_bytes["down"] < 6_000_000


def test_an_output_that_holds_something_else_is_refused_before_anything(lab: Lab) -> None:
    (lab.folder / "recovered").mkdir()
    (lab.folder / "recovered/precious.txt").write_text("mine")
    outcome = lab.run("--output", "recovered")
    assert outcome.code == 2
    assert "recovered: is not empty, and not of this run" in outcome.err
    assert lab.fake.creates == 0
    assert (lab.folder / "recovered/precious.txt").read_text() == "mine"


def test_results_with_no_files_at_all(lab: Lab) -> None:
    lab.work("pass")
    lab.job["results"]["required"] = []
    assert lab.run().code == 0
    assert lab.state["results"]["num_files"] == 0

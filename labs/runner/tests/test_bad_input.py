"""Mistakes of the person: each is one line with the file, the key or the line, what is wrong and what to do; exit code
2; nothing is made and nothing is lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lab import SECRET, Lab, one_line, says

from experiment_runner.bundle import gather
from experiment_runner.commands import refuse_secrets
from experiment_runner.errors import InputError
from experiment_runner.job import Files, job_from_json
from experiment_runner.keys import find_keys, read_env_file
from experiment_runner.redaction import Secrets
from experiment_runner.state import created_and_deadline

MINIMAL: dict[str, Any] = {"name": "a", "files": {"inline": {"x": ""}}, "steps": [{"name": "s", "run": "true"}]}


def changed(**changes: Any) -> dict[str, Any]:
    return {**MINIMAL, **changes}


BAD_JOBS: list[tuple[Any, str]] = [
    ([], "the file: must be an object of settings"),
    (changed(stepz=[]), "stepz: unknown key; the nearest is steps"),
    ({"name": "a", "files": MINIMAL["files"]}, "steps: missing"),
    (changed(steps=[]), "steps: nothing to run"),
    (changed(name="a b"), "name: must be a word"),
    (changed(name="n" * 25), "name: must be a word of at most 24"),
    (changed(steps=[{"name": "s", "run": "true", "timeout": "soon"}]), "steps[0].timeout: must be a duration such"),
    (changed(steps=[{"name": "s", "run": "true", "timeout": True}]), "steps[0].timeout: must be a duration"),
    (changed(steps=[{"name": "s", "run": 3}]), "steps[0].run: must be a text, got 3"),
    (changed(steps=[{"name": "s", "run": " "}]), "steps[0].run: must be a command"),
    (changed(steps=[{"name": "s", "run": "true", "cwd": "../x"}]), "steps[0].cwd: must stay inside"),
    (changed(steps=[{"name": "s", "run": "a", "secrets": ["RUNPOD_API_KEY"]}]), "'RUNPOD_API_KEY' is not the name of"),
    (changed(steps=MINIMAL["steps"] * 2), "steps: 's' is the name of 2 steps"),
    (changed(files={}), "files.include: nothing is sent"),
    (changed(files={"include": ["/etc/passwd"]}), "files.include: must stay inside the root"),
    (changed(files={"include": ["../*"]}), "files.include: must stay inside the root"),
    (changed(results={"path": "."}), "results.path: must be a folder inside"),
    (changed(results={"required": ["../x"]}), "results.required: must stay inside"),
    (changed(limits={"max_hours": 0}), "limits.max_hours: must be above 0"),
    (changed(limits={"collect_grace": 0}), "limits.collect_grace: must be above 0"),
    (changed(limits={"max_hours": "3"}), "limits.max_hours: must be a number, got the text \"3\""),
    (changed(env={"RUNPOD_X": "1"}), "env.RUNPOD_X: is not a variable that a job may set"),
    (changed(env={"X": 1}), "env.X: must be a text, got 1"),
    (changed(provider="aws"), "provider: must be runpod, ssh or local, got 'aws'"),
    (changed(provider="ssh"), "settings.ssh.host: missing"),
    (changed(provider="ssh", settings={"ssh": {"host": "-oProxyCommand=x"}}), "settings.ssh.host: must be"),
    (changed(provider="runpod"), "settings.runpod.image: missing"),
    (changed(on_failure="explode"), "on_failure: must be delete or stop"),
    (changed(schema=2), "schema: this version knows schema 1, got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("job", "error"), BAD_JOBS, ids=[error for _, error in BAD_JOBS])
@pytest.mark.parametrize("arguments", [(), ("--dry-run",)])
def test_a_job_that_is_wrong_is_refused_by_its_key(job: Any, error: str, arguments: tuple[str, ...], lab: Lab) -> None:
    lab.job = job
    outcome = lab.run(*arguments)
    assert outcome.code == 2
    assert one_line(outcome.err).startswith("error: job.json: ")
    assert error in outcome.err
    assert not (lab.folder / ".runpod").exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"name": "a", "name": "b"}', "job.json: name: written twice"),
        ("{", "job.json:1:2: not valid JSON"),
        ('{"name": NaN', "job.json"),
        ("[" * 100_000, "job.json: cannot be read as JSON"),
    ],
)
def test_a_file_that_is_no_job(text: str, error: str, lab: Lab) -> None:
    (lab.folder / "job.json").write_text(text)
    outcome = lab.command("run", "job.json")
    assert outcome.code == 2
    assert error in one_line(outcome.err)


def test_a_job_that_is_not_there(lab: Lab) -> None:
    outcome = lab.command("run", "nothing.json")
    assert (outcome.code, one_line(outcome.err)) == (
        2,
        "error: nothing.json: cannot be read: No such file or directory",
    )


def test_a_job_that_holds_a_secret_is_refused_without_repeating_it(lab: Lab) -> None:
    lab.job["env"] = {"X": f"a{SECRET}b"}
    job = job_from_json(lab.job, "job.json")
    with pytest.raises(InputError, match=r"holds a secret \(MY_TOKEN\)"):
        refuse_secrets(job, "job.json", Secrets({"MY_TOKEN": SECRET}).find)


def make_files(root: Path) -> None:
    (root / "src").mkdir()
    (root / "src/a.py").write_text("a")
    (root / "src/link.py").symlink_to("/etc/hostname")
    (root / "linked").symlink_to(root / "src", target_is_directory=True)
    (root / ".env").write_text("X=1")
    for name in ("server.pem", "id_rsa", ".netrc", ".env.local", "key.key"):
        (root / name).write_text("x")
    (root / "with_secret.txt").write_text(f"key: {SECRET}")
    (root / "with_key.txt").write_text("hf_" + "a" * 34)
    os.mkfifo(root / "pipe")


BAD_FILES = [
    (["nothing*.py"], "'nothing*.py' matches no file"),
    (["src/*.py"], "link.py: is a symbolic link, and links are not sent"),
    (["linked/a.py"], "linked: is a symbolic link"),
    ([".env"], ".env: files like this hold keys, and are never sent"),
    (["server.pem"], "server.pem: files like this hold keys"),
    (["id_rsa"], "id_rsa: files like this hold keys"),
    ([".netrc"], ".netrc: files like this hold keys"),
    ([".env.local"], ".env.local: files like this hold keys"),
    (["key.key"], "key.key: files like this hold keys"),
    (["with_secret.txt"], "with_secret.txt: holds a secret (MY_TOKEN), and is not sent"),
    (["with_key.txt"], "with_key.txt: holds a secret (something that looks like a key)"),
    (["pipe"], "pipe: is neither a file nor a folder"),
]


@pytest.mark.parametrize(("patterns", "error"), BAD_FILES, ids=[patterns[0] for patterns, _ in BAD_FILES])
def test_what_may_not_leave_is_refused_by_name(patterns: list[str], error: str, tmp_path: Path) -> None:
    make_files(tmp_path)
    with pytest.raises(InputError) as caught:
        gather(Files(include=tuple(patterns)), tmp_path, Secrets({"MY_TOKEN": SECRET}))
    assert error in str(caught.value)
    assert SECRET not in str(caught.value)


def test_too_much_is_refused_with_the_largest(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(2_000_000))
    with pytest.raises(InputError, match=r"exceed files\.max_mb = 1; the largest is a\.bin \(2\.0 MB\)"):
        gather(Files(include=("*.bin",), max_mb=1), tmp_path, Secrets({}))


def test_the_same_files_make_the_same_archive_whenever_they_are_packed(tmp_path: Path) -> None:
    files = Files(include=("*.py", "b/*"), inline={"c.txt": "c"})
    archives = []
    for when in (1, 10**9):
        folder = tmp_path / str(when)
        (folder / "b").mkdir(parents=True)
        for name in ("z.py", "a.py", "b/x"):
            (folder / name).write_text(name)
            os.utime(folder / name, (when, when))
        bundle = gather(files, folder, Secrets({}))
        archives.append((bundle.archive(), bundle.sha256))
    assert archives[0] == archives[1]
    assert [file.path for file in bundle.files] == ["a.py", "b/x", "c.txt", "z.py"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("RUNPOD_API_KEY=good\nthis is a secret\n", ".env:2: must be NAME=value"),
        ("=x\n", ".env:1: must be NAME=value"),
        ("RUNPOD_API_KEY=two words\n", ".env:1: the value of RUNPOD_API_KEY has a space"),
        ("RUNPOD_API_KEY='x\ty'\n", ".env:1: the value of RUNPOD_API_KEY has a space or a character"),
    ],
)
def test_a_line_of_the_keys_that_is_wrong_is_named_and_not_repeated(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InputError) as caught:
        read_env_file(path, lambda warning: None)
    assert error in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "words" not in str(caught.value)


def test_keys_are_read_as_people_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", " from-the-environment ")
    (tmp_path / ".env").write_text(
        "\ufeff# comment\n\nexport RUNPOD_API_KEY = 'quoted'\nWANDB_API_KEY=from-the-file\nHF_TOKEN=\n"
        'WANDB_PROJECT="p"\n'
    )
    warnings: list[str] = []
    (tmp_path / ".env").chmod(0o644)
    keys = find_keys(tmp_path, warnings.append)
    assert {name: keys.get(name) for name in ("RUNPOD_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "WANDB_PROJECT")} == {
        "RUNPOD_API_KEY": "quoted", "WANDB_API_KEY": "from-the-environment", "HF_TOKEN": None, "WANDB_PROJECT": "p",
    }  # fmt: skip
    assert len(warnings) == 1
    assert "chmod 600" in warnings[0]


def test_a_key_in_the_file_works_and_an_empty_one_is_none(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY")
    (lab.folder / ".env").write_text("RUNPOD_API_KEY=\n")
    (lab.folder / ".env").chmod(0o600)
    assert "RUNPOD_API_KEY is not set; put it into .env" in one_line(lab.run().err)
    assert not (lab.folder / ".runpod").exists()
    (lab.folder / ".env").write_text(f"RUNPOD_API_KEY={lab.fake.key}\n")
    assert lab.run().code == 0


def test_an_address_of_the_api_that_is_not_encrypted_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_URL", "http://example.com/v2")
    outcome = lab.run()
    assert outcome.code == 2
    assert "is not an https address" in one_line(outcome.err)


def test_states_that_cannot_be_gone_on_from(lab: Lab) -> None:
    assert lab.run().code == 0
    path, whole = lab.state_path, lab.state_path.read_text()
    folder = path.with_suffix("")
    cases = {
        whole[: len(whole) // 2]: "truncated or damaged",
        "[]": "not the state of a run",
        "{}": "not the state of a run",
        whole.replace('"schema": 1\n}', '"schema": 7\n}'): "of version 7, and this runner knows version 1",
        whole.replace('"phase": "done"', '"phase": "dancing"'): "unknown phase 'dancing'",
        whole.replace('"deadline_epoch"', '"deadline"'): "damaged",
    }
    for text, error in cases.items():
        path.write_text(text)
        for command in ("monitor", "collect", "terminate", "stop", "start", "cost"):
            outcome = lab.again(command)
            assert (outcome.code, error in one_line(outcome.err)) == (2, True), outcome
        assert path.read_text() == text, "it is left as it is"
    path.write_text(whole)
    folder.rename(lab.folder / "recovered")
    assert "its folder" in one_line(lab.again("monitor").err)
    path.write_text(whole.replace(lab.state["computer"], "laptop 0123"))
    assert "It was made on the computer laptop." in one_line(lab.again("monitor").err)
    missing = lab.command("monitor", ".runpod/exp-nothing.json")
    assert "no such state file; there is .runpod/exp-" in one_line(missing.err)
    assert says(lab.command("monitor", ".runpod"), "is a folder")


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("exp-smoke-100-200-0123abcd", (100, 200)),
        ("exp-my-long-job-100-200-0123abcd", (100, 200)),
        ("exp-smoke-100-200-0123abc", None),
        ("exp-smoke-x-200-0123abcd", None),
        ("my-exp-smoke-100-200-0123abcd", None),
        ("training", None),
        ("", None),
    ],
)
def test_a_name_says_whose_it_is_and_when_its_time_is_over(name: str, times: tuple[int, int] | None) -> None:
    assert created_and_deadline(name) == times


def test_help_of_every_command_teaches(lab: Lab) -> None:
    outcome = lab.command("--help")
    assert outcome.code == 0
    for command in ("run", "monitor", "stop", "start", "collect", "terminate", "cost", "ls", "gc", "doctor"):
        assert command in outcome.out
        assert "example" in lab.command(command, "--help").out, command

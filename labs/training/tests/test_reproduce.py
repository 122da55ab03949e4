"""A run is made again from its folder alone; whatever is not what it was is named."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
from tiny import TINY, TRAINING, run

from training_lab import record
from training_lab.provenance import describe_source, pack_source
from training_lab.record import RunFolder
from training_lab.reproduce import recorded_source

ID = "first"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a run that was trained on it."""
    place = tmp_path_factory.mktemp("made")
    (place / "texts").mkdir()
    for number in range(40):
        (place / f"texts/{number}.txt").write_text(f"text {number}: " + "all work and no play " * (number + 3), "utf-8")
    config = json.loads(TINY.read_text("utf-8"))
    config["data"] = {"source": "files", "paths": ["texts"]}
    (place / "config.json").write_text(json.dumps(config), "utf-8")
    done = run("train", "--config", "config.json", "--run-id", ID, cwd=place)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return RunFolder(Path(".runs") / ID)


def reproduce(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return run("reproduce", ID, *arguments, **options)


def test_a_run_is_made_again_bit_for_bit(here: RunFolder) -> None:
    before = {path: path.read_bytes() for path in here.path.rglob("*") if path.is_file()}
    done = reproduce()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-identical: the same bits in all 12 updates and in the last weights (first-again-1)" in done.stdout
    assert "same     environment: " in done.stdout
    assert "differs" not in done.stdout
    assert {path: path.read_bytes() for path in here.path.rglob("*") if path.is_file()} == before
    again = RunFolder(Path(".runs") / f"{ID}-again-1")
    assert again.state() == "finished"
    assert again.read_json(record.SOURCE)["files"] == here.read_json(record.SOURCE)["files"]
    part = reproduce("--updates", "5")
    assert part.returncode == 0, part.stderr
    assert "the same in the 5 updates that both have" in part.stdout


def test_the_code_that_ran_is_used_whatever_is_here_now(here: RunFolder, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(TRAINING / "training_lab", checkout / "training/training_lab")
    shutil.copytree(TRAINING.parent / "runner/experiment_runner", checkout / "runner/experiment_runner")
    path = checkout / "training/training_lab/schedule.py"
    path.write_text(path.read_text("utf-8").replace("math.cos", "math.sin"), "utf-8")
    environment = {"PYTHONPATH": f"{checkout}/training:{checkout}/runner"}
    done = reproduce("--updates", "3", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "differs  the code here: training_lab/schedule.py changed; the recorded files are used" in done.stdout


def test_a_file_of_the_source_that_is_not_as_it_ran_is_named(here: RunFolder) -> None:
    plant(here, "training_lab/model.py", b"raise SystemExit('planted')\n")
    assert dict(recorded_source(here, here.read_json(record.SOURCE)))["training_lab/model.py"] != b"planted", (
        "the code here is the one that ran"
    )
    source = here.read_json(record.SOURCE)
    source["files"]["training_lab/model.py"] = "0" * 64
    source["commit"] = None
    here.write_json(record.SOURCE, source)
    done = reproduce()
    assert done.returncode == 3
    assert "training_lab/model.py has another SHA-256 in it" in done.stderr
    assert not (Path(".runs") / f"{ID}-again-1").exists()


def plant(folder: RunFolder, name: str, content: bytes) -> None:
    """Another content for a file in the archive."""
    packed = io.BytesIO()
    with zipfile.ZipFile(folder.file(record.SOURCE_ARCHIVE)) as old, zipfile.ZipFile(packed, "w") as new:
        for entry in old.namelist():
            new.writestr(entry, content if entry == name else old.read(entry))
    folder.file(record.SOURCE_ARCHIVE).write_bytes(packed.getvalue())


def test_a_source_that_would_be_written_elsewhere_is_refused(here: RunFolder) -> None:
    source = here.read_json(record.SOURCE)
    source["files"]["../planted.py"] = "0" * 64
    here.write_json(record.SOURCE, source)
    done = reproduce()
    assert done.returncode == 3
    assert "'../planted.py' is no file of the lab" in done.stderr


def test_a_package_of_another_version_is_named(here: RunFolder) -> None:
    environment = here.read_json(record.ENVIRONMENT)
    environment["processes"][-1]["packages"]["numpy"] = "1.0.0"
    environment["processes"][-1]["processor"] = "another"
    here.write_json(record.ENVIRONMENT, environment)
    done = reproduce("--updates", "1")
    differing = [line.strip() for line in done.stdout.splitlines() if "differs" in line]
    assert f"differs  environment: numpy is {numpy.__version__}, was 1.0.0" in differing, done
    assert any(line.endswith(", was another") for line in differing)
    assert len(differing) == 2, done


def test_a_byte_of_the_data_that_changed_is_named_with_its_file(here: RunFolder) -> None:
    path = Path("texts/7.txt")
    path.write_bytes(path.read_bytes().replace(b"work", b"fork", 1))
    done = reproduce()
    assert done.returncode == 3
    assert "other data: 1 source files changed (7.txt)" in done.stderr or "7.txt" in done.stderr
    assert not (Path(".runs") / f"{ID}-again-1").exists()


def test_where_it_parts_is_said_and_a_noise_floor_is_asked(here: RunFolder) -> None:
    rows = [json.loads(line) for line in here.file(record.METRICS).read_text("utf-8").splitlines()]
    for row in rows:
        if row["kind"] == "update" and row["update"] >= 8:
            row["loss"] += 1e-7
    here.file(record.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    here.write_manifest()
    done = reproduce()
    assert done.returncode == 3
    assert "they part at update 8, in the numerics: from the same batch loss" in done.stdout
    assert run("noise", "--config", "config.json", "--seeds", "3").returncode == 0
    again = reproduce()
    assert again.returncode == 1, again.stdout + again.stderr
    assert "the same within the noise floor: they part at update 8" in again.stdout


def test_wrong_input_is_refused(here: RunFolder) -> None:
    assert reproduce("--updates", "0").returncode == 2
    assert run("reproduce", "nothing").returncode == 2


def test_the_archive_is_the_source_and_the_same_each_time() -> None:
    packed = pack_source()
    assert packed == pack_source()
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        hashes = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}
    assert hashes == describe_source()["files"]


def test_a_secret_in_the_code_is_not_in_the_archive(tmp_path: Path) -> None:
    secret = "key-" + "q7" * 20
    checkout = tmp_path / "checkout"
    shutil.copytree(TRAINING / "training_lab", checkout / "training/training_lab")
    shutil.copytree(TRAINING.parent / "runner/experiment_runner", checkout / "runner/experiment_runner")
    with open(checkout / "training/training_lab/model.py", "a", encoding="utf-8") as file:
        file.write(f"\nKEY = '{secret}'\n")
    program = "import sys; from training_lab.provenance import pack_source; sys.stdout.buffer.write(pack_source())"
    environment = {**os.environ, "PYTHONPATH": f"{checkout}/training:{checkout}/runner", "WANDB_API_KEY": secret}
    packed = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True).stdout
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        text = archive.read("training_lab/model.py").decode()
    assert secret not in text
    assert "KEY = '" in text

"""What controls a run works on Python 3.9 from a bare checkout, with nothing installed."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from tiny import TRAINING

from training_lab.config_files import EXPERIMENTS
from training_lab.resolve import resolve_config

REPOSITORY = TRAINING.parent.parent
COMMANDS = ("train", "runs", "verify", "eval", "sample")
NAMES_OF_EXPERIMENTS = sorted(path.stem for path in EXPERIMENTS.iterdir())


def version_in(path: Path) -> list[int]:
    """The numbers in the name of an installation's folder."""
    return [int(number) for number in re.findall(r"\d+", path.parent.parent.name)]


@functools.cache
def find_python39() -> str | None:
    """A Python 3.9 that runs: the one that the shell finds, or the newest that pyenv has."""
    installed = (Path.home() / ".pyenv/versions").glob("3.9.*/bin/python3")
    candidates = [shutil.which("python3.9"), *map(str, sorted(installed, key=version_in, reverse=True))]
    for candidate in candidates:
        if candidate is None:
            continue
        question = [candidate, "-c", "import sys; print(sys.version_info[:2])"]
        answer = subprocess.run(question, capture_output=True, encoding="utf-8", check=False)
        if answer.stdout == "(3, 9)\n":
            return candidate
    return None


@pytest.fixture
def python39() -> str:
    found = find_python39()
    if found is None:
        pytest.skip("needs Python 3.9: none is called python3.9, and pyenv has none")
    return found


def run_python(python: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter in the current folder, knowing of this package's folder and of nothing else."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(TRAINING),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "error",
        **variables,
    }
    return subprocess.run(
        [python, *arguments], env=environment, capture_output=True, encoding="utf-8", check=False, timeout=60
    )


def modules_for_python39() -> list[tuple[str, str]]:
    """All modules that must run on Python 3.9: the package's folder, and the module's name."""
    found = []
    for entry in (REPOSITORY / "tools/python39.txt").read_text("utf-8").split():
        path = REPOSITORY / entry
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            _, lab, *parts = file.relative_to(REPOSITORY).with_suffix("").parts
            found.append((lab, ".".join(part for part in parts if part != "__init__")))
    return found


@pytest.mark.parametrize(("lab", "module"), modules_for_python39())
def test_every_module_that_controls_a_run_is_imported_with_nothing_installed(
    python39: str, lab: str, module: str
) -> None:
    script = f"import importlib; importlib.import_module({module!r})"
    done = run_python(python39, "-S", "-c", script, PYTHONPATH=str(REPOSITORY / "labs" / lab))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_linter_and_the_import_floors_hold_the_same_modules_to_python_3_9() -> None:
    modules = {module for lab, module in modules_for_python39() if lab == "training"}
    tools = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]
    patterns = [key for key in tools["ruff"]["per-file-target-version"] if "training_lab" in key]
    packages = [(re.findall(r"labs/training/(.*)/", pattern)[0].replace("/", "."), pattern) for pattern in patterns]
    listed = {
        f"{package}.{name}" for package, pattern in packages for name in re.findall(r"\{(.*)\}", pattern)[0].split(",")
    }
    assert {name.removesuffix(".__init__") for name in listed} == modules
    floors = next(c for c in tools["importlinter"]["contracts"] if c["name"].startswith("What controls a run"))
    packages_themselves = {"training_lab", "training_lab.__main__", "training_lab.mirrors"}
    assert {*floors["modules"], *packages_themselves} == modules


# --- commands ---


@pytest.fixture(params=["elsewhere", "in labs/training"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Where a person stands: in another folder with PYTHONPATH, or in labs/training without it."""
    if request.param == "elsewhere":
        return {}
    monkeypatch.chdir(TRAINING)
    return {"PYTHONPATH": ""}


def test_help_names_every_command(python39: str, place: dict[str, str]) -> None:
    done = run_python(python39, "-m", "training_lab", "--help", **place)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(re.search(rf"^ +{command} ", done.stdout, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(python39: str, place: dict[str, str], command: str) -> None:
    done = run_python(python39, "-m", "training_lab", command, "--help", **place)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m training_lab {command} ")
    assert "--runs DIR" in done.stdout


def test_an_experiment_is_checked_and_then_the_python_that_training_needs_is_named(
    python39: str, place: dict[str, str]
) -> None:
    done = run_python(python39, "-m", "training_lab", "train", "--config", "smoke", **place)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: this command needs Python 3.11 or newer, this is 3.9;")
    assert done.stderr.count("\n") == 1


def test_an_unknown_experiment_is_refused_with_the_nearest(python39: str, place: dict[str, str]) -> None:
    for name, nearest in (("smokes", "smoke"), ("basline", "baseline")):
        done = run_python(python39, "-m", "training_lab", "train", "--config", name, **place)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: --config {name}: no such experiment; the nearest is {nearest};")
        assert done.stderr.count("\n") == 1


def test_a_name_that_is_near_to_none_is_refused_with_all_that_there_are(python39: str, place: dict[str, str]) -> None:
    done = run_python(python39, "-m", "training_lab", "train", "--config", "nonsense", **place)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --config nonsense: no such experiment")
    assert all(name in done.stderr for name in NAMES_OF_EXPERIMENTS)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.sede=1", "error: --set: train.sede: unknown key; the nearest is train.seed\n"),
        ("optimizer.max_lr=fast", 'error: --set: optimizer.max_lr: must be a number, got the text "fast"\n'),
        ("model.num_heads=3", "error: --set: model.num_heads: must divide model.d_model = 256, got 3;"),
    ],
)
def test_a_mistake_in_the_config_is_told_before_the_python(python39: str, override: str, expected: str) -> None:
    done = run_python(python39, "-m", "training_lab", "train", "--config", "smoke", "--set", override)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", NAMES_OF_EXPERIMENTS)
def test_every_experiment_is_the_same_config_as_on_the_python_that_trains(python39: str, name: str) -> None:
    script = "import sys; from training_lab.resolve import resolve_config; print(resolve_config(sys.argv[1]).identity)"
    done = run_python(python39, "-S", "-c", script, name)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == resolve_config(name).identity


def test_a_config_in_yaml_says_what_to_install(python39: str) -> None:
    Path("my.yaml").write_text("train: {updates: 5}\n")
    done = run_python(python39, "-S", "-m", "training_lab", "train", "--config", "my.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: my.yaml: reading YAML needs PyYAML (pip install pyyaml)")
    assert done.stderr.count("\n") == 1


# --- the list of runs ---

SUMMARY = {
    "state": "finished",
    "updates": 6,
    "planned_updates": 6,
    "val_loss": {"first": 5.5, "last": 4.25, "best": 4.25},
    "throughput": {"target_tokens_per_s": 1234.5},
}


def make_run(name: str, summary: object) -> Path:
    """A folder as training leaves it, as far as a list of runs looks."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    content = summary if isinstance(summary, str) else json.dumps(summary)
    (folder / "summary.json").write_text(content, encoding="utf-8")
    return folder


def test_where_there_are_no_runs_the_list_says_how_to_start_one(python39: str, place: dict[str, str]) -> None:
    done = run_python(python39, "-m", "training_lab", "runs", "--runs", "nowhere", **place)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "No runs in nowhere. Start one with: python -m training_lab train --config smoke\n"
    done = run_python(python39, "-m", "training_lab", "runs", "--runs", "nowhere", "--json", **place)
    assert (done.returncode, json.loads(done.stdout)) == (0, [])


def test_a_run_is_listed_with_its_state_and_figures(python39: str) -> None:
    make_run("smoke-20270101-aaaa", SUMMARY)
    done = run_python(python39, "-m", "training_lab", "runs", "--runs", "runs")
    assert (done.returncode, done.stderr) == (0, "")
    head, row = done.stdout.splitlines()
    assert head.split() == ["run", "state", "mark", "updates", "val_loss", "tokens/s", "question"]
    assert row.split() == ["smoke-20270101-aaaa", "finished", "6/6", "4.2500", "1,234"]


def test_the_list_for_programs_has_the_same_figures(python39: str) -> None:
    make_run("smoke-20270101-aaaa", SUMMARY)
    make_run("killed-20270101-bbbb", {"state": "running"})
    done = run_python(python39, "-m", "training_lab", "runs", "--runs", "runs", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = {run["run"]: run for run in json.loads(done.stdout)}
    assert listed["smoke-20270101-aaaa"] == {
        "run": "smoke-20270101-aaaa",
        "state": "finished",
        "updates": 6,
        "planned_updates": 6,
        "val_loss": 4.25,
        "target_tokens_per_s": 1234.5,
        "folder": "runs/smoke-20270101-aaaa",
        "config": None,
        "question": "",
        "study": "",
        "mark": "",
        "notes": [],
    }
    killed = listed["killed-20270101-bbbb"]
    assert (killed["state"], killed["updates"], killed["val_loss"]) == ("killed", None, None)


@pytest.mark.parametrize(
    "summary",
    ["", "{", "[]", "null", "3", '{"state": "finished", "val_loss": null}', '{"state": "finished", "throughput": []}'],
)
def test_a_damaged_summary_hides_neither_its_own_run_nor_the_others(python39: str, summary: str) -> None:
    make_run("damaged-20270101-aaaa", summary)
    make_run("smoke-20270101-bbbb", SUMMARY)
    done = run_python(python39, "-m", "training_lab", "runs", "--runs", "runs")
    assert (done.returncode, done.stderr) == (0, "")
    assert {row.split()[0] for row in done.stdout.splitlines()[1:]} == {"damaged-20270101-aaaa", "smoke-20270101-bbbb"}


@pytest.mark.parametrize(
    "variables",
    [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["as it is", "C locale"],
)
def test_a_run_with_a_korean_name_is_listed_by_its_name_in_every_locale(
    python39: str, variables: dict[str, str]
) -> None:
    make_run("실험-20270101-aaaa", SUMMARY)
    done = run_python(python39, "-m", "training_lab", "runs", "--runs", "runs", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].split()[0] == "실험-20270101-aaaa"
    done = run_python(python39, "-m", "training_lab", "runs", "--runs", "runs", "--json", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[0]["run"] == "실험-20270101-aaaa"


@pytest.mark.parametrize("command", [["verify"], ["eval"], ["sample", "--prompt", "a"]], ids=lambda words: words[0])
def test_a_command_that_computes_names_the_python_that_it_needs(python39: str, command: list[str]) -> None:
    folder = make_run("smoke-20270101-aaaa", SUMMARY)
    done = run_python(python39, "-m", "training_lab", *command, str(folder))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: this command needs Python 3.11 or newer, this is 3.9;")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["verify"], ["eval"], ["sample", "--prompt", "a"]], ids=lambda words: words[0])
def test_a_run_that_is_not_there_is_told_before_the_python(python39: str, command: list[str]) -> None:
    make_run("smoke-20270101-aaaa", SUMMARY)
    done = run_python(python39, "-m", "training_lab", *command, "zzz", "--runs", "runs")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: zzz: no such run in runs; the newest there is smoke-20270101-aaaa\n"

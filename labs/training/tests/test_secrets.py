"""No secret reaches a file: not through a config, a row, an error, a diff."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import make_run
from tiny import TINY, run

from training_lab.errors import UserError
from training_lab.resolve import resolve_config
from training_lab.tracking import MetricsWriter

VALUE = "correct-horse-battery"
SHAPED = "hf_" + "a" * 34


def test_files_of_a_run_are_written_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", VALUE)
    folder = make_run("run")
    folder.write_json("source.json", {"uncommitted_diff": f"+key = '{VALUE}'"})
    with MetricsWriter(Path("metrics.jsonl")) as writer:
        writer.write({"kind": "event", "event": "failure", "message": f"refused: {VALUE}"})
    assert folder.read_json("source.json") == {"uncommitted_diff": "+key = '[WANDB_API_KEY removed]'"}
    assert VALUE not in Path("metrics.jsonl").read_text()
    assert "[WANDB_API_KEY removed]" in Path("metrics.jsonl").read_text()


@pytest.mark.parametrize(
    "setting", [f"purpose=my key is {VALUE}", f"data.split_salt={VALUE}", f"tracking.entity={VALUE}"]
)
def test_a_config_that_holds_one_is_refused_without_repeating_it(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", VALUE)
    with pytest.raises(UserError, match=r"holds a secret \(WANDB_API_KEY\)") as caught:
        resolve_config(str(TINY), [setting])
    assert setting.partition("=")[0] in str(caught.value)
    assert VALUE not in str(caught.value)


def test_a_training_that_would_write_one_down_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("train", "--config", str(TINY), "--set", f"purpose={SHAPED}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert SHAPED not in done.stderr
    assert not Path(".runs").exists()

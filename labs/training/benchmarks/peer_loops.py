"""Two of the peers of `peers.py`, each a training loop that reports `iter n` after every update, forever.

    python benchmarks/peer_loops.py nanogpt-loss-only VOCABULARY NANOGPT_FOLDER
    python benchmarks/peer_loops.py transformers VOCABULARY NANOGPT_FOLDER

`nanogpt-loss-only` is nanoGPT's model and optimizer, compiled together with taking the loss alone: its train.py
compiles a model that hands the logits back, which must then be kept whole. `transformers` is GPT-2 of Hugging Face with
its own Trainer. Both read the data that peers.py has written into nanoGPT's folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

BLOCK, BATCH = 256, 32


def draw(tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows and what follows each of their tokens, [32, 256] each."""
    starts = torch.randint(len(tokens) - BLOCK - 1, (BATCH,)).tolist()
    windows = torch.from_numpy(np.stack([tokens[start : start + BLOCK + 1] for start in starts]).astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def nanogpt_loss_only(vocab_size: int, repository: Path) -> None:
    """nanoGPT's GPT in a loop of its own."""
    sys.path.insert(0, str(repository))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    tokens = np.memmap(repository / "data" / "lab" / "train.bin", dtype=np.uint16, mode="r")
    vocab_size = -(-vocab_size // 64) * 64  # as its train.py takes 50,304
    model: Any = GPT(GPTConfig(block_size=BLOCK, vocab_size=vocab_size, n_layer=6, n_head=4, n_embd=256, bias=False))
    optimizer = model.configure_optimizers(0.1, 3e-4, (0.9, 0.95), "cpu")
    loss_of = torch.compile(lambda inputs, targets: model(inputs, targets)[1])
    update = 0
    while True:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(*draw(tokens))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"iter {update}: loss {loss.item():.4f}", flush=True)
        update += 1


def transformers_trainer(vocab_size: int, repository: Path) -> None:
    """Hugging Face's GPT-2 with its Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    tokens = np.memmap(repository / "data" / "lab" / "train.bin", dtype=np.uint16, mode="r")

    class Windows(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Any:
            while True:
                for window in draw(tokens)[0]:
                    yield {"input_ids": window, "labels": window}

    class Report(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            print(f"iter {state.global_step}", flush=True)

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=vocab_size, n_positions=BLOCK, n_embd=256, n_layer=6, n_head=4,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir="out-transformers", per_device_train_batch_size=BATCH, max_steps=10**6, learning_rate=3e-4,
        weight_decay=0.1, max_grad_norm=1.0, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Windows(), callbacks=[Report()]).train()


def main() -> None:
    kind, vocab_size, repository = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(1)
    if kind == "nanogpt-loss-only":
        nanogpt_loss_only(vocab_size, repository)
    else:
        transformers_trainer(vocab_size, repository)


if __name__ == "__main__":
    main()

"""Text from a trained model, token by token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F

from training_lab.data.tokenizers import Tokenizer
from training_lab.model import Decoder
from training_lab.precision import Hardware
from training_lab.randomness import generator


def sample_tokens(
    model: Decoder,
    hardware: Hardware,
    prompt: list[int],
    *,
    num_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """Draws `num_tokens` tokens after `prompt`. Temperature 0 always takes the likeliest; `top_k` 0 leaves all.

    The model sees the last `max_positions` tokens. Drawn on the CPU from a stream of its own.
    """
    model.eval()
    max_positions = model.position_embedding.num_embeddings
    draws = generator(seed, "sample")
    tokens = list(prompt)
    for _ in range(num_tokens):
        context = torch.tensor(tokens[-max_positions:], device=hardware.device)
        positions = torch.arange(len(context), device=hardware.device)
        with torch.inference_mode(), hardware.autocast():
            hidden_Td = model(context, positions, (0, len(context)))
        with torch.inference_mode():
            logits_V = F.linear(hidden_Td[-1].float(), model.head_Vd).cpu()  # the head in FP32
            tokens.append(draw(logits_V, temperature, top_k, draws))
        yield tokens[-1]


def draw(logits_V: torch.Tensor, temperature: float, top_k: int, draws: torch.Generator) -> int:
    """One token from the logits of the next."""
    if temperature == 0:
        return int(logits_V.argmax())
    logits_K, tokens_K = logits_V.double().topk(min(top_k, len(logits_V)) if top_k else len(logits_V))
    probabilities_K = ((logits_K - logits_K[0]) / temperature).softmax(-1)
    return int(tokens_K[torch.multinomial(probabilities_K, 1, generator=draws)])


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Text as soon as it is whole: a character whose bytes are spread over tokens waits for the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield decoder.decode(tokenizer.token_bytes(token))
    yield decoder.decode(b"", final=True)

"""The decoder: its size, its initial state, and that pieces do not see each other."""

from __future__ import annotations

import pytest
import torch

from training_lab.config import ModelConfig
from training_lab.loss import ChunkedLoss
from training_lab.model import Decoder, count_parameters, expected_initial_loss, initialise

CORRECTED = ModelConfig(num_layers=12, d_model=768, num_heads=12, max_positions=4096)
SMALL = ModelConfig(num_layers=2, d_model=64, num_heads=2, max_positions=64)


def make_model(config: ModelConfig = SMALL, vocab_size: int = 257, seed: int = 1) -> Decoder:
    model = Decoder(config, vocab_size)
    initialise(model, seed)
    return model.eval()


def test_the_seed_documents_model_has_exactly_its_parameters() -> None:
    with torch.device("meta"):
        model = Decoder(CORRECTED, 50257)
    assert count_parameters(model) == 126_716_160


def test_its_loss_on_random_tokens_before_training_is_the_expected_one() -> None:
    model = make_model(CORRECTED, 50257, seed=1337)
    tokens, labels = (torch.randint(0, 50257, (512,)) for _ in range(2))
    with torch.no_grad():
        hidden = model(tokens, torch.arange(512), (0, 512))
        loss = ChunkedLoss()(hidden, model.head_Vd, labels).item() / 512
    assert expected_initial_loss(50257, 768) == pytest.approx(10.98, abs=0.005)
    assert loss == pytest.approx(10.98, abs=0.03)


def test_changing_a_token_changes_no_logit_of_another_piece_nor_of_earlier_positions() -> None:
    model = make_model()
    cu_seqlens = (0, 10, 42, 64)
    positions = torch.cat([torch.arange(10), torch.arange(32), torch.arange(22)])
    tokens = torch.randint(0, 257, (64,))
    changed = tokens.clone()
    changed[20] = (changed[20] + 1) % 257
    with torch.no_grad():
        before, after = (model(t, positions, cu_seqlens) for t in (tokens, changed))
    is_same = (before == after).all(dim=1)
    assert is_same[:20].all()
    assert is_same[42:].all()
    assert not is_same[20:42].any()


def test_pieces_in_one_row_give_the_same_as_each_alone() -> None:
    model = make_model()
    tokens = torch.randint(0, 257, (40,))
    with torch.no_grad():
        together = model(tokens, torch.cat([torch.arange(15), torch.arange(25)]), (0, 15, 40))
        alone = torch.cat(
            [model(tokens[:15], torch.arange(15), (0, 15)), model(tokens[15:], torch.arange(25), (0, 25))]
        )
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_the_head_is_the_embedding_and_counted_once() -> None:
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    assert model.head_Vd.data_ptr() == model.token_embedding.weight.data_ptr()
    assert len(names) == len(set(names))
    assert "token_embedding.weight" in model.state_dict()


def test_initial_weights_have_the_stated_spread() -> None:
    model = make_model(ModelConfig(num_layers=8, d_model=128, num_heads=2, max_positions=512))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            expected = 0.02 / 4 if name.endswith("project.weight") else 0.02  # √(2·8) = 4
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(parameter.mean().item()) < expected / 10, name


def test_initial_weights_of_a_part_do_not_depend_on_the_others() -> None:
    two, three = (make_model(ModelConfig(num_layers=n, d_model=64, num_heads=2, max_positions=64)) for n in (2, 3))
    wider = make_model(vocab_size=300)
    assert torch.equal(
        two.blocks[1].get_parameter("mlp.expand.weight"), three.blocks[1].get_parameter("mlp.expand.weight")
    )
    assert torch.equal(two.position_embedding.weight, wider.position_embedding.weight)


def test_another_seed_gives_other_weights_and_the_same_seed_the_same() -> None:
    one, again, other = make_model(seed=1), make_model(seed=1), make_model(seed=2)
    assert torch.equal(one.token_embedding.weight, again.token_embedding.weight)
    assert not torch.equal(one.token_embedding.weight, other.token_embedding.weight)


def test_a_parameter_without_an_initialisation_rule_stops_everything() -> None:
    model = Decoder(SMALL, 257)
    model.register_parameter("gate", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="gate"):
        initialise(model, 1)

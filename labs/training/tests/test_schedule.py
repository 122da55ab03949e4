"""The learning rate of each update: the values of the reference, and what holds for every schedule."""

from __future__ import annotations

import itertools
import math

import pytest
from tiny import tiny

from training_lab.config import Config
from training_lab.schedule import learning_rate


def schedule(name: str, updates: int, warmup: int, *more: str, max_lr: str = "3e-4", min_lr: str = "3e-5") -> Config:
    """A config with this schedule."""
    return tiny(
        f"schedule.name={name}",
        f"train.updates={updates}",
        f"schedule.warmup_updates={warmup}",
        f"optimizer.max_lr={max_lr}",
        f"optimizer.min_lr={min_lr}",
        *more,
    )


def rates(config: Config) -> list[float]:
    """The learning rates of all updates, from the first."""
    return [learning_rate(config, update) for update in range(1, config.train.updates + 1)]


SCHEDULES = [
    schedule(name, updates, warmup, max_lr=max_lr, min_lr=min_lr)
    for name in ("cosine", "wsd", "constant")
    for updates, warmup in ((1, 0), (2, 1), (3, 0), (10, 9), (40, 8), (200, 20))
    for max_lr, min_lr in (("3e-4", "3e-5"), ("1", "1"), ("1e-2", "1e-9"))
]


def name_of(config: Config) -> str:
    rate, plan = config.optimizer, config.schedule
    return f"{plan.name}-{config.train.updates}-{plan.warmup_updates}-{rate.max_lr:g}-{rate.min_lr:g}"


every_schedule = pytest.mark.parametrize("config", SCHEDULES, ids=name_of)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 1.5e-5), (10, 1.65e-4), (19, 3e-4), (20, 3e-4), (100, 1.88443e-4), (199, 3.0021e-5)],
)
def test_the_cosine_has_the_values_of_the_reference(step: int, expected: float) -> None:
    config = schedule("cosine", 200, 20)
    assert learning_rate(config, step + 1) == pytest.approx(expected, rel=2e-5, abs=0)


def test_the_cosine_is_half_way_down_in_the_middle_between_warm_up_and_end() -> None:
    assert learning_rate(schedule("cosine", 200, 20), 111) == pytest.approx((3e-4 + 3e-5) / 2, rel=1e-12)


@every_schedule
def test_no_update_is_made_with_a_rate_of_zero_or_outside_the_configured_range(config: Config) -> None:
    low, high = config.optimizer.min_lr, config.optimizer.max_lr
    for update, rate in enumerate(rates(config), 1):
        assert 0 < rate <= high, f"update {update}"
        assert rate >= low or update <= config.schedule.warmup_updates, f"update {update}"


def test_the_cosine_is_never_zero_even_where_the_last_rate_is() -> None:
    assert min(rates(schedule("cosine", 50, 0, min_lr="0"))) > 0


@every_schedule
def test_the_warm_up_rises_in_equal_steps_and_ends_at_the_highest_rate(config: Config) -> None:
    warmup, high = config.schedule.warmup_updates, config.optimizer.max_lr
    rising = rates(config)[:warmup]
    assert rising == pytest.approx([high * place / warmup for place in range(1, warmup + 1)], rel=1e-15)
    assert rising[-1:] == [high] * min(warmup, 1)


@every_schedule
def test_nothing_jumps_where_the_warm_up_ends(config: Config) -> None:
    falls_at_once = config.schedule.name == "wsd" and (
        config.schedule.warmup_updates + config.schedule.decay_updates == config.train.updates
    )
    first_after = learning_rate(config, config.schedule.warmup_updates + 1)
    assert (first_after == config.optimizer.max_lr) or falls_at_once


@every_schedule
def test_after_the_warm_up_the_rate_never_rises(config: Config) -> None:
    falling = rates(config)[config.schedule.warmup_updates :]
    assert all(later <= earlier for earlier, later in itertools.pairwise(falling))


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_without_a_warm_up_the_first_update_has_the_highest_rate(name: str) -> None:
    assert rates(schedule(name, 50, 0))[0] == 3e-4


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_a_warm_up_of_all_updates_but_one_leaves_the_last_at_the_highest_rate(name: str) -> None:
    config = schedule(name, 10, 9, "schedule.decay_updates=0")
    assert rates(config) == pytest.approx([3e-4 * min(k, 9) / 9 for k in range(1, 11)], rel=1e-15)
    assert rates(config)[-1] == 3e-4


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_a_single_update_has_the_highest_rate(name: str) -> None:
    assert rates(schedule(name, 1, 0)) == [3e-4]


@pytest.mark.parametrize(("max_lr", "min_lr"), [("3e-4", "3e-5"), ("1e-3", "1e-4"), ("0.7", "0.1"), ("1e-2", "0")])
@pytest.mark.parametrize("decay", [1, 2, 7, 20])
def test_warm_up_stable_decay_stays_and_then_falls_in_a_line_that_ends_exactly_at_the_lowest_rate(
    max_lr: str, min_lr: str, decay: int
) -> None:
    config = schedule("wsd", 50, 5, f"schedule.decay_updates={decay}", max_lr=max_lr, min_lr=min_lr)
    high, low = float(max_lr), float(min_lr)
    all_rates = rates(config)
    assert all_rates[4 : 50 - decay] == [high] * (46 - decay)
    line = [high + (low - high) * place / decay for place in range(1, decay + 1)]
    assert all_rates[50 - decay :] == pytest.approx(line, rel=1e-12, abs=1e-18)
    assert all_rates[-1] == low


def test_without_a_final_fall_warm_up_stable_decay_is_constant() -> None:
    config = schedule("wsd", 50, 5, "schedule.decay_updates=0")
    assert rates(config) == rates(schedule("constant", 50, 5))


def test_constant_stays_at_the_highest_rate_to_the_end() -> None:
    assert rates(schedule("constant", 50, 5))[4:] == [3e-4] * 46


def test_with_equal_rates_every_schedule_stays_where_the_warm_up_ended() -> None:
    for name in ("cosine", "wsd"):
        config = schedule(name, 50, 5, max_lr="1e-3", min_lr="1e-3")
        assert rates(config)[4:] == pytest.approx([1e-3] * 46, rel=1e-15)
        assert all(math.isfinite(rate) for rate in rates(config))

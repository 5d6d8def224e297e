import math

import pytest
import torch

from coati.errors import ConfigError
from coati.trainer.schedule import lr_factor, make_schedule


def factors(kind, warmup_steps, total_steps, steps):
    return [lr_factor(s, kind=kind, warmup_steps=warmup_steps, total_steps=total_steps) for s in steps]


def test_warmup_by_hand():
    # 3 warm-up steps: 1/4, 2/4, 3/4, then the full rate
    assert factors("constant", 3, 10, range(6)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_by_hand():
    # 2 warm-up steps, then 4 steps from 1 to 0, then 0 for ever
    assert factors("linear", 2, 6, range(9)) == [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]


def test_cosine_by_hand():
    # 4 steps of half a cosine: (1 + cos(pi * k / 4)) / 2
    expected = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0, 0.0]
    assert factors("cosine", 0, 4, range(6)) == pytest.approx(expected, abs=1e-12)


def test_constant_never_decays():
    assert factors("constant", 0, 3, [0, 2, 3, 1000]) == [1.0] * 4


def test_warmup_over_the_whole_run_then_ends():
    assert factors("linear", 2, 2, [0, 1, 2, 3, 9]) == [1 / 3, 2 / 3, 1.0, 0.0, 0.0]


def test_scheduler_sets_the_rate_of_every_group():
    a, b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 10.0}])
    schedule = make_schedule(optimizer, kind="linear", warmup_steps=1, total_steps=3)
    seen = []
    for _ in range(4):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert seen == [[0.5, 5.0], [1.0, 10.0], [0.5, 5.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("kind", "warmup_steps", "total_steps", "message"),
    [
        ("step", 0, 10, "lr_schedule must be one of constant, linear, cosine"),
        ("linear", -1, 10, "warmup_steps must be 0 or more, got -1"),
        ("linear", 0, 0, "total_steps must be 1 or more, got 0"),
        ("linear", 11, 10, "at most total_steps"),
    ],
)
def test_bad_settings_name_the_rule(kind, warmup_steps, total_steps, message):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ConfigError, match=message):
        make_schedule(optimizer, kind=kind, warmup_steps=warmup_steps, total_steps=total_steps)

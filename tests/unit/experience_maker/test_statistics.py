"""Metrics of a batch, computed by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from coati.experience import Experience
from coati.experience_maker.base import reward_metrics
from coati.experience_maker.pipeline import sample_texts
from coati.monitor.metrics import Mean, Sum


@pytest.fixture
def experience():
    # Prompts of 2 and 1 tokens; end of sequence is 2. Responses: [5, 2] ends, [2] is empty, [6, 7, 8] is cut.
    action_mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    floats = torch.zeros(3, 3)
    return Experience(
        sequences=torch.tensor([[3, 4, 5, 2, 2], [0, 4, 2, 0, 0], [3, 3, 6, 7, 8]]),
        action_log_probs=floats,
        values=floats,
        reward=torch.tensor([1.0, 2.0, 6.0]),
        kl=torch.tensor([[0.5, 0.5, float("nan")], [1.0, 9.0, 9.0], [2.0, 1.0, 1.0]]),
        advantages=floats,
        attention_mask=torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
        action_mask=action_mask,
        sample_ids=torch.tensor([7, 8, 9]),
    )


def test_sample_metrics_by_hand(experience):
    # rewards 1, 2, 6: mean 3, variance (4 + 1 + 9) / 3
    # kl: 0.5 + 0.5 + 1 + 2 + 1 + 1 = 6 nats over 3 samples and 6 tokens
    experience.is_cut = torch.tensor([False, False, True])
    assert experience.sample_metrics() == pytest.approx(
        {
            "reward/mean": 3.0,
            "reward/std": (14 / 3) ** 0.5,
            "reward/min": 1.0,
            "reward/max": 6.0,
            "kl/per_sample": 2.0,
            "kl/per_token": 1.0,
            "response/length": 2.0,
            "response/cut_fraction": 1 / 3,
            "response/empty": 1.0,
        }
    )


def test_a_batch_without_samples_has_no_metrics():
    assert Experience.blank(0).sample_metrics() == {}


def test_cuts_are_reported_only_where_they_are_known(experience):
    assert not {"response/cut_fraction", "response/empty"} & set(experience.sample_metrics())


def test_a_kl_that_is_not_measured_is_absent(experience):
    experience.kl = torch.zeros(3, 3)
    assert experience.sample_metrics(has_reference=True)["kl/per_sample"] == 0.0
    metrics = experience.sample_metrics()
    assert not [name for name in metrics if name.startswith("kl/")]
    assert metrics["response/length"] == 2.0


def test_a_response_that_ends_without_an_end_token_is_not_cut(experience):
    # As with stop strings: the third response ends with token 8.
    experience.is_cut = torch.tensor([False, False, False])
    metrics = experience.sample_metrics()
    assert metrics["response/cut_fraction"] == 0.0


def test_a_cut_response_is_not_empty(experience):
    experience.is_cut = torch.tensor([False, True, True])
    metrics = experience.sample_metrics()
    assert metrics["response/cut_fraction"] == pytest.approx(2 / 3)
    assert metrics["response/empty"] == 0.0


def test_groups_whose_samples_all_score_the_same_are_counted(experience):
    batch = experience.select(torch.zeros(8, dtype=torch.long))
    batch.reward, batch.group_ids = (
        torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.0, 0.0, 0.7]),
        torch.tensor([1, 1, 1, 2, 2, 3, 3, 4]),  # a single sample is compared with none
    )
    metrics = batch.sample_metrics()
    assert metrics["reward/equal_groups"] == pytest.approx(2 / 3)
    assert metrics["reward/group_std"] == pytest.approx(0.5 / 3)


def test_terms_get_names_that_metrics_may_have():
    terms = {"My term!": torch.tensor([1.0, math.nan, 3.0]), "none": torch.tensor([math.nan] * 3)}
    metrics = reward_metrics(SimpleNamespace(terms=terms, num_retries=2))
    assert metrics == {"reward/retries": Sum(2.0), "reward/term_my_term_": Mean(2.0, 2.0)}


class Letters:
    def decode(self, ids, skip_special_tokens):
        return " ".join(str(int(token)) for token in ids)


def test_sample_texts_hold_no_padding(experience):
    assert sample_texts(experience, Letters(), 2) == [
        {"prompt": "3 4", "response": " 5 2", "reward": 1.0, "sample_id": 7},
        {"prompt": "4", "response": " 2", "reward": 2.0, "sample_id": 8},
    ]
    experience.attention_mask, experience.sample_ids = None, None
    assert sample_texts(experience, Letters(), 9)[1] == {
        "prompt": "0 4",
        "response": " 2",
        "reward": 2.0,
        "sample_id": None,
    }


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [0]), (2, [0, 4]), (3, [0, 2, 5]), (9, [*range(8)])])
def test_samples_are_spread_over_the_batch(experience, count, expected):
    batch = experience.select(torch.zeros(8, dtype=torch.long))
    batch.sample_ids = torch.arange(8)
    assert [sample["sample_id"] for sample in sample_texts(batch, Letters(), count)] == expected

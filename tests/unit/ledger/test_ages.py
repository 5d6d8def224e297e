"""The age of a batch, by hand."""

import pytest
import torch
from metric_table import DOCUMENTED

from coati.experience_maker import Experience
from coati.ledger import age_metrics, ages_of
from coati.ledger.ages import bucket_names


def experience(versions, mask):
    shape = (len(versions), len(versions[0]))
    floats = torch.zeros(shape)
    return Experience(
        torch.zeros(shape[0], shape[1] + 1, dtype=torch.long),
        floats,
        floats,
        torch.zeros(shape[0]),
        floats,
        floats,
        None,
        torch.tensor(mask),
        policy_versions=torch.tensor(versions),
    )


def test_a_sample_is_as_old_as_its_oldest_token():
    # Trainer at 5. Sample 0: tokens of versions 3 and 4, so 2 old. Sample 1: version 5 (its second token is
    # padding that says 0), so 0 old. Mean (2 + 0) / 2 = 1.
    batch = experience([[3, 4], [5, 0]], [[True, True], [True, False]])
    assert ages_of(batch, 5) == (1.0, 2.0)


def test_unknown_versions_do_not_count():
    # Sample 1 does not say (-1): the mean is that of sample 0 alone, 5 - 2 = 3.
    batch = experience([[2, 2], [-1, -1]], [[True, True], [True, True]])
    assert ages_of(batch, 5) == (3.0, 3.0)
    assert ages_of(experience([[-1]], [[True]]), 5) == (0.0, 0.0)


def test_no_tokens_have_no_age():
    assert ages_of(experience([[1]], [[False]]), 5) == (0.0, 0.0)
    batch = experience([[1]], [[True]])
    batch.policy_versions = None
    assert ages_of(batch, 5) == (0.0, 0.0)


def test_shares_of_samples_and_tokens_by_hand():
    # Trainer at 9, so ages are 9 - version.
    #   sample 0: 0 1 1 → 1 old; sample 1: 6 (its padding says 0) → 6 old; sample 2: 9 2 2 → 9 old
    # Samples: one each of ages 1, 6, 9. Tokens: ages 0, 1, 1, 6, 9, 2, 2; mean 21 / 7 = 3.
    batch = experience(
        [[9, 8, 8], [3, 0, 0], [0, 7, 7]],
        [[True, True, True], [True, False, False], [True, True, True]],
    )
    metrics = age_metrics(batch, 9)
    assert metrics == pytest.approx(
        {
            "train/age_mean": 16 / 3,
            "train/age_max": 9.0,
            "train/token_age_mean": 3.0,
            "age/samples_0": 0.0,
            "age/samples_1": 1 / 3,
            "age/samples_2": 0.0,
            "age/samples_3": 0.0,
            "age/samples_4": 0.0,
            "age/samples_5_to_8": 1 / 3,
            "age/samples_9_up": 1 / 3,
            "age/tokens_0": 1 / 7,
            "age/tokens_1": 2 / 7,
            "age/tokens_2": 2 / 7,
            "age/tokens_3": 0.0,
            "age/tokens_4": 0.0,
            "age/tokens_5_to_8": 1 / 7,
            "age/tokens_9_up": 1 / 7,
        }
    )
    assert metrics.keys() <= DOCUMENTED


def test_every_bucket_that_is_declared_is_made_and_the_other_way_round():
    made = {*bucket_names("samples"), *bucket_names("tokens")}
    assert made == {name for name in DOCUMENTED if name.startswith("age/")}


@pytest.mark.parametrize(("age", "bucket"), [(0, "0"), (4, "4"), (5, "5_to_8"), (8, "5_to_8"), (9, "9_up")])
def test_edges_of_the_buckets(age, bucket):
    metrics = age_metrics(experience([[100 - age]], [[True]]), 100)
    assert [name for name, share in metrics.items() if name.startswith("age/") and share] == [
        f"age/samples_{bucket}",
        f"age/tokens_{bucket}",
    ]


def test_ages_that_the_bound_rules_out_are_not_reported_but_one_that_breaks_it_is():
    def reported(age, bound):
        metrics = age_metrics(experience([[7 - age]], [[True]]), 7, max_staleness=bound)
        return [name.removeprefix("age/samples_") for name in metrics if name.startswith("age/samples")]

    assert reported(0, 0) == ["0"]
    assert reported(1, 2) == ["0", "1", "2"]
    assert reported(0, 6) == ["0", "1", "2", "3", "4", "5_to_8"]
    assert reported(2, 1) == ["0", "1", "2"]


def test_where_no_version_is_known_there_are_no_shares():
    zeros = {"train/age_mean": 0.0, "train/age_max": 0.0, "train/token_age_mean": 0.0}
    assert age_metrics(experience([[-1]], [[True]]), 5) == zeros
    half_known = age_metrics(experience([[4, 4], [-1, -1]], [[True, True], [True, True]]), 5, max_staleness=1)
    assert (half_known["age/samples_1"], half_known["age/tokens_1"]) == (1.0, 1.0)

"""The age of a batch, computed by hand."""

import pytest
import torch
from metric_table import DOCUMENTED

from coati.experience_maker import Experience


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


def ages_of(batch, version):
    metrics = batch.age_metrics(version)
    assert metrics.keys() <= DOCUMENTED
    return tuple(metrics[name] for name in ("train/age_mean", "train/age_max", "train/token_age_mean"))


def test_a_sample_is_as_old_as_its_oldest_token():
    # Trainer at 5. Sample 0: tokens of versions 3 and 4, so 2 old. Sample 1: version 5 (its second token is
    # padding that says 0), so 0 old. Mean (2 + 0) / 2 = 1; of tokens (2 + 1 + 0) / 3 = 1.
    batch = experience([[3, 4], [5, 0]], [[True, True], [True, False]])
    assert ages_of(batch, 5) == (1.0, 2.0, 1.0)


def test_tokens_may_be_younger_than_their_samples():
    # Trainer at 9, so ages are 9 - version.
    #   sample 0: 0 1 1 → 1 old; sample 1: 6 (its padding says 0) → 6 old; sample 2: 9 2 2 → 9 old
    # Samples: 1, 6, 9; mean 16 / 3. Tokens: 0, 1, 1, 6, 9, 2, 2; mean 21 / 7 = 3.
    batch = experience(
        [[9, 8, 8], [3, 0, 0], [0, 7, 7]],
        [[True, True, True], [True, False, False], [True, True, True]],
    )
    assert ages_of(batch, 9) == pytest.approx((16 / 3, 9.0, 3.0))


def test_unknown_versions_do_not_count():
    # The version of sample 1 is unknown (-1): the means are those of sample 0 alone, 5 - 2 = 3.
    batch = experience([[2, 2], [-1, -1]], [[True, True], [True, True]])
    assert ages_of(batch, 5) == (3.0, 3.0, 3.0)
    assert ages_of(experience([[-1]], [[True]]), 5) == (0.0, 0.0, 0.0)


def test_no_tokens_have_no_age():
    assert ages_of(experience([[1]], [[False]]), 5) == (0.0, 0.0, 0.0)
    batch = experience([[1]], [[True]])
    batch.policy_versions = None
    assert ages_of(batch, 5) == (0.0, 0.0, 0.0)

"""Items that are pickled together arrive unchanged."""

import dataclasses
import pickle

import pytest
import torch

from coati.batching import split_experience_batch
from coati.errors import DataError
from coati.experience import EXPERIENCE_FIELDS, Experience, ItemBundle


def items_of(*, dtype=torch.float32, lengths=(3, 0, 2)):
    """Samples of different lengths, one of them empty."""
    rows, width = len(lengths), max(lengths)
    generator = torch.Generator().manual_seed(1)
    action_mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    numbers = [torch.randn(rows, width, generator=generator).to(dtype) for _ in range(5)]
    experience = Experience(
        sequences=torch.arange(rows * (2 + width)).view(rows, -1),
        action_log_probs=numbers[0],
        values=numbers[1],
        reward=torch.randn(rows, generator=generator),
        kl=numbers[2],
        advantages=numbers[3],
        attention_mask=torch.cat([torch.ones(rows, 2, dtype=torch.long), action_mask.long()], dim=1),
        action_mask=action_mask,
        sample_ids=torch.arange(rows),
        reference_log_probs=numbers[4],
    )
    items = split_experience_batch(experience)
    for index, item in enumerate(items):
        item.delivery_id, item.lease = f"delivery-{index}", (10 + index, 1)
    return items


def assert_same(found, expected):
    assert type(found) is list
    assert [(item.delivery_id, item.lease) for item in found] == [(item.delivery_id, item.lease) for item in expected]
    for one, other in zip(found, expected, strict=True):
        for name in EXPERIENCE_FIELDS:
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None) == (theirs is None), name
            if mine is not None:
                assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
                assert mine.equal(theirs), name


def sent(items):
    return pickle.loads(pickle.dumps(ItemBundle(items)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_field_arrives_to_the_bit(dtype):
    items = items_of(dtype=dtype)
    assert_same(sent(items), items)


def test_what_arrives_can_be_written_to():
    (item, *_) = sent(items_of())
    item.advantages += 1.0


def test_a_bundle_pickles_into_fewer_bytes_than_its_items():
    items = items_of(lengths=(4,) * 50)
    assert len(pickle.dumps(ItemBundle(items))) < 0.8 * len(pickle.dumps(items))


def test_items_without_log_probs_arrive_as_they_are_and_are_refused_there():
    items = [dataclasses.replace(item, action_log_probs=None) for item in items_of()]
    (found, *_) = sent(items)
    with pytest.raises(DataError, match="action_log_probs must be a tensor"):
        found.validate()


def test_samples_that_lack_different_fields_travel_together():
    items = items_of()
    items[0].reference_log_probs = items[2].sample_ids = None
    assert_same(sent(items), items)

"""What arrives of a parcel is what was sent, whatever the items are like."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from coati.errors import DataError
from coati.experience_buffer.parcel import ItemParcel, _pack
from coati.experience_buffer.utils import EXPERIENCE_FIELDS, make_experience_batch, split_experience_batch


def sent(items):
    return pickle.loads(pickle.dumps(ItemParcel(items)))


def check_same(got, expected):
    assert type(got) is list
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.delivery_id, ours.round_index) == (theirs.delivery_id, theirs.round_index)
        for name in EXPERIENCE_FIELDS:
            value, wanted = getattr(ours, name), getattr(theirs, name)
            if wanted is None:
                assert value is None, name
            else:
                assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape), name
                assert torch.equal(value, wanted), name


def test_ragged_items_arrive_whole_with_their_numbers(item):
    items = [item(1, prompt=3, actions=2), item(2, prompt=1, actions=0), item(3, prompt=0, actions=4)]
    for number, one in enumerate(items):
        one.delivery_id, one.round_index = ("maker>trainer", number), 10 + number
        one.rollout_log_probs = one.action_log_probs.to(torch.bfloat16)
    assert _pack(items) is not None
    check_same(sent(items), items)


def test_what_arrives_may_be_written_to_and_each_item_has_its_own_part(item):
    first, second = sent([item(1), item(2)])
    before = second.values.clone()
    first.values.zero_()
    assert torch.equal(second.values, before)
    first.validate()


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_mask": None},
        {"values": torch.zeros(2, dtype=torch.bfloat16)},
        {"reward": torch.tensor([1.0])},
    ],
    ids=["a field is missing", "another dtype", "another shape"],
)
def test_items_that_are_not_alike_are_packed_one_by_one(item, changes):
    items = [item(1), item(2, **changes)]
    assert _pack(items) is None
    check_same(sent(items), items)


def test_a_bad_item_reaches_whoever_names_what_is_wrong(item):
    bad = item(2, values=torch.zeros(9))
    _, got = sent([item(1), bad])
    with pytest.raises(DataError, match=r"values must be \[2\], got \[9\]"):
        got.validate()
    hopeless = sent([item(1, sequences=torch.zeros(2, 2, dtype=torch.long))])
    with pytest.raises(DataError, match="one sample"):
        hopeless[0].validate()


def test_other_things_go_as_they_are():
    assert sent([SimpleNamespace(number=1)]) == [SimpleNamespace(number=1)]
    assert sent([]) == []


def test_items_that_share_memory_do_not_share_the_batchs(item):
    batch = make_experience_batch([item(1, prompt=3), item(2, actions=4)])
    items = split_experience_batch(batch, share_memory=True)
    check_same(items, split_experience_batch(batch))
    batch.values.zero_()
    assert float(items[0].values.abs().sum()) > 0
    check_same(sent(items), split_experience_batch(make_experience_batch(items)))

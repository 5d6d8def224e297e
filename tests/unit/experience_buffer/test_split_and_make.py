"""Splitting batches into samples and joining them again loses, moves and invents no value."""

import copy
import dataclasses
import doctest
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coati.experience as experience_module
from coati.batching import make_experience_batch, split_experience_batch
from coati.errors import DataError
from coati.experience import BufferItem, Experience

FIELDS = tuple(field.name for field in dataclasses.fields(Experience))
PER_ACTION = ("action_log_probs", "values", "kl", "advantages", "policy_versions")
PER_SAMPLE = ("reward", "sample_ids", "group_ids", "temperatures", "is_cut")
NAN = float("nan")


def test_docstring_examples_run():
    result = doctest.testmod(experience_module)
    assert result.attempted > 0
    assert result.failed == 0


def assert_same(left, right):
    """Assert that every field is None in both, or equal in dtype, shape and values."""
    for name in FIELDS:
        one, other = getattr(left, name), getattr(right, name)
        if one is None or other is None:
            assert one is other, name
        else:
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name


@st.composite
def samples(draw):
    """Return a sample without padding: at least one prompt token, perhaps no response, random ids and floats."""
    prompt, actions = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    finite = st.floats(-9, 9, width=32)
    floats = {
        name: torch.tensor(draw(st.lists(finite, min_size=actions, max_size=actions)), dtype=torch.float32)
        for name in PER_ACTION
        if name != "policy_versions"
    }
    inside = draw(st.lists(st.booleans(), min_size=max(0, actions - 1), max_size=max(0, actions - 1)))
    return BufferItem(
        sequences=torch.tensor(draw(st.lists(st.integers(0, 9), min_size=prompt + actions, max_size=prompt + actions))),
        reward=torch.tensor(draw(finite), dtype=torch.float32),
        attention_mask=torch.ones(prompt + actions, dtype=torch.long),
        # Interior tokens may be masked (a tool's output); the last one of a response is always True.
        action_mask=torch.tensor([*inside, True][:actions], dtype=torch.bool),
        sample_ids=torch.tensor(draw(st.integers(0, 1 << 62))),
        group_ids=torch.tensor(draw(st.integers(0, 99))),
        policy_versions=torch.full((actions,), draw(st.integers(0, 9))),
        temperatures=torch.tensor(draw(st.floats(0.5, 2, width=32))),
        proximal_log_probs=torch.arange(actions) - 0.25,
        reference_log_probs=torch.arange(actions) - 0.5,
        returns=torch.arange(actions) + 0.5,
        is_cut=torch.tensor(draw(st.booleans())),
        **floats,
    )


def batch_with_garbage(items, extra_prompt, extra_actions):
    """Return the items as one batch with more padding than necessary, filled with NaN and invalid ids."""
    prompt = max(item.num_prompt_tokens for item in items) + extra_prompt
    actions = max(item.num_actions for item in items) + extra_actions
    fields = {name: [] for name in FIELDS}
    for item in items:
        left, right = prompt - item.num_prompt_tokens, actions - item.num_actions
        for name in FIELDS:
            value = getattr(item, name)
            if name in PER_SAMPLE:
                fields[name].append(value)
                continue
            is_mask = name in ("attention_mask", "action_mask")
            garbage = 0 if is_mask else (NAN if value.is_floating_point() else -7)
            pad = (left if name in ("sequences", "attention_mask") else 0, right)
            fields[name].append(torch.nn.functional.pad(value, pad, value=garbage))
    return Experience(**{name: torch.stack(parts) for name, parts in fields.items()})


@given(data=st.data())
def test_split_then_make_is_the_identity_on_every_unpadded_value_of_samples_from_different_batches(data):
    batches = data.draw(st.lists(st.lists(samples(), min_size=1, max_size=3), min_size=1, max_size=3))
    originals, items = [], []
    for batch in batches:
        extra = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
        originals += batch
        items += split_experience_batch(batch_with_garbage(batch, *extra))
    for original, item in zip(originals, items, strict=True):
        assert_same(original, item)

    order = data.draw(st.permutations(range(len(items))))
    mixed = make_experience_batch([items[index] for index in order])

    mixed.validate()
    assert mixed.num_prompt_tokens == max(item.num_prompt_tokens for item in items)
    assert mixed.num_actions == max(item.num_actions for item in items)
    for row, index in enumerate(order):
        item = originals[index]
        start, first = mixed.num_prompt_tokens - item.num_prompt_tokens, mixed.num_prompt_tokens
        for name in FIELDS:
            got, expected = getattr(mixed, name)[row], getattr(item, name)
            if name in ("sequences", "attention_mask"):
                assert torch.equal(got[start : first + item.num_actions], expected)
                assert not got[:start].any()  # padding is 0, not the garbage of the old batch
                assert not got[first + item.num_actions :].any()
            elif name in PER_SAMPLE:
                assert torch.equal(got, expected)
            else:
                assert torch.equal(got[: item.num_actions], expected)
                assert not got[item.num_actions :].any()
    for index, item in zip(order, split_experience_batch(mixed), strict=True):
        assert_same(originals[index], item)


def test_padding_goes_left_of_prompts_and_right_of_responses_by_hand(item):
    # prompts of 1 and 3 tokens, responses of 2 and 1 tokens: P = 3, A = 2
    #   sample 1:  0    0    1000 | 1001 1002
    #   sample 2:  2000 2001 2002 | 2003 0
    batch = make_experience_batch([item(1, prompt=1, actions=2), item(2, prompt=3, actions=1)])
    assert batch.sequences.tolist() == [[0, 0, 1000, 1001, 1002], [2000, 2001, 2002, 2003, 0]]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch.action_mask.tolist() == [[True, True], [True, False]]
    assert batch.values.tolist() == [[110.0, 111.0], [210.0, 0.0]]
    assert batch.reward.tolist() == [1.0, 2.0]
    assert batch.sample_ids.tolist() == [1, 2]


def test_fields_that_a_custom_maker_lacks_get_a_neutral_value(item):
    ours = dataclasses.replace(
        item(1, prompt=1, actions=2),
        policy_versions=torch.tensor([3, 4]),
        temperatures=torch.tensor(0.5),
        proximal_log_probs=torch.tensor([-5.0, -6.0]),
        reference_log_probs=torch.tensor([-7.0, -8.0]),
        returns=torch.tensor([1.5, 2.5]),
        is_cut=torch.tensor(True),
        group_ids=torch.tensor(11),
    )
    lacking = ("attention_mask", "action_mask", "policy_versions", "temperatures", "proximal_log_probs")
    lacking += ("reference_log_probs", "group_ids", "sample_ids")
    theirs = dataclasses.replace(item(2, prompt=2, actions=1), **dict.fromkeys(lacking))
    batch = make_experience_batch([ours, theirs])
    assert batch.attention_mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 0]]
    assert batch.action_mask.tolist() == [[True, True], [True, False]]
    assert batch.policy_versions.tolist() == [[3, 4], [-1, 0]]
    assert batch.temperatures.tolist() == [0.5, 1.0]
    assert batch.proximal_log_probs.tolist() == [[-5.0, -6.0], [theirs.action_log_probs.item(), 0.0]]
    assert batch.reference_log_probs.tolist() == [[-7.0, -8.0], [theirs.action_log_probs.item(), 0.0]]
    assert (batch.group_ids.tolist(), batch.sample_ids.tolist()) == ([11, -1], [1, -1])
    assert batch.returns.tolist() == [[1.5, 2.5], [theirs.advantages.item() + theirs.values.item(), 0.0]]
    assert batch.is_cut.tolist() == [True, False]


def test_without_masks_nothing_is_padding_and_none_comes_back():
    floats = torch.arange(4.0).reshape(2, 2)
    tokens = torch.arange(6).reshape(2, 3)
    experience = Experience(tokens, floats, floats, torch.ones(2), floats, floats, None, None)
    items = split_experience_batch(experience)
    assert all(item.attention_mask is None and item.action_mask is None for item in items)
    assert_same(make_experience_batch(items), experience)


def test_samples_without_masks_get_them_when_they_have_to_be_padded(item):
    bare = item(1, prompt=2, actions=1, attention_mask=None, action_mask=None)
    longer = item(2, prompt=1, actions=3, attention_mask=None, action_mask=None)
    batch = make_experience_batch([bare, longer])
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch.action_mask.tolist() == [[True, False, False], [True, True, True]]


def test_samples_with_and_without_masks_mix(item):
    batch = make_experience_batch([item(1), item(2, attention_mask=None, action_mask=None)])
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1]] * 2
    assert batch.action_mask.tolist() == [[True, True]] * 2


def test_missing_ids_are_filled_in_as_unknown(item):
    full = item(
        1,
        group_ids=torch.tensor(4),
        policy_versions=torch.tensor([3, 3]),
        reference_log_probs=torch.tensor([-0.5, -0.25]),
        temperatures=torch.tensor(0.5),
    )
    bare = item(2, sample_ids=None)
    batch = make_experience_batch([full, bare])
    assert batch.sample_ids.tolist() == [1, experience_module.UNKNOWN_ID]
    assert batch.group_ids.tolist() == [4, experience_module.UNKNOWN_ID]
    assert batch.policy_versions.tolist() == [[3, 3], [experience_module.UNKNOWN_ID] * 2]
    assert batch.reference_log_probs.tolist() == [[-0.5, -0.25], bare.action_log_probs.tolist()]
    assert batch.temperatures.tolist() == [0.5, 1.0]
    assert make_experience_batch([bare]).sample_ids is None


def test_a_batch_of_empty_responses_survives(item):
    batch = make_experience_batch([item(1, prompt=1, actions=0), item(2, prompt=2, actions=0)])
    assert batch.values.shape == (2, 0)
    assert batch.sequences.tolist() == [[0, 1000], [2000, 2001]]
    lengths = [(part.num_prompt_tokens, part.num_actions) for part in split_experience_batch(batch)]
    assert lengths == [(1, 0), (2, 0)]


def test_a_sample_without_prompt_survives(item):
    batch = make_experience_batch([item(1, prompt=0, actions=2), item(2, prompt=0, actions=1)])
    assert batch.num_prompt_tokens == 0
    assert [part.num_prompt_tokens for part in split_experience_batch(batch)] == [0, 0]


def test_items_do_not_keep_their_batch_alive_or_share_its_memory(item):
    batch = make_experience_batch([item(1), item(2, actions=7)])
    part = split_experience_batch(batch)[0]
    for _, tensor in batch.tensors():
        tensor.zero_()
    assert part.values.tolist() == [110.0, 111.0]
    assert part.reward.item() == 1.0
    assert part.values.untyped_storage().nbytes() == (2 + 7) * 4  # only the items' values, without the batch's padding


def test_items_carry_no_graph(item):
    experience = make_experience_batch([item(1)])
    experience.values = experience.values.clone().requires_grad_()
    assert not split_experience_batch(experience)[0].values.requires_grad


def test_split_refuses_an_experience_that_does_not_fit_together(item):
    experience = make_experience_batch([item(1), item(2)])
    experience.kl = experience.kl[:, :1]
    with pytest.raises(DataError, match=r"experience\.kl"):
        split_experience_batch(experience)


def test_make_refuses_no_items():
    with pytest.raises(DataError, match="at least one item"):
        make_experience_batch([])


@pytest.mark.parametrize(
    ("name", "value", "came"),
    [
        ("sequences", torch.zeros(1, 4), r"\[1, 4\]"),
        ("sequences", torch.zeros(4), "torch.float32"),
        ("sequences", [1, 2, 3, 4], "list"),
        ("action_log_probs", None, "NoneType"),
        ("action_log_probs", torch.zeros(1, 2), r"\[1, 2\]"),
        ("values", torch.zeros(3), r"\[3\]"),
        ("values", None, "NoneType"),
        ("kl", torch.zeros(()), r"\[\]"),
        ("advantages", "many", "str"),
        ("reward", 1.0, "float"),
        ("reward", torch.zeros(2), r"\[2\]"),
        ("attention_mask", torch.ones(3), r"\[3\]"),
        ("policy_versions", torch.zeros(4), r"\[4\]"),
        ("sample_ids", 7, "int"),
    ],
)
def test_a_malformed_item_is_refused_by_the_name_of_its_field(item, name, value, came):
    with pytest.raises(DataError, match=rf"buffer item\.{name}.*got {came}"):
        make_experience_batch([item(1), item(2, **{name: value})])


def test_more_response_tokens_than_tokens_are_refused(item):
    bad = item(1, prompt=0, actions=2)
    bad.sequences, bad.attention_mask = bad.sequences[:1], None
    with pytest.raises(DataError, match="2 response tokens, more than the 1"):
        bad.validate()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_items_pickle_to_equal_values_of_the_same_dtype(item, dtype):
    original = item(
        3,
        values=torch.tensor([1.5, -0.0], dtype=dtype),
        reward=torch.tensor(0.25, dtype=dtype),
        action_mask=torch.tensor([False, True]),
        policy_versions=torch.tensor([1 << 40, 2]),
        delivery_id="4711",
    )
    for copied in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
        assert_same(copied, original)
        assert copied.delivery_id == "4711"
        copied.values.zero_()  # a writable copy, not a view of the original
        assert original.values[0] == 1.5


def test_pickled_items_hold_no_torch_tensors(item):
    # Ray moves numpy arrays far faster than torch tensors.
    assert b"_rebuild_tensor" not in pickle.dumps(item(1))


def test_an_empty_response_pickles(item):
    original = item(1, actions=0)
    assert_same(pickle.loads(pickle.dumps(original)), original)


@pytest.mark.parametrize("order", [1, -1])
def test_samples_of_different_dtypes_mix_without_loss(item, order):
    fine = torch.tensor([0.1, 0.2])
    items = [item(1, values=fine), item(2, values=torch.tensor([0.5, 0.25, 0.75], dtype=torch.bfloat16), actions=3)]
    values = make_experience_batch(items[::order]).values
    values = values if order == 1 else values.flip(0)
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.tensor([[0.1, 0.2, 0.0], [0.5, 0.25, 0.75]]))

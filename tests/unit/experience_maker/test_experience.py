"""`Experience`, the container between generation and training."""

import dataclasses
import doctest
import inspect
import logging

import pytest
import torch

import coati.experience as base
from coati.errors import DataError
from coati.experience_maker.base import Experience, ExperienceMaker

CONTRACT_FIELDS = (
    "sequences",
    "action_log_probs",
    "values",
    "reward",
    "kl",
    "advantages",
    "attention_mask",
    "action_mask",
)
EXTRA_FIELDS = (
    "sample_ids",
    "group_ids",
    "policy_versions",
    "temperatures",
    "proximal_log_probs",
    "reference_log_probs",
    "returns",
    "is_cut",
)


def tensors(batch=2, prompt=3, actions=2):
    """The eight fields of the contract, in order, each with distinct values."""
    per_action = [torch.full((batch, actions), float(index)) for index in range(4)]
    return (
        torch.arange(batch * (prompt + actions)).reshape(batch, prompt + actions),
        per_action[0],
        per_action[1],
        torch.arange(batch).float(),
        per_action[2],
        per_action[3],
        torch.ones(batch, prompt + actions, dtype=torch.long),
        torch.ones(batch, actions, dtype=torch.bool),
    )


def extras(batch=2, actions=2):
    return {
        "sample_ids": torch.arange(batch),
        "group_ids": torch.zeros(batch, dtype=torch.long),
        "policy_versions": torch.zeros(batch, actions, dtype=torch.long),
        "temperatures": torch.ones(batch),
    }


def test_docstring_examples_run():
    result = doctest.testmod(base)
    assert result.attempted > 0
    assert result.failed == 0


def test_leading_fields_are_those_of_the_contract_and_the_rest_default_to_none():
    fields = dataclasses.fields(Experience)
    assert tuple(field.name for field in fields[:8]) == CONTRACT_FIELDS
    assert all(field.default is dataclasses.MISSING for field in fields[:8])
    assert tuple(field.name for field in fields[8:]) == EXTRA_FIELDS
    assert all(field.default is None for field in fields[8:])


def test_fields_are_taken_by_position_and_by_keyword():
    values = tensors()
    by_position = Experience(*values)
    by_keyword = Experience(**dict(zip(CONTRACT_FIELDS, values, strict=True)))
    for name, value in zip(CONTRACT_FIELDS, values, strict=True):
        assert getattr(by_position, name) is value
        assert getattr(by_keyword, name) is value
    assert all(getattr(by_position, name) is None for name in EXTRA_FIELDS)


def test_usage_example_of_seed_001():
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    sequences, log_probs, values, reward, kl, advantages, attn_mask, act_mask = tensors()
    experience = Experience(
        sequences=sequences,
        action_log_probs=log_probs,
        values=values,
        reward=reward,
        kl=kl,
        advantages=advantages,
        attention_mask=attn_mask,
        action_mask=act_mask,
    )
    assert experience.pin_memory() is experience
    experience.to_device(torch.device(device))
    assert {tensor.device for _, tensor in experience.tensors()} == {torch.device(device)}


def test_sizes_of_a_batch():
    experience = Experience(*tensors(batch=4, prompt=3, actions=2))
    assert (experience.num_samples, experience.num_prompt_tokens, experience.num_actions) == (4, 3, 2)


def test_to_device_moves_every_tensor_in_place_and_leaves_none_alone():
    # Every machine has the meta device.
    experience = Experience(*tensors()[:6], None, None, **{**extras(), "group_ids": None})
    assert experience.to_device("meta") is None
    assert {tensor.device.type for _, tensor in experience.tensors()} == {"meta"}
    assert [name for name, _ in experience.tensors()] == [
        *CONTRACT_FIELDS[:6],
        "sample_ids",
        "policy_versions",
        "temperatures",
    ]
    assert experience.attention_mask is None
    assert experience.group_ids is None


def test_to_device_makes_no_graph():
    log_probs = torch.zeros(2, 2, requires_grad=True)
    values = list(tensors())
    values[1] = log_probs
    experience = Experience(*values)
    experience.to_device("meta")
    assert not experience.action_log_probs.requires_grad


def test_pin_memory_without_cuda_does_nothing_and_logs_it_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    base._log_once.cache_clear()
    values = tensors()
    experience = Experience(*values)
    with caplog.at_level(logging.DEBUG, logger="coati.experience"):
        assert experience.pin_memory() is experience
        experience.pin_memory()
    assert all(getattr(experience, name) is value for name, value in zip(CONTRACT_FIELDS, values, strict=True))
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert "pin_memory" in caplog.text


def test_pin_memory_with_cuda_pins_every_tensor_that_is_not_pinned(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: any(tensor is other for other in pinned))

    def pin(tensor):
        copy = tensor.clone()
        pinned.append(copy)
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    experience = Experience(*tensors()[:7], None)
    experience.pin_memory()
    assert len(pinned) == 7
    assert experience.action_mask is None
    before = experience.sequences
    experience.pin_memory()
    assert experience.sequences is before


def test_full_action_mask_is_all_true_without_a_mask_and_bool_with_one():
    values = tensors(batch=1, actions=2)
    assert Experience(*values[:7], None).full_action_mask().tolist() == [[True, True]]
    mask = Experience(*values[:7], torch.tensor([[1, 0]])).full_action_mask()
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[True, False]]


@pytest.mark.parametrize("rows", [torch.tensor([2, 0]), torch.tensor([True, False, True]), slice(1, 3)])
def test_select_takes_the_same_rows_of_every_field(rows):
    experience = Experience(*tensors(batch=3)[:7], None, **extras(batch=3))
    chosen = experience.select(rows)
    for name, tensor in experience.tensors():
        assert torch.equal(getattr(chosen, name), tensor[rows])
    assert chosen.action_mask is None
    assert experience.num_samples == 3


@pytest.mark.parametrize("name", [*CONTRACT_FIELDS[2:], *EXTRA_FIELDS])
def test_validate_names_the_field_that_does_not_fit(name):
    fields = {**dict(zip(CONTRACT_FIELDS, tensors(), strict=True)), **extras()}
    Experience(**fields).validate()
    fields[name] = torch.zeros(3, 7)
    with pytest.raises(DataError, match=rf"experience\.{name} must be \[2.*got \[3, 7\].*make_experience_batch"):
        Experience(**fields).validate()


@pytest.mark.parametrize("name", CONTRACT_FIELDS[:6])
@pytest.mark.parametrize("value", [None, [[0.0, 0.0]]])
def test_validate_refuses_what_is_not_a_tensor_in_a_required_field(name, value):
    fields = {**dict(zip(CONTRACT_FIELDS, tensors(), strict=True)), name: value}
    with pytest.raises(DataError, match=rf"experience\.{name} must be a tensor.*got {type(value).__name__}"):
        Experience(**fields).validate()


@pytest.mark.parametrize("name", ["sequences", "action_log_probs"])
def test_validate_refuses_a_batch_without_batch_dimension(name):
    fields = {**dict(zip(CONTRACT_FIELDS, tensors(), strict=True)), name: torch.zeros(2)}
    with pytest.raises(DataError, match=rf"experience\.{name} .*got \[2\]"):
        Experience(**fields).validate()


def test_validate_refuses_more_response_tokens_than_tokens():
    values = list(tensors(batch=1, prompt=1, actions=2))
    values[0] = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(DataError, match=r"has 2 response tokens, more than the 1 of experience\.sequences"):
        Experience(*values).validate()


def test_maker_signature_is_that_of_the_contract():
    assert list(inspect.signature(ExperienceMaker.__init__).parameters) == [
        "self",
        "actor",
        "critic",
        "reward_model",
        "initial_model",
    ]
    assert ExperienceMaker.__abstractmethods__ == {"make_experience"}
    with pytest.raises(TypeError, match="make_experience"):
        ExperienceMaker(None, None, None, None)


def test_a_custom_maker_keeps_its_models():
    class Fixed(ExperienceMaker):
        def make_experience(self, input_ids, attention_mask, **generate_kwargs):
            return Experience(*tensors())

    models = [torch.nn.Linear(1, 1) for _ in range(4)]
    maker = Fixed(*models)
    assert [maker.actor, maker.critic, maker.reward_model, maker.initial_model] == models
    assert maker.make_experience(torch.zeros(1, 1), torch.ones(1, 1), max_length=3).num_samples == 2

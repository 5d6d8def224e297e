"""Scoring in micro-batches gives the same results as scoring all at once."""

import dataclasses

import pytest
import torch
from torch import nn

from coati.experience import Experience
from coati.experience_maker.scoring import GapWatch, logprobs_of, values_of
from coati.models import Actor, Critic, action_logprobs


@pytest.mark.parametrize("max_tokens", [1, 9, 20])
@pytest.mark.parametrize("with_critic", [True, False])
def test_micro_batches_do_not_matter(llama, max_tokens, with_critic):
    reference = Actor(llama(seed=1).double())
    critic = Critic(llama(seed=2).double()) if with_critic else None
    if critic is not None:
        nn.init.normal_(critic.value_head.weight)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 1]])
    sequences = torch.randint(3, 11, mask.shape, generator=torch.Generator().manual_seed(0))
    tokens, temperatures = (sequences, mask, mask[:, 2:].bool()), torch.tensor([1.0, 0.7, 1.0, 1.3])
    calls = []
    reference.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs["input_ids"].numel()), with_kwargs=True
    )

    def scores(**limit):
        return logprobs_of(reference, tokens, temperatures, **limit), values_of(critic, tokens, **limit)

    micro_batches = scores(max_tokens=max_tokens)
    assert calls == {1: [4, 3, 2, 5], 9: [9, 5], 20: [14]}[max_tokens]
    for ours, theirs in zip(micro_batches, scores(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        assert not ours.requires_grad
    logprobs, values = micro_batches
    assert bool(values.any()) == with_critic
    assert bool(logprobs.any())


def written(sequences, log_probs, action_mask, versions, temperatures):
    nothing = torch.zeros_like(log_probs)
    scored = (nothing, nothing[:, 0], nothing, nothing)
    masks = (torch.ones_like(sequences), action_mask)
    return Experience(sequences, log_probs, *scored, *masks, policy_versions=versions, temperatures=temperatures)


def test_the_gap_is_that_of_the_first_rows_and_of_response_tokens_only(llama):
    actor = llama().double()
    sequences = torch.randint(3, 11, (3, 5), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.ones_like(sequences)
    temperatures = torch.tensor([1.0, 0.7, 1.0])
    exact, _ = action_logprobs(actor, sequences, attention_mask, 3, temperatures=temperatures)
    action_mask = torch.tensor([[True, True, True], [True, False, False], [True, True, True]])
    drawn_by = exact.float()
    drawn_by[0, 1] += 0.5
    drawn_by[1, 2] += 9.0  # not a response token
    drawn_by[2, 0] += 9.0  # not a probed row
    rollout = written(sequences, drawn_by, action_mask, torch.zeros(3, 3, dtype=torch.long), temperatures)
    metrics = GapWatch().measure(actor, rollout, version=0)
    assert metrics["rollout/logprob_gap"].weight == 4
    assert metrics["rollout/logprob_gap"].value == pytest.approx(0.5 / 4, abs=1e-6)
    assert metrics["rollout/logprob_gap_max"].value == pytest.approx(0.5, abs=1e-6)
    nothing = dataclasses.replace(rollout, action_mask=torch.zeros_like(action_mask))
    assert GapWatch().measure(actor, nothing, version=0) == {}


def test_an_engine_gap_beyond_rounding_is_warned_about_once(llama, caplog):
    actor = llama()
    sequences = torch.randint(3, 11, (3, 5), generator=torch.Generator().manual_seed(0))
    exact, _ = action_logprobs(actor, sequences, None, 3)
    ones = torch.ones(3, 3, dtype=torch.bool)
    rollout = written(sequences, exact.detach(), ones, torch.full((3, 3), 7), torch.ones(3))
    watch = GapWatch()
    assert watch.measure(actor, rollout, version=7)["rollout/logprob_gap_max"].value < 1e-5
    assert not caplog.records
    wrong = dataclasses.replace(rollout, action_log_probs=exact.detach() - 0.01)
    assert watch.measure(actor, wrong, version=7) == {}, "once for each version"
    for version in (8, 9):
        newer = dataclasses.replace(wrong, policy_versions=torch.full((3, 3), version))
        gap = watch.measure(actor, newer, version=version)["rollout/logprob_gap"]
        assert gap.value == pytest.approx(0.01, abs=1e-5)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "log-probs" in caplog.text
    assert watch.measure(actor, wrong, version=30) == {}, "older weights wrote them"


def test_the_engine_gap_is_measured_often_at_first_and_then_for_every_tenth_version(llama):
    actor, watch = llama(), GapWatch()
    sequences = torch.randint(3, 11, (3, 5), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(3, 3, dtype=torch.bool)

    def is_measured(version):
        rollout = written(sequences, torch.zeros(3, 3), ones, torch.full((3, 3), version), torch.ones(3))
        return bool(watch.measure(actor, rollout, version=version))

    assert [version for version in range(40) if is_measured(version)] == [*range(10), 19, 29, 39]
    assert is_measured(20), "a run that went back to version 20"

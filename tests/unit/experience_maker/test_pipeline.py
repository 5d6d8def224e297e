"""From prompts to experience: versions, ids, counts, and dropped batches."""

import pytest
import tiny
import torch

from coati.errors import DataError, RewardError
from coati.experience_maker import AllSamplesDropped, ExperienceMaker
from coati.experience_maker.pipeline import (
    MAX_BATCHES_WITHOUT_SIGNAL,
    MAX_EMPTY_BATCHES,
    MIN_DROPPED_IN_A_ROW,
    ExperiencePipeline,
)
from coati.experience_maker.scoring import NoSignal
from coati.prompts.batch import parse_prompts
from coati.weights.served import ServedModels, VerifiedUpdate


class FakeMaker(ExperienceMaker):
    """Keeps `plan[i]` samples of its i-th batch, drops the rest, or raises what the plan says."""

    def __init__(self, *plan):
        super().__init__(torch.nn.Linear(1, 1), None, None, None)
        self.plan = list(plan)
        self.calls = []
        self.while_making = lambda: None

    def make_experience(self, input_ids, attention_mask, *, sample_ids, group_ids, columns, **options):
        ids = {"sample_ids": sample_ids, "group_ids": group_ids, "columns": columns}
        self.calls.append({"version": self.policy_version, **ids, **options})
        self.while_making()
        outcome = self.plan.pop(0) if self.plan else len(input_ids)
        if isinstance(outcome, Exception):
            raise outcome
        return tiny.experience(0, outcome)


def make(pipeline, batch):
    return pipeline.finish_batch(pipeline.make_batch(batch))


def batch_of(size, columns=None, **ids):
    return parse_prompts({"input_ids": torch.ones(size, 2), **ids, **(columns or {})})


def pipeline_of(*plan, **kwargs):
    maker = FakeMaker(*plan)
    return ExperiencePipeline(maker, ServedModels(maker.trained_models), **kwargs)


def update(version):
    tensors = {("actor", "weight"): torch.zeros(1, 1)}
    return VerifiedUpdate(version=version, tensors=tensors, is_full=False)


def test_samples_are_numbered_on_from_the_first_id_and_options_reach_the_maker():
    pipeline = pipeline_of(first_sample_id=100, generate_kwargs={"top_k": 5})
    columns = {"answer": ["a", "b"]}
    make(pipeline, batch_of(2, group_ids=torch.tensor([8, 9]), columns=columns))
    make(pipeline, batch_of(3))
    first, second = pipeline.experience_maker.calls
    assert (first["sample_ids"].tolist(), second["sample_ids"].tolist()) == ([100, 101], [102, 103, 104])
    assert first["group_ids"].tolist() == [8, 9]
    assert first["columns"] == columns
    assert first["top_k"] == 5


def test_a_maker_of_whole_batches_gets_prompts_where_its_actor_is():
    pipeline, devices = pipeline_of(), []
    pipeline.experience_maker.actor.to("meta")  # every machine has this device
    make_experience = pipeline.experience_maker.make_experience
    pipeline.experience_maker.make_experience = lambda *tokens, **options: (
        devices.extend(one.device.type for one in tokens) or make_experience(*tokens, **options)
    )
    make(pipeline, batch_of(2))
    assert devices == ["meta", "meta"]


def test_ids_of_the_batch_are_kept():
    pipeline = pipeline_of()
    make(pipeline, batch_of(2, sample_ids=torch.tensor([40, 7])))
    assert pipeline.experience_maker.calls[0]["sample_ids"].tolist() == [40, 7]


def test_experience_is_labelled_with_the_version_that_serves_even_if_a_newer_one_arrives_meanwhile():
    pipeline = pipeline_of()
    pipeline.served.offer(update(3))
    pipeline.experience_maker.while_making = lambda: pipeline.served.offer(update(4))
    make(pipeline, batch_of(1))
    assert pipeline.experience_maker.policy_version == 3
    assert pipeline.served.version == 4
    pipeline.experience_maker.while_making = lambda: None
    make(pipeline, batch_of(1))
    assert [call["version"] for call in pipeline.experience_maker.calls] == [3, 4]


def test_counts_add_up():
    pipeline = pipeline_of(4, 1, AllSamplesDropped("all bad"))
    assert make(pipeline, batch_of(4)).num_samples == 4
    assert make(pipeline, batch_of(4)).num_samples == 1
    assert make(pipeline, batch_of(3)) is None
    assert (pipeline.num_made, pipeline.num_dropped) == (5, 6)


def test_too_many_dropped_batches_in_a_row_are_an_error_with_the_last_reason():
    # Batches of 20: five in a row are 100 samples, which is above the minimum of 64.
    pipeline = pipeline_of(*[AllSamplesDropped(f"reason {index}") for index in range(MAX_EMPTY_BATCHES)])
    for _ in range(MAX_EMPTY_BATCHES - 1):
        assert make(pipeline, batch_of(20)) is None
    with pytest.raises(DataError, match=rf"100 samples in a row .* reason {MAX_EMPTY_BATCHES - 1}"):
        make(pipeline, batch_of(20))


def test_a_few_small_batches_in_a_row_may_be_dropped():
    pipeline = pipeline_of(*[AllSamplesDropped("bad")] * MIN_DROPPED_IN_A_ROW)
    for _ in range(MIN_DROPPED_IN_A_ROW - 1):
        assert make(pipeline, batch_of(1)) is None
    with pytest.raises(DataError, match=f"{MIN_DROPPED_IN_A_ROW} samples in a row"):
        make(pipeline, batch_of(1))


def test_dynamic_sampling_may_drop_for_longer():
    pipeline = pipeline_of(*[NoSignal("all the same")] * MAX_BATCHES_WITHOUT_SIGNAL)
    for _ in range(MAX_BATCHES_WITHOUT_SIGNAL - 1):
        assert make(pipeline, batch_of(64)) is None
    with pytest.raises(DataError, match="all the same"):
        make(pipeline, batch_of(64))


def test_batches_without_signal_do_not_count_towards_faults():
    plan = [*[NoSignal("all the same")] * 20, AllSamplesDropped("nan"), *[NoSignal("all the same")] * 20]
    pipeline = pipeline_of(*plan)
    for _ in plan:
        assert make(pipeline, batch_of(64)) is None
    for _ in range(MAX_EMPTY_BATCHES - 1):
        pipeline.experience_maker.plan.append(AllSamplesDropped("nan"))
        assert make(pipeline, batch_of(64)) is None


def test_one_good_batch_ends_a_row_of_dropped_ones():
    bad = [AllSamplesDropped("bad")] * (MIN_DROPPED_IN_A_ROW - 1)
    pipeline = pipeline_of(*bad, 1, *bad)
    made = [make(pipeline, batch_of(1)) is not None for _ in range(2 * MIN_DROPPED_IN_A_ROW - 1)]
    assert made.count(True) == 1


def test_the_models_can_be_updated_after_a_reward_error():
    pipeline = pipeline_of(RewardError("the reward broke"))
    with pytest.raises(RewardError, match="the reward broke"):
        make(pipeline, batch_of(1))
    assert pipeline.served.offer(update(1))  # committed at once, because the models are not in use
    assert pipeline.served.version == 1

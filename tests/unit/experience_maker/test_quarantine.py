"""Samples on which a reward fails: their groups are quarantined, recorded, counted, limited and accounted for."""

from types import SimpleNamespace

import pytest

from coati.batching import split_experience_batch
from coati.config import AlgorithmSettings
from coati.errors import RewardError
from coati.experience import Sample
from coati.experience_buffer.buffer import LeasedBuffer
from coati.experience_maker import NaiveExperienceMaker
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.work_loop import WorkLoop
from coati.experience_maker.work_source import LeasedPrompts
from coati.ledger import LedgerRules
from coati.models import Actor
from coati.monitor.records import RecordLog
from coati.peers import LocalPeers
from coati.rewards import FunctionReward, RewardScorer, WeightedSum
from coati.rewards.calling import Verdict
from coati.weights.served import ServedModels

SIZE = 2  # samples of each prompt
RULES = LedgerRules(samples_per_version=8, total_samples=64, lead=0, max_staleness=0, group_size=SIZE)


class Numbers:
    """A tokenizer that writes numbers."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


class Prompts:
    """Batches of four groups; the column `number` holds the id of each sample."""

    samples_per_batch = 8
    skipped = SimpleNamespace(total=lambda: 0)

    def batch(self, numbers, *, group_size):
        ids = [number * group_size + part for number in numbers for part in range(group_size)]
        groups = [number for number in numbers for _ in range(group_size)]
        pairs = zip(ids, groups, strict=True)
        return [Sample(i, [3, 3], group=g, columns={"number": i, "prompt": f"prompt {g}"}) for i, g in pairs], {}


class Rig:
    """A maker with its leases, whose reward raises on some samples and has no score for others."""

    def __init__(self, llama, *, bad=(), nan=(), max_quarantined=64, algorithm="grpo", is_host_work=True, **options):
        def judge(completions, number):
            for one in number:
                if one in bad:
                    raise KeyError(f"no {one}")
            return [None if one in nan else float(one % 3) for one in number]

        judge.is_host_work = is_host_work
        scorer = RewardScorer(FunctionReward(judge), Numbers(), max_quarantined=max_quarantined)
        self.maker = NaiveExperienceMaker(
            Actor(llama(seed=1)),
            None,
            scorer,
            llama(seed=2),
            algorithm=AlgorithmSettings(name=algorithm, **options),
        )
        served = ServedModels(self.maker.trained_models)
        self.pipeline = ExperiencePipeline(self.maker, served, generate_kwargs={"max_new_tokens": 3})
        self.buffer = LeasedBuffer(RULES, 8, clock=lambda: 0.0)
        self.fates = []
        drop = self.buffer._ledger.drop
        self.buffer._ledger.drop = lambda lease, reason, *, fate, now: (
            self.fates.append((lease.number, fate, reason)),
            drop(lease, reason, fate=fate, now=now),
        )
        self.prompts = LeasedPrompts(Prompts(), ["t"], RULES, served, peers=LocalPeers(t=self.buffer), maker_name="m")

    def make(self):
        """Make one batch and request the next."""
        batch = self.pipeline.make_batch(self.prompts.poll(8))
        experience = self.pipeline.finish_batch(batch)
        self.buffer.extend(
            self.prompts.close_leases(batch, [] if experience is None else split_experience_batch(experience))
        )
        self.again = self.prompts.poll(8)
        return batch


@pytest.mark.parametrize("is_host_work", [True, False])
def test_a_group_with_a_bad_sample_is_quarantined_whole_with_the_reason(llama, is_host_work):
    rig = Rig(llama, bad=[2, 7], is_host_work=is_host_work)
    batch = rig.make()
    assert batch.experience.sample_ids.tolist() == [0, 1, 4, 5]
    assert batch.experience.reward.tolist() == [0.0, 1.0, 1.0, 2.0]
    (first, fate, reason), (second, *_) = rig.fates
    assert (first, second, fate) == (1, 3, "quarantine")
    assert reason.startswith("Reward function 'judge' raised KeyError: 'no 2' (at ")
    assert reason.endswith(" (samples 2)")
    assert [sample.id for sample in rig.again] == [8, 9, 10, 11]  # replacements
    assert (rig.pipeline.num_made, rig.pipeline.num_dropped, rig.pipeline.num_quarantined) == (4, 0, 4)
    metrics = rig.pipeline.record(batch, samples_kept=0)["metrics"]
    assert (metrics["maker/quarantined"].value, metrics["maker/dropped"].value) == (4.0, 0.0)


@pytest.mark.parametrize(("bad", "expected"), [([2], "on 1 sample,"), ([2, 7], "on 2 samples,")])
def test_a_warning_says_on_how_many_samples_it_failed(llama, caplog, bad, expected):
    Rig(llama, bad=bad).make()
    assert expected in caplog.text


def test_a_quarantine_record_has_the_input_the_completion_and_the_error(llama):
    (record,) = Rig(llama, bad=[2]).make().quarantined
    assert (record["sample_id"], record["group_id"], record["prompt"]) == (2, 1, "prompt 1")
    assert record["columns"] == {"number": 2}
    assert len(record["completion"].split()) > 0
    assert "raised KeyError: 'no 2'" in record["error"]


def test_long_texts_are_cut(llama):
    rig = Rig(llama, bad=[2])
    rig.maker.reward_model.tokenizer = SimpleNamespace(decode=lambda ids, **_: "x" * 50_000 * (len(ids) > 2))
    (record,) = rig.make().quarantined
    assert max(len(str(value)) for value in record.values()) == 10_000


def test_samples_have_the_prompts_and_columns_of_their_rows(llama):
    rig = Rig(llama, bad=[0, 2])
    batch = rig.make()
    for sample, answer in zip(batch.samples, [{"of": number} for number in range(7)] + ["x" * 5000], strict=True):
        sample.columns["answer"] = answer
    samples = rig.pipeline.record(batch, samples_kept=4)["samples"]
    assert [sample["columns"] for sample in samples[:2]] == [
        {"number": 4, "answer": {"of": 4}},
        {"number": 5, "answer": {"of": 5}},
    ]
    assert len(samples[-1]["columns"]["answer"]) == 1000, "a long value is cut"
    assert samples[0]["prompt"] == "prompt 2", "as it was given, not as the tokenizer spells it"


def test_samples_have_what_each_term_and_its_details_say(llama):
    rig = Rig(llama, bad=[2])
    scorer = rig.maker.reward_model
    named = FunctionReward(lambda number: [{"score": one, "seen": one} for one in number], name="named")
    scorer.reward = WeightedSum([(scorer.reward, 1.0), (named, -0.5)])
    batch = rig.make()
    first, second, *_ = rig.pipeline.record(batch, samples_kept=6)["samples"]
    assert (first["terms"], first["details"]) == ({"judge": 0.0, "named": 0.0}, {"named": {"seen": 0}})
    assert (second["terms"], second["reward"]) == ({"judge": 1.0, "named": 1.0}, 0.5)
    metrics = rig.pipeline.record(batch, samples_kept=0)["metrics"]
    assert metrics["reward/term_named"].value == pytest.approx(sum(range(8)) / 8)
    assert (metrics["reward/term_judge"].value, metrics["reward/retries"].value) == (pytest.approx(5 / 7), 0.0)


def test_no_score_and_a_failure_are_told_apart(llama, caplog):
    rig = Rig(llama, bad=[2], nan=[4, 5])
    rig.make()
    assert "no score by 'judge': 2 of 8 samples (sample ids [4, 5])" in caplog.text
    assert [fate for _, fate, _ in rig.fates] == ["quarantine", "drop"]
    assert rig.fates[1] == (2, "drop", "no score by 'judge' (samples 4, 5)")
    assert (rig.pipeline.num_dropped, rig.pipeline.num_quarantined) == (2, 2)


def test_samples_without_signal_say_so(llama):
    rig = Rig(llama, algorithm="grpo", dynamic_sampling=True)
    rig.maker.reward_model.reward._function = lambda arguments, expected: [
        Verdict(score) for score in (1.0, 1.0, *[0.0, 1.0] * 3)
    ]
    rig.make()
    assert rig.fates == [(0, "drop", "all samples scored the same (samples 0, 1)")]


def test_a_batch_of_failures_only_is_quarantined_and_not_dropped(llama):
    rig = Rig(llama, bad=range(8))
    rig.maker.reward_model.working.add("judge")  # otherwise the reward never worked, which is an error
    assert rig.make().experience is None
    assert [fate for _, fate, _ in rig.fates] == ["quarantine"] * 4
    assert (rig.pipeline.num_dropped, rig.pipeline.num_quarantined) == (0, 8)
    assert [sample.id for sample in rig.again] == list(range(8, 16))


def test_over_the_budget_the_run_ends_with_the_reason(llama):
    rig = Rig(llama, bad=[2, 4, 7], max_quarantined=2)
    batch = rig.pipeline.make_batch(rig.prompts.poll(8))
    with pytest.raises(RewardError, match=r"3 groups .* reward.max_quarantined \(2\).*The last: .*'no 7'"):
        rig.pipeline.finish_batch(batch)
    assert len(batch.quarantined) == 3  # recorded nevertheless


def test_the_budget_counts_samples_where_they_are_not_compared(llama):
    rig = Rig(llama, bad=[2, 3], max_quarantined=1, algorithm="reinforce++")
    batch = rig.pipeline.make_batch(rig.prompts.poll(8))
    with pytest.raises(RewardError, match=r"2 groups .* reward.max_quarantined \(1\)"):
        rig.pipeline.finish_batch(batch)
    assert [sample.id for sample in batch.samples if sample.is_quarantined] == [2, 3]
    rig = Rig(llama, bad=[2, 3], max_quarantined=1)
    assert {sample.unit for sample in rig.make().samples if sample.is_quarantined} == {1}


def test_without_a_budget_the_reward_ends_the_run_with_its_own_error(llama):
    with pytest.raises(RewardError, match=r"^Reward function 'judge' raised KeyError: 'no 2'"):
        Rig(llama, bad=[2], max_quarantined=0).make()


@pytest.mark.parametrize("max_quarantined", [64, 1])
def test_the_work_loop_records_what_is_in_quarantine_before_it_fails(llama, max_quarantined):
    rig, log = Rig(llama, bad=[2, 7], max_quarantined=max_quarantined), RecordLog()
    sender = SimpleNamespace(send=rig.buffer.extend, has_room=lambda: True, collect=lambda: None)
    work = iter([rig.prompts.poll(8)])
    rig.prompts.wait_for_work = lambda room: next(work, None)
    loop = WorkLoop(rig.pipeline, rig.prompts, sender, record=log.append)
    if max_quarantined == 1:
        with pytest.raises(RewardError, match="2 groups"):
            loop.run()
    else:
        loop.run()
    records = log.since(0).records
    assert [record["quarantined"]["sample_id"] for record in records if "quarantined" in record] == [2, 7]
    assert len(records) == (2 if max_quarantined == 1 else 3)

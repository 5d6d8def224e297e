"""Numbers that describe a batch, by hand."""

import pytest
import torch

from coati.experience import Experience
from coati.experience_maker.statistics import describe, maker_record, sample_texts


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


def test_describe_by_hand(experience):
    # rewards 1, 2, 6: mean 3, variance (4 + 1 + 9) / 3
    # kl: 0.5 + 0.5 + 1 + 2 + 1 + 1 = 6 nats over 3 samples and 6 tokens
    metrics = describe(experience, (2,))
    values = {name: metric.value for name, metric in metrics.items()}
    assert values == pytest.approx(
        {
            "reward/mean": 3.0,
            "reward/std": (14 / 3) ** 0.5,
            "reward/min": 1.0,
            "reward/max": 6.0,
            "kl/per_sample": 2.0,
            "kl/per_token": 1.0,
            "response/length": 2.0,
            "maker/samples": 3.0,
            "response/cut_fraction": 1 / 3,
            "response/empty": 1.0,
        }
    )


def test_without_an_end_token_nothing_is_said_about_cuts(experience):
    assert not {"response/cut_fraction", "response/empty"} & set(describe(experience))


def test_a_response_without_tokens_counts_as_cut(experience):
    experience.action_mask[1] = False
    metrics = describe(experience, (2,))
    assert metrics["response/cut_fraction"].value == pytest.approx(2 / 3)
    assert metrics["response/empty"].value == 0.0


class Letters:
    def decode(self, ids, skip_special_tokens):
        return " ".join(str(int(token)) for token in ids)


def test_samples_are_told_without_padding(experience):
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
def test_samples_come_from_all_over_the_batch(experience, count, expected):
    batch = experience.select(torch.zeros(8, dtype=torch.long))
    batch.sample_ids = torch.arange(8)
    assert [sample["sample_id"] for sample in sample_texts(batch, Letters(), count)] == expected


@pytest.mark.parametrize(("tokenizer", "num_texts"), [(Letters(), 1), (None, 0)])
def test_a_makers_record_has_speed_drops_and_samples(experience, tokenizer, num_texts):
    record = maker_record(
        experience,
        version=4,
        make_seconds=1.5,
        num_dropped=2,
        eos_token_ids=(2,),
        tokenizer=tokenizer,
        samples_kept=1,
    )
    assert record["version"] == 4
    assert record["metrics"]["maker/samples_per_second"].value == pytest.approx(2.0)
    assert record["metrics"]["maker/dropped"].value == 2.0
    assert len(record["samples"]) == num_texts

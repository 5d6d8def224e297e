"""The maker's working loop over Ray; tests/unit/experience_maker tests the rest of it without Ray."""

import pytest
import ray
import torch
from ray_testing import DEADLINES, PATIENCE, numbered, strategy
from tiny import maker_models

from coati.actors.options import MakerOptions
from coati.experience_maker import Experience, ExperienceMaker
from coati.ray.experience_maker_holder import ExperienceMakerHolder

pytestmark = pytest.mark.usefixtures("cluster")


def received(sinks):
    return [ray.get(sink.sample_ids.remote(), timeout=PATIENCE) for sink in sinks.values()]


class Echo(ExperienceMaker):
    """Repeats the prompt's last token."""

    def make_experience(self, input_ids, attention_mask, **generate_kwargs):
        num_actions = generate_kwargs["max_new_tokens"]
        floats = torch.zeros(len(input_ids), num_actions)
        sequences = torch.cat([input_ids, input_ids[:, -1:].expand(-1, num_actions)], dim=1)
        return Experience(sequences, floats, floats, torch.ones(len(input_ids)), floats, floats, None, None)


def test_a_custom_maker_sends_to_three_trainers_in_turn_across_batches_of_four(sinks, keep, unique):
    options = MakerOptions(deadlines=DEADLINES, num_threads=1, maker=Echo)
    maker = keep(
        ExperienceMakerHolder.options(name=unique("maker"), num_cpus=0).remote(
            list(sinks), strategy, maker_models, options=options, max_new_tokens=2
        )
    )
    batches = [numbered(0, 4), numbered(4, 4), numbered(8, 4)]
    ray.get(maker.workingloop.remote(lambda: batches), timeout=PATIENCE)
    assert received(sinks) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    progress = ray.get(maker.progress.remote(), timeout=PATIENCE)
    assert (progress.state, progress.num_samples) == ("finished", 12)

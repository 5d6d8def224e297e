"""Fresh samples of a model: mean reward, and KL to the reference, which `coati eval` does not measure."""

import itertools
import statistics
from typing import NamedTuple

import torch
from sentences import is_grammatical

from coati import build
from coati.batching import columns_of, pad_prompts
from coati.config import AlgorithmSettings, RunSettings
from coati.devices import set_up_cpu
from coati.experience_maker import NaiveExperienceMaker
from coati.models import Actor
from coati.rewards.base import decode_completions, decode_prompts

NUM_COMPARED = 64

# Beyond the ids of any training run, so that the draws are fresh.
_FIRST_SAMPLE_ID = 1 << 50


class EvaluatedSample(NamedTuple):
    """One fresh sample."""

    prompt: str
    response: str
    reward: float
    kl: float


class Evaluation(NamedTuple):
    """Fresh samples of a model and their statistics."""

    samples: tuple[EvaluatedSample, ...]

    @property
    def numbers(self) -> dict[str, float]:
        """Mean reward and KL (nats per sample), fraction of distinct texts among `NUM_COMPARED`, and of sentences."""
        texts = [sample.prompt + sample.response for sample in self.samples]
        compared = texts[:NUM_COMPARED]
        return {
            "reward": statistics.fmean(sample.reward for sample in self.samples),
            "kl": statistics.fmean(sample.kl for sample in self.samples),
            "distinct": len(set(compared)) / len(compared),
            "grammatical": statistics.fmean(map(is_grammatical, texts)),
        }


def evaluate(config: RunSettings, model_path: str, *, num_samples: int = 64) -> Evaluation:
    """Sample the model at `model_path` with the run's prompts and generate options; keep samples with a score."""
    set_up_cpu()
    reference_path = config.reference_path or config.model.path
    actor, reference = Actor.from_pretrained(model_path), Actor.from_pretrained(reference_path)
    scorer = build.make_scorer(config)
    maker = NaiveExperienceMaker(
        *(actor, None, scorer, reference),
        algorithm=AlgorithmSettings(name="reinforce++"),  # needs neither a critic nor groups
        seed=config.run.seed,
        engine=config.rollout,
    )
    samples: list[EvaluatedSample] = []
    stream, size, per_prompt = (
        build.make_prompts(config),
        config.rollout.prompts_per_batch,
        config.rollout.samples_per_prompt,
    )
    for number in itertools.count():
        prompts, _ = stream.batch(range(number * size, (number + 1) * size), group_size=per_prompt)
        if not prompts:
            continue
        made = maker.make_experience(
            *pad_prompts(prompts, pad_token=0),
            sample_ids=torch.arange(len(prompts)) + _FIRST_SAMPLE_ID + number * size * per_prompt,
            columns=columns_of(prompts),
            **config.rollout.generate_options,
        )
        assert made.attention_mask is not None
        tokens = (made.sequences, made.attention_mask, made.full_action_mask())
        texts = (decode_prompts(scorer.tokenizer, *tokens), decode_completions(scorer.tokenizer, *tokens))
        rows = zip(*texts, made.reward.tolist(), made.kl.sum(dim=1).tolist(), strict=True)
        samples += [EvaluatedSample(*row) for row in rows]
        if len(samples) >= num_samples:
            break
    return Evaluation(tuple(samples[:num_samples]))

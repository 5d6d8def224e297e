"""Fresh samples of a model, scored: what a person looks at before and after training."""

import dataclasses
from typing import NamedTuple

import torch

from coati import run
from coati.config import AlgorithmSettings, RunSettings
from coati.cpu import set_up_cpu
from coati.demo.grammar import is_grammatical
from coati.experience_maker import NaiveExperienceMaker
from coati.experience_maker.base import PromptBatch
from coati.models import Actor
from coati.rewards.texts import decode_completions, decode_prompts

NUM_COMPARED = 64

# Far from the ids of any training run, so that the draws are fresh.
_FIRST_SAMPLE_ID = 1 << 50


class EvaluatedSample(NamedTuple):
    """One fresh sample."""

    prompt: str
    response: str
    reward: float
    kl: float

    @property
    def text(self) -> str:
        """Prompt and response as one text."""
        return self.prompt + self.response


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Fresh samples of a model and their means."""

    samples: tuple[EvaluatedSample, ...]

    @property
    def reward(self) -> float:
        """Mean reward."""
        return sum(sample.reward for sample in self.samples) / len(self.samples)

    @property
    def kl(self) -> float:
        """Mean KL to the initial model, nats per sample."""
        return sum(sample.kl for sample in self.samples) / len(self.samples)

    @property
    def distinct_fraction(self) -> float:
        """Share of different texts among the first `NUM_COMPARED` samples."""
        compared = self.samples[:NUM_COMPARED]
        return len({sample.text for sample in compared}) / len(compared)

    @property
    def grammatical_fraction(self) -> float:
        """Share of complete sentences of the film grammar."""
        return sum(is_grammatical(sample.text) for sample in self.samples) / len(self.samples)


def evaluate(config: RunSettings, model_path: str, *, num_samples: int = 64) -> Evaluation:
    """Sample the model at `model_path` with the run's prompts and generate options; keep samples that have a score."""
    set_up_cpu()
    actor, reference = Actor.from_pretrained(model_path), Actor.from_pretrained(config.reference_path)
    scorer = run.make_scorer(config)
    maker = NaiveExperienceMaker(
        *(actor, None, scorer, reference),
        algorithm=AlgorithmSettings(name="reinforce++"),  # needs neither a critic nor groups
        seed=config.run.seed,
        engine=config.rollout.engine,
    )
    samples: list[EvaluatedSample] = []
    for number, prompts in enumerate(map(PromptBatch.parse, run.make_prompts(config))):
        made = maker.make_experience(
            prompts.input_ids,
            prompts.attention_mask,
            sample_ids=torch.arange(len(prompts)) + _FIRST_SAMPLE_ID + number * len(prompts),
            columns=prompts.columns,
            **config.rollout.generate_options,
        )
        assert made.attention_mask is not None
        tokens = (made.sequences, made.attention_mask, made.full_action_mask())
        texts = (decode_prompts(scorer.tokenizer, *tokens), decode_completions(scorer.tokenizer, *tokens))
        rows = zip(*texts, made.reward.tolist(), made.kl.sum(dim=1).tolist(), strict=True)
        samples += [EvaluatedSample(*row) for row in rows]
        if len(samples) >= num_samples:
            break
    return Evaluation(samples=tuple(samples[:num_samples]))

"""Fresh samples of a model, scored: what a person looks at before and after training."""

import dataclasses
import math
from itertools import islice

import torch

from coati import run
from coati.algos import kl_estimate
from coati.config import RunSettings
from coati.cpu import set_up_cpu
from coati.demo.grammar import is_grammatical
from coati.experience_maker.base import PromptBatch
from coati.models import Actor, action_logprobs
from coati.rewards.texts import decode_completions, decode_prompts
from coati.rollout import GenerateOptions, RolloutRequest, make_engine

NUM_COMPARED = 64

# Far from the ids of any training run, so that the draws are fresh.
_FIRST_SAMPLE_ID = 1 << 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatedSample:
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
        """Mean reward of the samples that have one; nan if none has."""
        scores = [sample.reward for sample in self.samples if math.isfinite(sample.reward)]
        return sum(scores) / len(scores) if scores else math.nan

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


@torch.no_grad()
def evaluate(config: RunSettings, model_path: str, *, num_samples: int = 64) -> Evaluation:
    """Sample the model at `model_path` with the run's prompts and generate options, and score the samples."""
    set_up_cpu()
    actor = Actor.from_pretrained(model_path).eval()
    reference = Actor.from_pretrained(config.reference_path).eval()
    scorer = run.make_scorer(config)
    options = GenerateOptions.parse(**config.rollout.generate_options).with_tokenizer(scorer.tokenizer)
    engine = make_engine(config.rollout.engine, actor)
    per_batch = config.rollout.prompts_per_batch * config.rollout.samples_per_prompt
    samples: list[EvaluatedSample] = []
    for raw in islice(run.make_prompts(config), -(-num_samples // per_batch)):
        batch = PromptBatch.parse(raw)
        sample_ids = torch.arange(len(batch)) + _FIRST_SAMPLE_ID + len(samples)
        rollout = engine.generate(
            RolloutRequest(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                sample_ids=sample_ids,
                seed=config.run.seed,
                options=options,
                max_new_tokens=config.rollout.max_new_tokens,
            )
        )
        mask = rollout.action_mask
        forward = (rollout.sequences, rollout.attention_mask, mask.shape[1])
        temperatures = torch.full((len(batch),), options.sampling_temperature)
        logprobs, _ = action_logprobs(actor, *forward, temperatures=temperatures)
        reference_logprobs, _ = action_logprobs(reference, *forward, temperatures=temperatures)
        kl = kl_estimate(logprobs, reference_logprobs, mask, kind="k1").sum(dim=1)
        rewards = scorer(rollout.sequences, rollout.attention_mask, mask, batch.columns)
        tokens = (rollout.sequences, rollout.attention_mask, mask)
        prompts = decode_prompts(scorer.tokenizer, *tokens)
        responses = decode_completions(scorer.tokenizer, *tokens)
        for row in zip(prompts, responses, rewards.tolist(), kl.tolist(), strict=True):
            samples.append(EvaluatedSample(prompt=row[0], response=row[1], reward=row[2], kl=row[3]))
    return Evaluation(samples=tuple(samples[:num_samples]))

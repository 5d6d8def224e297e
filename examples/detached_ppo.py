"""Create the actors by hand: one maker and one trainer with a tiny, randomly initialized Llama, on the CPU.

The reward is the fraction of even token ids in a sequence; the policy learns to generate more of them. Run it with
`python examples/detached_ppo.py`. The trained model is saved to runs/detached_ppo.
"""

import ray
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from coati.actors.options import TrainerOptions
from coati.config import TrainSettings
from coati.models import Actor, Critic
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder
from coati.trainer.strategies import DDPStrategy

STEPS, BATCH, OUTPUT = 30, 32, "runs/detached_ppo"
CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


class EvenTokens(nn.Module):
    """A reward model: any module that maps (sequences, attention_mask) to one score per row."""

    def forward(self, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the fraction of even ids, ignoring padding."""
        is_even = (sequences % 2 == 0) & attention_mask.bool()
        return is_even.sum(dim=1) / attention_mask.sum(dim=1)


def trainer_models() -> tuple[Actor, Critic]:
    """Return the trained models, seeded so that the maker's initial model equals the first actor."""
    torch.manual_seed(0)
    return Actor.from_config(CONFIG), Critic.from_config(CONFIG)


def maker_models() -> tuple[Actor, Critic, EvenTokens, Actor]:
    """Return actor, critic, reward model and initial model."""
    return *trainer_models(), EvenTokens(), trainer_models()[0]


def prompts() -> list[dict[str, Tensor]]:
    """Return one pass over the data: batches of left-padded token ids."""
    torch.manual_seed(1)
    ids = [torch.randint(3, 32, (BATCH, 4)) for _ in range(STEPS)]
    return [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in ids]


def strategy() -> DDPStrategy:
    """Return the strategy that places models on devices; with one process it is plain torch."""
    return DDPStrategy(seed=0, device="cpu")


def main() -> None:
    """Create both actors, send the maker its first weights, run both loops, and save."""
    ray.init(address="local", namespace="example", num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer = DetachedPPOTrainer.options(name="trainer", num_cpus=1).remote(
        ["maker"], strategy, trainer_models, train_batch_size=BATCH, buffer_limit=1,
        options=TrainerOptions(train=TrainSettings(actor_lr=3e-3, critic_lr=3e-3)),
    )  # fmt: skip
    maker = ExperienceMakerHolder.options(name="maker", num_cpus=1).remote(
        ["trainer"], strategy, maker_models, sync_models_from_trainers=True, kl_coef=0.02, max_new_tokens=12,
    )  # fmt: skip
    ray.get(trainer.sync_models_to_remote_makers.remote(), timeout=300)
    loops = [maker.workingloop.remote(prompts), trainer.fit.remote(total_steps=STEPS, update_steps=1)]
    ray.get(loops, timeout=600)
    ray.get(trainer.strategy_save_actor.remote(OUTPUT), timeout=60)
    records = ray.get(trainer.report.remote(), timeout=60).records.records
    metrics = [record.get("metrics", {}) for record in records]
    rewards = [row["reward/mean"] for row in metrics if "reward/mean" in row]  # other rows are of publishing weights
    ray.shutdown()
    print(f"Mean reward of the first batch {rewards[0]:.2f}, of the last {rewards[-1]:.2f}. Model: {OUTPUT}")


if __name__ == "__main__":
    main()

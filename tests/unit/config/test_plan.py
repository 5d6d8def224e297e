"""The plan: its arithmetic, worked by hand, and its wording."""

import json

import pytest

from coati.config import load_config, plan_lines

REQUIRED = ["model.path=m", "prompts.path=p.jsonl", "reward.function=rewards:praise"]


def plan_of(*overrides):
    return load_config(None, [*REQUIRED, *overrides])


def words(config):
    return "\n".join(plan_lines(config)).replace("\N{MULTIPLICATION SIGN}", "x")


def test_the_defaults_by_hand():
    # 16 prompts × 1 sample; 1 trainer × 16 samples; 100 steps of 1 fresh batch each
    plan = plan_of()
    text = words(plan)
    assert "16 prompts x 1 sample = 16 samples per rollout batch" in text
    assert "1 trainer x 16 samples = 16 samples, in passes of at most 16,384 tokens (on one GPU up to" in text
    assert "Total: 100 optimizer steps, 1,600 samples, 100 weight versions." in text


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        (["train.actor_lr=1e-6"], True),
        (["train.actor_lr=1e-3"], False),
        (["train.mixed_precision=true"], False),
        (["lora.rank=8"], False),
        (["model.dtype=float32"], False),
    ],
)
def test_plan_warns_of_updates_lost_to_bfloat16_rounding(overrides, warns):
    text = words(plan_of("model.dtype=bfloat16", *overrides))
    assert ("Rounding: a bfloat16 weight" in text) == warns


def test_a_remainder_by_hand():
    # 10 fresh batches in episodes of 4: 4 + 4 + 2, each for 3 epochs: 12 + 12 + 6 = 30 optimizer steps.
    # Each step uses 2 trainers × 8 = 16 samples, so 160 samples.
    plan = plan_of(
        "train.total_steps=10",
        "train.update_steps=4",
        "train.epochs=3",
        "train.batch_size=8",
        "train.micro_batch_size=2",
        "topology.trainers=2",
        "topology.makers=3",
        "rollout.prompts_per_batch=6",
        "rollout.samples_per_prompt=8",
    )
    text = words(plan)
    assert "Total: 30 optimizer steps, 160 samples, 3 weight versions." in text
    assert "4 fresh batches x 3 epochs = 12 optimizer steps on 64 fresh samples" in text


@pytest.mark.parametrize(
    ("size", "tokens", "expected"),
    [
        (0, 0, "in one pass per trainer."),
        (2, 0, "in passes of at most 2 samples."),
        (0, 512, "in passes of at most 512 tokens."),
        (2, 512, "in passes of at most 2 samples and 512 tokens."),
        (2, "auto", "in passes of at most 2 samples and 16,384 tokens (on one GPU"),
    ],
)
def test_plan_shows_both_limits_of_a_pass(size, tokens, expected):
    assert expected in words(plan_of(f"train.micro_batch_size={size}", f"train.micro_batch_tokens={tokens}"))


def test_plan_shows_rewards_and_output_files():
    plan = plan_of(
        "reward.function=''",
        'reward.terms=[{ function = "a:kind", weight = 0.5 }, { model = "models/rm" }]',
        "run.output=out",
        "logging.tensorboard=false",
        "lora.rank=8",
    )
    text = words(plan)
    assert "Reward: 0.5 x kind + 1 x rm." in text
    assert "out/ (config.toml, metrics.jsonl, samples.jsonl, spans.jsonl; final model in model/" in text
    assert "LoRA adapters" in text


def test_plan_shows_a_reference_if_needed_or_set():
    assert "reference m," in words(plan_of())
    assert "no reference," in words(plan_of("algorithm.kl_coef=0"))
    assert "reference m," not in words(plan_of("algorithm.kl_coef=0"))
    assert "reference other," in words(plan_of("algorithm.kl_coef=0", "model.reference=other"))


def test_plan_describes_staleness():
    assert "on-policy" in words(plan_of("topology.max_staleness=0"))
    assert "may be up to 2 weight versions old" in words(plan_of("topology.max_staleness=2"))
    assert "any number" in words(plan_of("topology.max_staleness=-1"))


def test_plan_shows_checkpoints():
    assert "checkpoints" not in words(plan_of("train.save_every=0"))
    assert "every 5 versions in checkpoints/" in words(plan_of("train.save_every=5"))
    assert "none before the end" not in words(plan_of("train.save_every=5", "train.total_steps=6"))
    assert "every 5 versions in checkpoints/, so none before the end" in words(
        plan_of("train.save_every=5", "train.total_steps=5")
    )


def test_plan_shows_the_engine_that_will_run(tmp_path):
    def engine(config, *overrides):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return words(plan_of(f"model.path={tmp_path}", *overrides)).partition("by the ")[2].splitlines()[0]

    llama = {"architectures": ["LlamaForCausalLM"]}
    assert engine(llama) == "native engine."
    assert engine(llama, "rollout.engine=reference") == "reference engine."
    assert engine({"architectures": ["BloomForCausalLM"]}).startswith("reference engine, because BloomForCausalLM")

"""Maker and trainer as two Ray actors that share one GPU."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from coati.config import build_config
from coati.demo.base_model import pretrain
from coati.demo.grammar import PROMPTS
from coati.monitor import RunLog, read_jsonl


@pytest.mark.timeout(500)
def test_the_detached_pipeline_learns_on_half_a_card_each(tmp_path):
    ray = pytest.importorskip("ray", reason="needs Ray")
    pytest.importorskip("vaderSentiment", reason="the reward's lexicon")
    from coati.ray.launcher import DetachedRun

    pretrain(tmp_path / "base")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    config = build_config(
        {
            "run": {"name": "gpu", "output": str(tmp_path / "out")},
            "model": {"path": str(tmp_path / "base")},
            "prompts": {"path": str(prompts)},
            "reward": {"function": "coati.demo.reward:film_sentiment"},
            "rollout": {"prompts_per_batch": 64, "max_new_tokens": 16},
            "algorithm": {"kl_coef": 0.05},
            "train": {"total_steps": 50, "batch_size": 64, "actor_lr": 1e-3, "critic_lr": 1e-3},
            "topology": {"gpus_per_maker": 0.5, "gpus_per_trainer": 0.5},
            "logging": {"tensorboard": False},
        }
    )
    config.output_folder.mkdir()
    log = RunLog(config.output_folder, total_steps=50)
    DetachedRun(config, log).run(str(config.output_folder / "model"))
    log.flush()
    assert not ray.is_initialized()
    rows = read_jsonl(config.output_folder / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.3
    assert max(line.get("train/age_max", 0.0) for line in rows) <= 1
    AutoModelForCausalLM.from_pretrained(config.output_folder / "model")
    assert torch.cuda.is_available()

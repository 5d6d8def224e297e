"""A detached run whose maker generates with vLLM."""

import json
import statistics

import pytest

import coati
from coati.demo.base_model import pretrain
from coati.demo.grammar import PROMPTS
from coati.ledger.audit import audit_run
from coati.monitor import read_jsonl

pytest.importorskip("vllm")


def test_a_detached_run_with_vllm_learns(tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    pretrain(base, num_heads=2)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    result = coati.train(
        {
            "run": {"output": str(out)},
            "model": {"path": str(base), "device": "cpu"},
            "prompts": {"path": str(tmp_path / "prompts.jsonl")},
            "reward": {"function": "coati.demo.reward:film_sentiment"},
            "rollout": {"prompts_per_batch": 64, "max_new_tokens": 16, "engine": "vllm", "in_flight": True},
            "algorithm": {"kl_coef": 0.05},
            "train": {"total_steps": 32, "batch_size": 64, "actor_lr": 1e-3, "critic_lr": 1e-3},
            "topology": {"max_staleness": 1},
        }
    )
    assert not result.was_stopped
    assert audit_run(out).problems == []
    rows = list(read_jsonl(out / "metrics.jsonl"))
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5]) + 0.2
    assert max(row.get("rollout/logprob_gap") or 0.0 for row in rows) < 1e-3

"""Fixtures for runs and models with evaluation sets."""

import json
import sys

import pytest
import tiny

from coati.config import build_config

REWARDS = """
def likes_c(completions):
    return [text.split().count("c") / 4 for text in completions]


def has_c(completions):
    return [float("c" in text) for text in completions]


def raises_on_g(completions):
    if any("g" in text for text in completions):
        raise KeyError("g")
    return [float("c" in text) for text in completions]


def gives_g_none(completions):
    return [None if "g" in text else float("c" in text) for text in completions]


def same_for_all(completions):
    return [0.5 for _ in completions]


def always_raises(completions):
    raise KeyError("no such column")


def is_answer(completions, answer):
    return [float(one in text) for text, one in zip(completions, answer)]
"""


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """A folder with a model of eight words, prompts of two kinds, and rewards."""
    folder = tmp_path_factory.mktemp("words")
    tiny.save_words(folder)
    prompts = {"c": "a", "d": "b", "e f": "c", "h": "d", "a b c d": "e"}
    held_out = [{"prompt": prompt, "answer": answer} for prompt, answer in prompts.items()]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    (folder / "rewards_of_evaluation.py").write_text(REWARDS)
    sys.modules.pop("rewards_of_evaluation", None)  # may be left from another test folder
    return folder


@pytest.fixture
def config_of(words, tmp_path):
    """Build the settings of a run with evaluation sets, each a table; other sections are keywords."""

    def make(*sets, reward="likes_c", **sections):
        settings = {
            "run": {"seed": 1, "output": str(tmp_path / "out")},
            "model": {"path": str(words / "model"), "device": "cpu"},
            "prompts": {"path": str(words / "prompts.jsonl")},
            "reward": {"function": f"rewards_of_evaluation:{reward}", "search_paths": [str(words)]},
            "rollout": {"prompts_per_batch": 8, "max_new_tokens": 4},
            "algorithm": {"kl_coef": 0.0},
            "train": {"total_steps": 4, "batch_size": 8, "actor_lr": 0.02, "critic_lr": 0.02},
            "topology": {"threads_per_actor": 1},
            "logging": {"tensorboard": False},
        }
        for section, values in sections.items():
            settings[section] = {**settings.get(section, {}), **values}
        held_out = {"name": "held-out", "prompts": {"path": str(words / "held_out.jsonl")}}
        return build_config({**settings, "eval": [{**held_out, **one} for one in sets]})

    return make

"""The examples in docs/rewards.md run unchanged."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from coati.config import RewardSettings
from coati.rewards import FunctionReward
from coati.rewards.calling import keyword_parameters, load_reward_function
from coati.rewards.library import LIBRARY, remote, text, verifiers

PAGE = (Path(__file__).parents[3] / "docs/rewards.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    """The functions of the page as the module `my_rewards`."""
    monkeypatch.syspath_prepend(tmp_path)
    definitions, *_ = blocks("python")
    (tmp_path / "my_rewards.py").write_text(definitions)
    yield tmp_path
    sys.modules.pop("my_rewards", None)


def test_the_functions_and_the_python_example(my_rewards, capsys):
    _, trial = blocks("python")
    names = {}
    exec(compile(trial, "rewards.md", "exec"), names)
    assert capsys.readouterr().out == "[1.0, 0.0]\n"
    polite = FunctionReward(load_reward_function("my_rewards:is_polite", [my_rewards])).score(names["request"])
    assert polite == [(0.0, {"words": 2}, "")] * 2


def test_the_settings_are_valid_and_their_rewards_load(my_rewards, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    loaded = []
    for block in blocks("toml"):
        settings = RewardSettings(**tomllib.loads(block)["reward"])
        for part in settings.parts:
            if part.function in LIBRARY or part.function.endswith(("is_polite", "matches_answer")):
                load_reward_function(part.function, [my_rewards], part.options)
                loaded.append(part.function)
    assert {"math-verify", "overlong", "http", "judge", "my_rewards:is_polite"} <= set(loaded)


def test_the_table_has_every_reward_with_every_option():
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", PAGE.partition("## The library")[2], re.MULTILINE))
    assert set(rows) >= set(LIBRARY)
    servers = PAGE.partition("## Servers")[2].partition("\n## ")[0]
    for name, place in LIBRARY.items():
        module, _, factory = place.partition(":")
        options, _ = keyword_parameters(
            getattr({"text": text, "verifiers": verifiers, "remote": remote}[module], factory)
        )
        section = servers if module == "remote" else rows[name]
        assert [option for option in options if f"`{option}`" not in section and f"{option} =" not in section] == [], (
            name
        )

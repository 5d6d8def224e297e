"""Checks of what settings point at, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coati.checks import preflight
from coati.config import load_config
from coati.prompts.table import looks_local

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with everything a run needs, as the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    write_weights(tmp_path / "model/model.safetensors", ["model.norm.weight"])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the film"}\n')
    (tmp_path / "scoring.py").write_text("def praise(completions): ...\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write_weights(path, names, *, missing=0):
    """A safetensors file of a number for each name, or of some bytes less."""
    entries = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    header = json.dumps({"__metadata__": {}, **entries}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * len(names) - missing))


def problems(*overrides):
    required = ["model.path=./model", "prompts.path=prompts.jsonl", "reward.function=scoring:praise"]
    return preflight(load_config(None, [*required, *overrides]))


def test_a_sound_run_has_no_problems(folder):
    assert problems() == []


def test_a_missing_model_folder(folder):
    (problem,) = problems("model.path=./nowhere")
    assert "model.path './nowhere' is not a folder" in problem
    assert str(folder) in problem
    (problem,) = problems("model.path=runs/demo/model")
    assert "coati demo" in problem


def test_a_folder_that_is_no_model(folder):
    (folder / "empty").mkdir()
    (problem,) = problems("model.reference=./empty")
    assert "model.reference" in problem
    assert "has no config.json" in problem


def test_hub_names_are_left_to_the_hub(folder):
    assert problems("model.path=someone/some-model", "model.reference=gpt2") == []
    assert looks_local("model/typo")  # lies in a folder that exists


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("none.jsonl", None, "none.jsonl"),
        ("none.csv", None, "none.csv"),
        ("empty.jsonl", "\n\n", "no rows"),
        ("bad.jsonl", '{"prompt": "a"}\n{oops\n', "bad.jsonl:2 "),
        ("other.jsonl", '{"text": "a"}\n', "other.jsonl:1 has no column"),
        ("number.jsonl", '{"prompt": 3}\n', "got '3' (int)"),
    ],
)
def test_prompt_files_are_looked_into(folder, name, text, expected):
    if text is not None:
        (folder / name).write_text(text)
    (problem,) = problems(f"prompts.path={name}")
    assert problem.startswith("prompts.path")
    assert expected in problem


def test_only_the_first_rows_are_read(folder):
    rows = [json.dumps({"prompt": "x"})] * 50
    (folder / "long.jsonl").write_text("\n".join([*rows, "not json"]))
    assert problems("prompts.path=long.jsonl") == []


def test_a_prompt_path_that_is_nothing(folder):
    (problem,) = problems("prompts.path=./nothing")
    assert "'./nothing'" in problem
    assert looks_local("missing.jsonl")  # is no hub name
    (problem,) = problems("prompts.path=missing.jsonl")
    assert "'missing.jsonl', which does not exist" in problem
    assert problems("prompts.path=someone/dataset") == []


def test_reward_functions_are_imported(folder):
    (problem,) = problems("reward.function=scoring:prais")
    assert problem.startswith("reward.function: ")
    assert "'scoring:prais'" in problem
    (problem,) = problems("reward.function=praise")
    assert "must be one of math-verify" in problem
    (problem,) = problems("reward.function=math-verfy")
    assert "Did you mean 'math-verify'?" in problem
    assert problems("reward.function=math:sqrt") == []  # does not tell its parameters


def test_the_folder_of_the_toml_file_is_searched_first(folder):
    (folder / "deep").mkdir()
    (folder / "deep/mine.py").write_text("def praise(completions): ...\n")
    (folder / "deep/run.toml").write_text(
        '[model]\npath = "./model"\n[prompts]\npath = "prompts.jsonl"\n[reward]\nfunction = "mine:praise"\n'
    )
    assert preflight(load_config(Path("deep/run.toml"))) == []


def test_each_term_is_checked(folder):
    terms = '[{ function = "scoring:praise" }, { function = "scoring:nope" }, { model = "./gone" }]'
    found = problems("reward.function=''", f"reward.terms={terms}")
    assert [problem.split()[0] for problem in found] == ["reward.terms[2].model", "reward.terms[1].function:"]


def test_the_example_is_sound_but_for_the_demo_model():
    code = (
        "import sys; from pathlib import Path; "
        "from coati.checks import preflight; from coati.config import load_config; "
        "config = load_config(Path('examples/film/run.toml'), ['model.path=x/y']); "
        "print(preflight(config)); "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.split("\n")[:2] == ["[]", "False"], result.stderr


def test_a_reward_parameter_that_nothing_is_passed_for(folder):
    (folder / "odd_rewards.py").write_text(
        "def wants(completions, solution): ...\n"
        "def defaults(completions, solution=None): ...\n"
        "def anything(completions, **columns): ...\n"
    )
    (problem,) = problems("reward.function=odd_rewards:wants")
    assert "'solution'" in problem
    assert "prompts, completions, completion_ids, timeout_seconds and the dataset's columns" in problem
    (problem,) = problems("reward.function=odd_rewards:wants", "reward.columns.solution=answer")
    assert "needs 'answer'" in problem
    assert problems("reward.function=odd_rewards:defaults") == []
    assert problems("reward.function=odd_rewards:anything") == []
    (folder / "prompts.jsonl").write_text('{"prompt": "the film", "answer": "x"}\n')
    assert problems("reward.function=odd_rewards:wants", "reward.columns.solution=answer") == []
    (problem,) = problems("reward.function=regex")
    assert "reward.function: Reward 'regex': missing a required argument: 'pattern'" in problem


def write_parts(folder, names):
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    index = {"weight_map": dict.fromkeys(names, "part-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 16, (4).to_bytes(8, "little") + b"[1]]"])
@pytest.mark.parametrize("key", ["model.path", "model.reference", "model.critic", "reward.model"])
def test_weights_that_are_none(folder, content, key):
    (folder / "bad").mkdir()
    (folder / "bad/config.json").write_text("{}")
    (folder / "bad/model.safetensors").write_bytes(content)
    settings = [f"{key}=./bad", 'lora.target_modules=["anything"]', "lora.rank=8"]
    found = problems(*settings, *(["reward.function="] if key == "reward.model" else []))
    assert f"{key} is './bad', whose model.safetensors is " in found[0]


def test_a_torn_file_of_weights(folder):
    write_weights(folder / "model/model.safetensors", ["a", "b"], missing=3)
    (problem,) = problems()
    assert "whose model.safetensors is damaged" in problem
    assert "Use another copy" in problem


def test_parts_of_weights_that_are_torn(folder):
    write_parts(folder / "model", ["model.norm.weight"])
    assert problems() == []
    write_weights(folder / "model/part-1.safetensors", ["model.norm.weight"], missing=1)
    assert "whose part-1.safetensors is damaged" in problems()[0]


def test_a_config_that_is_none(folder):
    (folder / "model/config.json").write_text("{")
    assert "whose config.json is not a JSON object" in problems("rollout.max_new_tokens=100000")[0]

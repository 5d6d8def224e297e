"""The files that settings name are checked before a run, and problems are reported together."""

import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from coati.build import check_inputs
from coati.cli.main import main
from coati.config import build_config, load_config
from coati.demo.base_model import build_tokenizer
from coati.errors import CoatiError
from coati.prompts.table import looks_local
from coati.run_folder import MARKER

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with everything that a run needs."""
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the film"}\n')
    (tmp_path / "scoring.py").write_text("def praise(completions): ...\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def problems(*overrides):
    required = ["model.path=./model", "prompts.path=prompts.jsonl", "reward.function=scoring:praise"]
    return problems_of(load_config(None, [*required, *overrides]))


def problems_of(config):
    try:
        check_inputs(config)
    except CoatiError as error:
        return str(error).splitlines()
    return []


def test_a_valid_run_has_no_problems(folder):
    assert problems() == []


def test_a_missing_model_folder(folder):
    (problem,) = problems("model.path=./nowhere")
    assert "model.path './nowhere' is not a folder" in problem
    assert str(folder) in problem
    (problem,) = problems("model.path=runs/demo/model")
    assert "coati demo" in problem


def test_a_name_that_is_neither_a_folder_nor_on_the_hub(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (problem,) = problems("model.path=no-such-model-3")
    assert problem.startswith("model.path 'no-such-model-3' is not a folder")
    assert str(folder) in problem
    assert "hub" in problem


def test_a_folder_that_is_not_a_model(folder):
    (folder / "empty").mkdir()
    (problem,) = problems("model.reference=./empty")
    assert "model.reference" in problem
    assert "config.json" in problem


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
def test_prompt_files_are_checked(folder, name, text, expected):
    if text is not None:
        (folder / name).write_text(text)
    (problem,) = problems(f"prompts.path={name}")
    assert expected in problem


def test_a_prompt_path_that_does_not_exist(folder):
    (problem,) = problems("prompts.path=./nothing")
    assert "'./nothing'" in problem
    assert looks_local("missing.jsonl")  # not a hub name
    (problem,) = problems("prompts.path=missing.jsonl")
    assert "'missing.jsonl', which does not exist" in problem
    assert looks_local("model/typo")  # its parent folder exists


def test_reward_functions_are_imported(folder):
    (problem,) = problems("reward.function=scoring:prais")
    assert problem.startswith("reward.function: ")
    assert "'scoring:prais'" in problem
    (problem,) = problems("reward.function=praise")
    assert "must be one of math-verify" in problem
    (problem,) = problems("reward.function=math-verfy")
    assert "Did you mean 'math-verify'?" in problem
    assert problems("reward.function=math:sqrt") == []  # has no signature to check


def test_the_folder_of_the_toml_file_is_searched_first(folder):
    (folder / "deep").mkdir()
    (folder / "deep/mine.py").write_text("def praise(completions): ...\n")
    (folder / "deep/run.toml").write_text(
        '[model]\npath = "./model"\n[prompts]\npath = "prompts.jsonl"\n[reward]\nfunction = "mine:praise"\n'
    )
    assert problems_of(load_config(Path("deep/run.toml"))) == []


def test_each_term_is_checked(folder):
    for term, key in (
        ("function = 'scoring:nope'", "reward.terms[1].function:"),
        ("model = './gone'", "reward.terms[1].model"),
    ):
        terms = f"[{{ function = 'scoring:praise' }}, {{ {term} }}]"
        (problem,) = problems("reward.function=''", f"reward.terms={terms}")
        assert problem.startswith(key)


def test_mistakes_are_reported_together_and_each_once(folder):
    data = {"model": {"path": "./model", "critic": "./gone"}, "prompts": {"path": "prompts.jsonl"}}
    sets = [{"name": name, "prompts": {"path": path}} for name, path in (("a", "none.jsonl"), ("b", "prompts.jsonl"))]
    found = problems_of(build_config({**data, "reward": {"function": "scoring:nope"}, "eval": sets}))
    assert [problem.split()[0] for problem in found] == ["model.critic", "reward.function:", "eval"]
    assert "eval 'a': prompts.path is 'none.jsonl'" in found[-1]
    found = problems("model.path=./gone", "reward.function=scoring:nope")
    assert [problem.split()[0] for problem in found] == ["model.path", "reward.function:"]


def test_a_reward_that_sets_inherit_is_reported_once(folder):
    (folder / "other_rewards.py").write_text("def wants(completions, solution): ...\n")
    (folder / "other.jsonl").write_text('{"prompt": "the film", "kind": "x"}\n')
    sets = 'eval=[{name="a", prompts={path="other.jsonl"}}, {name="b", prompts={path="prompts.jsonl"}}]'
    (problem,) = problems("reward.function=other_rewards:wants", sets)
    assert problem.startswith("reward.function 'other_rewards:wants' needs 'solution'")
    found = problems("reward.function=scoring:nope", "prompts.path=none.jsonl", sets)
    assert [problem.split()[0] for problem in found] == ["prompts.path", "reward.function:"]
    (folder / "prompts.jsonl").write_text('{"prompt": "the film", "solution": "x"}\n')
    (problem,) = problems("reward.function=other_rewards:wants", sets)
    assert problem.startswith("eval 'a': reward.function"), "only its dataset has no such column"


def test_the_example_is_valid(folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert problems_of(load_config(Path("examples/film/run.toml"), [f"model.path={folder / 'model'}"])) == []


def test_vllm_that_is_not_installed(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    (problem,) = problems("rollout.engine=vllm")
    assert "rollout.engine = \"vllm\" needs vLLM, which is not installed. Run pip install '.[vllm]'" in problem
    assert problems() == []


def test_a_reward_parameter_without_a_column(folder):
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


def test_prompts_without_a_column_that_the_reward_requires(folder):
    (folder / "rows_rewards.py").write_text(
        "def wants(completions, solution): ...\ndef defaults(completions, solution=None): ...\n"
    )
    rows = ['"prompt": "a", "answer": "x"', '"prompt": "b"', '"prompt": "c", "answer": null']
    (folder / "prompts.jsonl").write_text("\n\n".join(f"{{{row}}}" for row in rows))
    mapped = "reward.columns.solution=answer"
    (problem,) = problems("reward.function=rows_rewards:wants", mapped)
    assert "needs 'answer', but 2 of 3 prompts have none, first prompts.jsonl:3." in problem
    assert "give the parameter a default" in problem
    assert problems("reward.function=rows_rewards:defaults", mapped) == []
    (problem,) = problems(
        'reward.function=""', 'reward.terms=[{ function = "rows_rewards:wants", columns = { solution = "answer" } }]'
    )
    assert problem.startswith("reward.terms[0].function")


def test_functions_of_a_program_are_checked_too(folder):
    def wants(completions, answer): ...

    def short(completions): ...

    (folder / "prompts.jsonl").write_text('{"prompt": "a", "answer": "x"}\n{"prompt": "b"}\n')
    (folder / "none.jsonl").write_text('{"prompt": "a"}\n')
    needed = ["model.path=./model", "prompts.path=prompts.jsonl", "reward.function=gone:wants"]
    with pytest.raises(CoatiError, match=r"reward\.function 'gone:wants' needs 'answer', but 1 of 2 prompts have none"):
        check_inputs(load_config(None, needed), wants)
    check_inputs(load_config(None, needed), short)
    sets = 'eval=[{ name = "a", prompts = { path = "none.jsonl" } }]'
    terms = 'reward.terms=[{ function = "gone:short" }, { function = "gone:wants" }]'
    with pytest.raises(CoatiError, match=r"^reward\.terms\[1\]\.function 'gone:wants' needs") as caught:
        check_inputs(load_config(None, [*needed, "reward.function=", terms, sets]), [short, wants])
    assert "eval" not in str(caught.value), "reported once"
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "answer": "x"}\n')
    with pytest.raises(CoatiError, match=r"^eval 'a': reward\.terms\[1\]\.function .* a reward gets"):
        check_inputs(load_config(None, [*needed, "reward.function=", terms, sets]), [short, wants])


def test_a_corrupt_model_config(folder):
    (folder / "model/config.json").write_text("{")
    assert "config.json" in problems()[0]


RUN = """
run.output = "out"
model.path = "./model"
reward.function = "scoring:praise"
rollout.max_new_tokens = 8
[prompts]
path = "prompts.jsonl"
max_tokens = 4
[[eval]]
name = "held-out"
prompts = { path = "prompts.jsonl" }
rollout = { prompts_per_batch = 2 }
max_prompts = 3
"""


@pytest.fixture
def dry_run(folder, monkeypatch, capsys):
    """Returns a function that runs `coati train --dry-run`, checks its exit code and returns its output."""
    (folder / "run.toml").write_text(RUN)
    LlamaConfig(vocab_size=len(build_tokenizer()), max_position_embeddings=12).save_pretrained(folder / "model")

    def run(*more, code=0):
        monkeypatch.setattr(sys, "argv", ["coati", "train", "run.toml", "--dry-run", *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        return capsys.readouterr().out

    return run


def test_a_dry_run_over_an_earlier_run_checks_everything_and_mentions_overwrite(folder, dry_run):
    assert "Config OK. Run again without --dry-run to train." in dry_run()
    (folder / "out" / "model").mkdir(parents=True)
    (folder / "out" / MARKER).touch()
    advice = "Run again with --overwrite, or with another run.output: out holds a run."
    assert dry_run().splitlines()[-1] == f"Config OK. {advice}"
    assert "Config OK. Run again without --dry-run to train." in dry_run("--overwrite")
    dry_run("--set", "reward.function=scoring:missing", code=2)  # the same as without an earlier run


def test_a_dry_run_counts_the_prompts_of_each_set_that_are_skipped_or_cut_short(folder, dry_run):
    lengths = (2, 5, 12, 12, 1)  # tokens
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{"film " * length}"}}\n' for length in lengths))
    training, held_out = [line for line in dry_run().splitlines() if "will be skipped" in line]
    assert training == "[prompts]: 3 prompts longer than prompts.max_tokens will be skipped."
    assert "held-out: 1 prompt without room for a response will be skipped; " in held_out  # of the first three
    assert "responses to 1 prompt have less room" in held_out  # 5 tokens, plus the first token

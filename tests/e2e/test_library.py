"""coati as a library: the snippets of docs/library.md, and `coati.train` on Ray."""

import inspect
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import coati
from coati.demo.grammar import PROMPTS
from coati.errors import ConfigError
from coati.monitor import read_jsonl

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


def test_the_snippets_of_the_page_run(tmp_path, base_model, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "base").symlink_to(base_model)
    rows = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    names = {"__name__": "__main__"}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(snippet, str(PAGE), "exec"), names)
    assert names["result"].folder == Path("runs/brief")
    assert names["result"].num_samples == 32
    assert names["result"].metrics["step"] == 2
    AutoModelForCausalLM.from_pretrained(names["result"].model)
    assert list(names["metrics"].index) == [1, 2]
    assert names["cispo"].metrics["policy/loss"] != names["result"].metrics["policy/loss"]
    assert names["bounded"].config.reward.function == "__main__:brief"
    row = names["both"].metrics
    assert row["reward/mean"] == pytest.approx(row["reward/term_brief"] + row["reward/term_unique"])


def test_the_example_with_actors_made_by_hand_learns(tmp_path):
    script = PAGE.parents[1] / "examples" / "detached_ppo.py"
    example = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert example.returncode == 0, example.stderr
    first, last = map(float, re.findall(r"batch (\S+), of the last (\S+)\. ", example.stdout)[0])
    assert last > first + 0.1
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "detached_ppo")


def test_a_file_and_a_function_on_ray(film_run, forked_workers):
    wanted = "good"

    def good(prompts, completions):  # a closure, which no module could name
        return [float(wanted in text) for text in completions]

    seen = []
    result = coati.train(film_run, reward=good, overrides={"train": {"total_steps": 2}}, on_progress=seen.append)
    assert str(result.folder) in repr(result)
    assert len(repr(result)) < 200
    assert not result.was_stopped
    assert all(0 <= reward <= 1 for _, reward in result.rewards)
    assert 0 <= result.metrics["reward/mean"] <= 1  # the newest there is
    assert result.metrics["step"] == seen[-1].step == result.config.train.optimizer_steps
    assert (result.folder / "config.toml").read_text().count("test_library:good") == 1
    with pytest.raises(ConfigError, match="earlier run"):
        coati.train(film_run, reward=good, sync=True)


def test_prompts_and_functions_of_a_program_on_ray(film_run, forked_workers):
    letters = "aeiou"

    def vowels(completions):  # closures, which no module could name
        return [float(sum(text.count(letter) for letter in letters)) for text in completions]

    def offset(completions, base):
        assert set(base) <= {1.5, 2.5}
        return base

    rows = [{"prompt": PROMPTS[0], "base": 1.5}, {"prompt": PROMPTS[1], "base": 2.5}]
    settings = coati.load_config(film_run).model_dump()
    settings["prompts"] = {}
    settings["train"] |= {"total_steps": 2, "save_every": 1}
    result = coati.train(settings, prompts=rows, reward=[vowels, offset])
    num_steps = result.metrics["step"]
    samples = [json.loads(line) for line in (result.folder / "samples.jsonl").read_text().splitlines()]
    assert {sample["prompt"] for sample in samples} <= set(PROMPTS[:2])
    assert all(sample["reward"] == sum(sample["terms"].values()) for sample in samples)
    assert {sample["terms"]["offset"] for sample in samples} <= {1.5, 2.5}
    continued = coati.train(
        resume=result.folder, reward=[vowels, offset], overrides={"train.total_steps": 4}, sync=True
    )
    assert continued.metrics["step"] == continued.config.train.optimizer_steps == 2 * num_steps


@pytest.mark.parametrize(
    ("is_terminal", "options", "is_shown"),
    [(True, {}, True), (False, {}, True), (True, {"on_progress": lambda _: None}, False)],
    ids=["terminal", "log", "hidden"],
)
def test_progress_is_shown(film_run, monkeypatch, is_terminal, options, is_shown):
    text = io.StringIO()
    monkeypatch.setattr(text, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", text)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coati.train(
        film_run,
        reward=lambda completions: [0.0] * len(completions),
        overrides=["train.total_steps=2"],
        sync=True,
        **options,
    )
    assert ("step 4/4 (100%)" in text.getvalue()) == is_shown
    assert ("\x1b[" in text.getvalue()) == (is_terminal and is_shown)  # it moves the cursor of a terminal only


@pytest.fixture
def ctrl_c():
    """Let SIGINT interrupt; shells start background jobs that ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("sync", [True, False])
def test_ctrl_c_saves_the_run_which_can_then_continue(film_run, sync, forked_workers, ctrl_c):
    def press(snapshot):
        if snapshot.step and not pressed:
            pressed.append(snapshot.step)
            signal.raise_signal(signal.SIGINT)

    pressed = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="--resume") as caught:
        coati.train(film_run, overrides=["train.total_steps=40", "train.update_steps=1"], on_progress=press, sync=sync)
    assert signal.getsignal(signal.SIGINT) is before
    folder = str(caught.value).split()[-1]
    done = read_jsonl(Path(folder) / "metrics.jsonl")[-1]["step"]
    assert done < 80
    assert (Path(folder) / "model").is_dir()
    result = coati.train(resume=folder, overrides=[f"train.total_steps={done}"], sync=sync)  # two epochs each
    assert result.metrics["step"] == 2 * done


def test_what_cannot_run_is_told_before_anything_starts(film_run):
    with pytest.raises(ConfigError, match="one maker"):
        coati.train(film_run, overrides={"topology.makers": 2}, sync=True)
    with pytest.raises(ConfigError, match="reward must be"):
        coati.train(film_run, reward="film_rewards:kind")
    with pytest.raises(ConfigError, match="reward must be a function"):
        coati.train(film_run, reward=[max, "film_rewards:kind"])
    with pytest.raises(ConfigError, match=r"train\.epochs"):
        coati.train(coati.load_config(film_run), overrides=["train.epochs=0"])


def test_names_are_listed_and_nothing_heavy_is_imported():
    code = (
        "import sys, coati; print(*dir(coati)); coati.train, coati.load_config, coati.load_metrics;"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"train", "load_metrics", "PPOTrainer", "MakerHolder", "PPOLearner"} <= set(listed)
    for name in set(listed) - {"__version__"}:
        assert inspect.getdoc(getattr(coati, name))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = coati.no_such_name

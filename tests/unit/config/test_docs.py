"""Generated pages are up to date, links resolve, and quoted errors match the code."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch
from transformers import LlamaConfig

from coati.cli.train import train
from coati.config import RunSettings, load_config
from coati.demo.base_model import build_tokenizer
from coati.errors import CoatiError, ConfigError
from coati.run_folder import open_run_folder
from coati.trainer.ppo import check_compiler

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date(maker):
    stale = [path.name for path, _ in maker.outdated()]

    assert stale == [], "run python docs/make_configuration.py"


def test_rendering_is_repeatable(maker):
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

    once = maker.render("configuration.md", text)

    assert maker.render("configuration.md", once) == once


def test_a_changed_page_is_detected(maker):
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    changed = text.replace("| `batch_size` |", "| `batch_sise` |")

    assert changed != text
    assert maker.render("configuration.md", changed) == text


def test_every_setting_is_described():
    configuration = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    kinds = [(*get_args(field.annotation), field.annotation)[0] for field in RunSettings.model_fields.values()]
    keys = [key for kind in kinds for key in kind.model_fields]

    assert [key for key in keys if f"| `{key}` |" not in configuration] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_resolve(page):
    text = page.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]

    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """Returns a function that dry-runs with overrides, in a folder with all inputs of a run, and returns the error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    for name, text in {
        "prompts.jsonl": '{"prompt": "the film"}\n',
        "texts.jsonl": '{"text": "the film"}\n',
        "rewards.py": "def praise(completions): ...\ndef asks(completions, answer): ...\n",
        "run.toml": "model.path = './model'\nprompts.path = 'prompts.jsonl'\nreward.function = 'math:sqrt'\n",
        "other/notes.txt": "",
        "runs/film/.coati-run": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tokenizer = build_tokenizer()
    for folder in (tmp_path / "model", tmp_path / "runs" / "film" / "model"):
        tokenizer.save_pretrained(folder)
        LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(folder)
    usual = {"resume": None, "address": None, "sync": False, "dry_run": True, "overwrite": False, "verbose": False}

    def run(*overrides, **options):
        with pytest.raises(CoatiError) as caught:
            train(Path("run.toml"), overrides=list(overrides), **(usual | options))
        return str(caught.value)

    return run


def test_troubleshooting_quotes_startup_errors_verbatim(dry_run, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError) as no_compiler:
        check_compiler(torch.device("cpu"))
    with open_run_folder(load_config(Path("run.toml"), ["run.output=busy"]), overwrite=False):
        in_use = dry_run("run.output=busy")
    said = [
        dry_run("train.batchsize=3"),
        dry_run("total_steps=3"),
        dry_run("model.path=./nothing"),
        dry_run("reward.function=rewards:prais"),
        dry_run("reward.function=my_rewards:f"),
        dry_run("reward.terms=[{ function = 'rewards:praise' }]"),
        dry_run("reward.function=regex"),
        dry_run("reward.function=rewards:asks"),
        dry_run(
            "reward.function=judge", "reward.options={ url = 'http://x', model = 'm', api_key_env = 'NO_SUCH_KEY' }"
        ),
        dry_run("prompts.path=texts.jsonl"),
        dry_run("algorithm=grpo", "rollout.samples_per_prompt=3"),
        dry_run("rollout.generate.max_tokens=5"),
        dry_run("run.output=runs/film", dry_run=False),
        dry_run("run.output=other", overwrite=True),
        in_use,
        dry_run("run.output=runs/film", "model.path=runs/film/model", overwrite=True),
        dry_run("topology.makers=2", sync=True),
        str(no_compiler.value),
    ]
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quotes = re.findall(r"^\*\*`(.*?)`\*\*", page.partition("## Before the run")[2].partition("\n## ")[0], re.MULTILINE)
    patterns = [r"(?m)^ *" + ".*".join(map(re.escape, quote.split("…"))) for quote in quotes]
    assert [one for one, text in zip(patterns, said, strict=True) if not re.search(one, text)] == []

"""Every settings file in examples/ loads and can be run as its page says."""

import re
from pathlib import Path

import pytest

from coati.config import load_config
from coati.rewards.calling import load_reward_function
from coati.run_folder import check_inputs_outside

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = sorted(EXAMPLES.glob("*/*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_example_loads_and_its_inputs_are_outside_its_output_folder(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    config = load_config(Path("examples") / file.parent.name / file.name)
    for path in map(Path, config.input_paths.values()):
        if not path.exists():  # the example creates it first
            path.mkdir(parents=True)
    check_inputs_outside(config)
    for settings in (config.reward, *(one.reward for one in config.eval)):
        for part in settings.parts:
            if ":" in part.function:
                assert callable(load_reward_function(part.function, [file.parent], part.options))


@pytest.mark.parametrize(
    "page", [*FILES, *sorted(EXAMPLES.glob("*/README.md"))], ids=lambda page: f"{page.parent.name}-{page.name}"
)
def test_commands_in_examples_name_existing_files(page):
    named = re.findall(r"(?:coati (?:train|eval)|python) (examples/\S+)", page.read_text(encoding="utf-8"))
    assert named, "no command to run the example"
    assert [path for path in named if not (EXAMPLES.parent / path).is_file()] == []

"""Loading reward functions by name, and the errors if that fails."""

import importlib
import sys
from pathlib import Path

import pytest

from coati.errors import ConfigError
from coati.rewards.calling import CallFailed, call_function, load_reward_function

EXAMPLE = Path(__file__).parents[3] / "examples/film"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder; modules imported from it are removed from sys.modules afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_function_from_a_file_and_from_a_package(folder):
    (folder / "judges").mkdir()
    (folder / "judges/__init__.py").write_text("")
    (folder / "judges/kind.py").write_text("def praise(completions):\n    return [1.0]\n")
    (folder / "plainly.py").write_text("def praise(completions):\n    import judges.kind\n    return [2.0]\n")
    assert load_reward_function("judges.kind:praise", [folder])(["x"]) == [1.0]
    # The neighbour is imported when the function is called, so the folder must still be on the path.
    assert load_reward_function("plainly:praise", [folder])(["x"]) == [2.0]


def test_a_folder_of_rewards_does_not_hide_other_modules(folder):
    """A module in it has the name of a package that is imported later."""
    (folder / "colorsys.py").write_text("raise AssertionError\n")
    (folder / "shadowing.py").write_text("def praise(completions):\n    return [1.0]\n")
    sys.modules.pop("colorsys", None)
    load_reward_function("shadowing:praise", [folder])
    assert "site-packages" not in importlib.import_module("colorsys").__file__
    assert sys.path[-1] == str(folder)


def test_options_are_constant_arguments(folder):
    (folder / "opted.py").write_text("def above(completions, limit, **columns):\n    return [limit, sorted(columns)]\n")
    function = load_reward_function("opted:above", [folder], {"limit": 3})
    offered = {"completions": [], "limit": [7, 7], "topic": [1, 1], "timeout_seconds": 1.0}
    with pytest.raises(CallFailed, match=r"\['topic'\]"):  # the column `limit` does not override the option
        call_function(function, offered, 2)
    assert function(completions=[])[0] == 3
    (folder / "strict.py").write_text("def f(completions, limit):\n    return []\n")
    with pytest.raises(ConfigError, match=r"'strict:f': .* 'limt'. Its options are completions, limit"):
        load_reward_function("strict:f", [folder], {"limt": 3})


@pytest.mark.parametrize("name", ["praise", "rewards:", ":praise", "rewards:a.b", "rewards/film:praise", "a:b:c"])
def test_bad_syntax(name):
    with pytest.raises(ConfigError) as caught:
        load_reward_function(name)
    assert '"module:function"' in str(caught.value)
    assert repr(name) in str(caught.value)
    assert "rewards:praise" in str(caught.value)


def test_the_error_for_a_missing_module_names_the_search_paths(folder):
    with pytest.raises(ConfigError) as caught:
        load_reward_function("no_such_module:praise", [folder])
    assert "'no_such_module'" in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "reward.search_paths" in str(caught.value)


def test_the_error_for_a_missing_function_lists_those_of_the_module(folder):
    (folder / "near.py").write_text("def praise(): ...\ndef _help(): ...\ndef blame(): ...\n")
    with pytest.raises(ConfigError, match=r"near\.py has no function 'zzz'\. It defines: praise, blame\."):
        load_reward_function("near:zzz", [folder])


@pytest.mark.parametrize("name", ["__main__:_lambda_", "__main__:no_such_function", "near:_lambda_"])
def test_the_error_for_a_function_of_a_program_says_how_to_continue(folder, name):
    main = sys.modules["__main__"]
    (folder / "near.py").write_text("")
    with pytest.raises(ConfigError, match=r"by a program.*coati\.train\(resume=.*reward\.function"):
        load_reward_function(name, [folder])
    assert sys.modules["__main__"] is main


def test_a_corrected_module_is_read_again(folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # its time stamps are too coarse for a test
    (folder / "draft.py").write_text("def blame(): ...\n")
    with pytest.raises(ConfigError, match="blame"):
        load_reward_function("draft:praise", [folder])
    (folder / "draft.py").write_text("def praise(): ...\n")
    assert callable(load_reward_function("draft:praise", [folder]))


def test_an_attribute_that_is_not_callable(folder):
    (folder / "data.py").write_text("praise = 3\n")
    with pytest.raises(
        ConfigError, match=r"'data:praise'.* no function 'praise'\. Check"
    ):  # there is no other function to list
        load_reward_function("data:praise", [folder])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a_library_nobody_has as praise\n", "ModuleNotFoundError: No module named 'a_library_nobody_has'"),
        ("import a_library_nobody_has.part\n", "Install a_library_nobody_has"),
        ("praise = 1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def (:\n", "SyntaxError: "),
    ],
)
def test_the_error_of_a_failed_import_is_shown(folder, source, expected):
    (folder / "faulty.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        load_reward_function("faulty:praise", [folder])
    assert expected in str(caught.value)
    assert "faulty.py" in str(caught.value)


def test_a_name_that_is_already_imported_from_elsewhere(folder):
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    for name in ("one", "two"):
        (folder / name / "twin.py").write_text(f"def praise(completions):\n    return ['{name}']\n")
    assert load_reward_function("twin:praise", [folder / "one"])([]) == ["one"]
    assert load_reward_function("twin:praise", [folder / "one"])([]) == ["one"]
    with pytest.raises(ConfigError, match=r"two.*already imported from .*one"):
        load_reward_function("twin:praise", [folder / "two"])


def test_the_example_rewards_by_hand(folder):
    praise = load_reward_function("rewards:praise", [EXAMPLE])
    on_topic = load_reward_function("rewards:on_topic", [EXAMPLE])
    try:
        # (good - bad) / (good + bad + 1); `not` inverts a word; an empty completion has no score
        texts = ["was good .", "was not good .", "was good but dull .", "was old .", ""]
        assert praise(completions=texts) == [1 / 2, -1 / 2, 0.0, 0.0, None]
        scores = on_topic(prompts=["the film", "i thought"], completions=["was", "it"], topic=["film", "plot"])
        assert scores == [1.0, 0.0]
    finally:
        del sys.modules["rewards"]

"""Settings from files and overrides, and the errors for invalid ones."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coati.config import RunSettings, build_config, dump_config, load_config
from coati.config.section import _FOREIGN_NAMES, _SECTIONS
from coati.errors import ConfigError

MINIMAL = '[model]\npath = "m"\n[prompts]\npath = "p.jsonl"\n[reward]\nfunction = "rewards:praise"\n'
MINIMAL_OVERRIDES = ["model.path=m", "prompts.path=p.jsonl", "reward.function=rewards:praise"]


def write(folder: Path, text: str, name: str = "film-1.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def error_of(*overrides: str, without: str = "\0") -> str:
    kept = [override for override in MINIMAL_OVERRIDES if not override.startswith(without)]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*kept, *overrides])
    return str(caught.value)


def test_defaults_that_depend_on_the_file_are_written_out(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    assert config.run.name == "film-1"
    assert config.reward.search_paths == (str(tmp_path.resolve()),)
    assert config.output_folder == Path("runs/film-1")
    assert config.reward_search_paths == [tmp_path.resolve(), Path.cwd()]
    assert config.reference_path == config.tokenizer_path == "m"


def test_the_output_follows_an_overridden_name(tmp_path):
    assert load_config(write(tmp_path, MINIMAL), ["run.name=other"]).output_folder == Path("runs/other")


def test_overrides_are_toml_values_or_bare_strings():
    config = load_config(
        None,
        [
            *MINIMAL_OVERRIDES,
            "train.total_steps=7",
            "train.actor_lr=3e-4",
            "prompts.shuffle=false",
            "lora.rank=4",
            'lora.target_modules=["q", "v"]',
            "rollout.generate.min_p=0.2",
            "algorithm.correction=none",
            "model.path=owner/name=x",
            "run.output=a folder",
        ],
    )
    assert config.train.total_steps == 7
    assert config.train.actor_lr == 3e-4
    assert config.prompts.shuffle is False
    assert config.lora.target_modules == ("q", "v")
    assert config.rollout.generate == {"min_p": 0.2}
    assert config.model.path == "owner/name=x"
    assert config.run.output == "a folder"


def test_overrides_may_be_a_nested_dict_or_have_dotted_keys(tmp_path):
    overrides = {
        "run.output": "a folder",
        "algorithm": "grpo",
        "train": {"total_steps": 7, "actor_lr": 3e-4},
        "rollout": {"samples_per_prompt": 4, "generate": {"min_p": 0.2}, "generate.stop_strings": ["."]},
        "algorithm.correction": "none",
        "lora": {"rank": 4, "target_modules": ["q", "v"]},
        "reward": {"function": "", "terms": [{"function": "a:b", "weight": 2.0}], "options": {}},
    }
    config = load_config(write(tmp_path, MINIMAL), overrides)
    assert (config.run.output, config.algorithm.name, config.train.total_steps) == ("a folder", "grpo", 7)
    assert config.rollout.generate == {"min_p": 0.2, "stop_strings": ["."]}
    assert config.lora.target_modules == ("q", "v")
    assert config.reward.terms[0].weight == 2.0
    assert config.model == load_config(write(tmp_path, MINIMAL)).model
    with pytest.raises(ConfigError, match=r"train\.epochs"):
        load_config(None, {"train": {"epochs": 0}})
    with pytest.raises(ConfigError, match=r"section\.key=value, got 'total_steps=3'"):
        load_config(None, {"total_steps": 3})


@pytest.mark.parametrize("override", ["total_steps=3", "train.total_steps", "train..x=1", "=3"])
def test_a_malformed_override_is_rejected_with_the_syntax(override):
    message = error_of(override)
    assert repr(override) in message
    assert "section.key=value" in message


def test_an_override_of_a_key_in_a_non_table():
    assert "reward.terms, which is not a table" in error_of("reward.terms=[]", "reward.terms.weight=2")


EVALUATED = MINIMAL + '[[eval]]\nname = "held-out"\nprompts = { path = "q.jsonl" }\nevery = 3\n'


@pytest.mark.parametrize("overrides", [["eval=[]"], {"eval": []}, {"eval": ()}])
def test_an_override_removes_all_evaluation_sets(tmp_path, overrides):
    assert len(load_config(write(tmp_path, EVALUATED)).eval) == 1
    assert load_config(write(tmp_path, EVALUATED), overrides).eval == ()


def test_an_override_replaces_the_evaluation_sets(tmp_path):
    text = 'eval=[{name="a", prompts={path="p.jsonl"}}]'
    sets = {"eval": [{"name": "a", "prompts": {"path": "p.jsonl"}}]}
    for overrides in ([text, "rollout.top_k=0"], {**sets, "rollout.top_k": 0}):
        (one,) = load_config(write(tmp_path, EVALUATED), overrides).eval
        assert (one.name, one.every, one.reward.function) == ("a", 0, "rewards:praise")
    assert sets == {"eval": [{"name": "a", "prompts": {"path": "p.jsonl"}}]}, "the caller's dict was changed"
    assert "eval must be a list of tables, [[eval]], got 5" in error_of("eval=5")


@pytest.mark.parametrize("overrides", [["eval.every=5"], {"eval": {"every": 5}}])
@pytest.mark.parametrize("text", [MINIMAL, EVALUATED])
def test_an_override_of_a_key_of_evaluation_sets_says_how_to_replace_them(tmp_path, overrides, text):
    with pytest.raises(ConfigError, match=r"'eval\.every=5' .* list of evaluation sets.* --set 'eval=\[\{ .*eval=\[\]"):
        load_config(write(tmp_path, text), overrides)


def test_config_is_frozen_and_strict():
    config = load_config(None, MINIMAL_OVERRIDES)
    with pytest.raises(ValidationError):
        config.train.epochs = 3
    assert "train.epochs" in error_of('train.epochs="3"')  # a string is not a number
    assert "train.epochs" in error_of("train.epochs=3.0")
    assert "train.epochs" in error_of("train.epochs=true")
    assert load_config(None, [*MINIMAL_OVERRIDES, "algorithm.kl_coef=1"]).algorithm.kl_coef == 1.0


# One invalid setting per line. The message must have the key, the rule, the value and the remedy.
BROKEN = [
    ("rollout.top_p=1.5", "at most 1", "1.5", "Use 1.0"),
    ("rollout.top_p=0", "greater than 0", "0", "Use 1.0"),
    ("rollout.temperature=-1", "at least 0", "-1", "default, 1.0"),
    ("rollout.generate=3", "a table of options", "3", "stop_strings"),
    ("rollout.generate.min_p=inf", "a supported option", "inf", "finite"),
    ("rollout.prompts_per_batch=0", "at least 1", "0", "default, 16"),
    ("topology.makers=0", "at least 1", "0", "default, 1"),
    ("topology.makers=65", "at most 64", "65", "default, 1"),
    ("topology.trainers=0", "at least 1", "0", "default, 1"),
    ("topology.trainers=65", "at most 64", "65", "default, 1"),
    ("topology.placement=scatter", "'auto' or 'spread'", '"scatter"', 'default, "auto"'),
    ("topology.max_staleness=-2", "at least -1", "-2", "default, 1"),
    ("topology.gpus_per_maker=1.5", "whole number", "1.5", "default, 0.0"),
    ("train.batch_size=0", "at least 1", "0", "default, 16"),
    ("train.actor_lr=0.0", "greater than 0", "0.0", "default, 1e-06"),
    ("train.lr_schedule=step", "'constant', 'linear' or 'cosine'", '"step"', 'default, "constant"'),
    ("train.strategy=fsdp", "'ddp', 'zero1', 'zero2' or 'gemini'", '"fsdp"', 'default, "ddp"'),
    ("train.cpu_offload=true", 'while train.strategy is "ddp"', "true", 'train.strategy to "zero2"'),
    ("train.mixed_precision=true", 'while model.dtype is "float32"', "true", 'model.dtype to "bfloat16"'),
    ("train.update_steps=101", "at most train.total_steps (100)", "101", "Lower it"),
    ("train.warmup_steps=101", "at most the optimizer steps", "101", "Lower it"),
    ("algorithm.gamma=1.1", "at most 1", "1.1", "default, 1.0"),
    ("algorithm.kl_estimator=k4", '"k1"', '"k4"', 'default, "k1"'),
    ("algorithm.kl_coef=nan", "finite", "nan", "default, 0.1"),
    ("algorithm.value_clip=inf", "finite", "inf", "default, 0.4"),
    ("model.dtype=float16", "'float32' or 'bfloat16'", '"float16"', "Did you mean"),
    ("model.path=''", "at least 1 character", '""', "runs/demo/model"),
    ("run.name=a/b", "letters, digits", '"a/b"', "Set run.name"),
    ("run.seed=-1", "at least 0", "-1", "default, 0"),
    ("lora.alpha=0", "greater than 0", "0", "default, 16.0"),
    ("lora.target_modules=[1]", "a valid string", "1", "default, []"),
    ('lora.target_modules="q"', "a list of strings", '"q"', "default, []"),
    ("reward.environment={ a = 1 }", "a list of strings", '{"a": 1}', "default, []"),
    ("algorithm.eps_clip=-0.1", "greater than 0", "-0.1", "default, 0.2"),
    ("algorithm.name=[3]", "'ppo', 'grpo'", "[3]", 'default, "ppo"'),
    ("deadlines.batch_seconds=0", "greater than 0", "0", "default, 1800.0"),
    ("logging.samples_kept=-1", "at least 0", "-1", "default, 4"),
    ("reward.function=my praise", '"module:function"', '"my praise"', "rewards:praise"),
    ("reward.timeout_seconds=0", "greater than 0", "0", "default, 120.0"),
    ('rollout.samples_per_prompt="8"', "a valid integer", '"8"', "Write 8 without quotes"),
    ('rollout.samples_per_prompt="eight"', "a valid integer", '"eight"', "default, 1"),
    ('train.actor_lr="1e-6"', "a valid number", '"1e-6"', "Write 1e-6 without quotes"),
    ('prompts.shuffle="false"', "a valid boolean", '"false"', "Write false without quotes"),
]


@pytest.mark.parametrize(("override", "rule", "value", "remedy"), BROKEN, ids=[row[0] for row in BROKEN])
def test_an_error_has_key_rule_value_and_remedy(override, rule, value, remedy):
    message = error_of(override)
    assert message.startswith("1 setting is wrong:\n  ")
    line = message.splitlines()[1]
    assert override.partition("=")[0] in line
    assert rule in line
    assert f"got {value}" in line
    assert remedy in line
    assert "pydantic" not in message
    assert "Input should" not in message


def test_greedy_decoding_at_temperature_zero_needs_do_sample_off():
    line = error_of("rollout.temperature=0")
    assert "rollout.temperature must be above 0 while do_sample is true, got 0" in line
    assert "set do_sample to false" in line
    assert load_config(None, [*MINIMAL_OVERRIDES, "rollout.temperature=0", "rollout.do_sample=false"])


@pytest.mark.parametrize("option", ["top_k", "max_new_tokens", "max_length", "num_return_sequences", "do_sample"])
def test_generate_may_not_repeat_a_setting(option):
    message = error_of(f"rollout.generate.{option}=4")
    assert f"rollout.generate.{option} must be unset, because rollout." in message
    assert "got 4" in message


def test_gpus_on_a_cpu_run():
    message = error_of("model.device=cpu", "topology.gpus_per_trainer=1")
    assert 'topology.gpus_per_trainer must be 0 while model.device is "cpu", got 1.0' in message


def test_each_worker_of_vllm_needs_a_gpu():
    settings = ["rollout.engine=vllm", "rollout.vllm={ tensor_parallel_size = 2 }"]
    for share in (0.5, 1, 4):
        message = error_of(*settings, f"topology.gpus_per_maker={share}")
        assert "topology.gpus_per_maker must be rollout.vllm.tensor_parallel_size (2)" in message
        assert f"got {float(share)}. Set it to 2." in message
    for share in (0, 2):  # without GPUs, the workers compute on the CPU
        assert load_config(None, [*MINIMAL_OVERRIDES, *settings, f"topology.gpus_per_maker={share}"])
    assert load_config(None, [*MINIMAL_OVERRIDES, settings[1], "topology.gpus_per_maker=1"])  # not by vLLM


def test_missing_required_keys_are_named_with_an_example():
    with pytest.raises(ConfigError) as caught:
        load_config(None, [])
    message = str(caught.value)
    assert message.startswith("3 settings are wrong")
    assert "model.path is required" in message
    assert "prompts.path is required" in message
    assert "exactly one of function, model and terms, got []" in message


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("train.batch_sise=3", "Did you mean train.batch_size?"),
        ("rolout.top_k=3", "Did you mean rollout?"),
        ("train.gamma=0.9", "Did you mean algorithm.gamma?"),
        ("rollout.num_generations=8", "Did you mean rollout.samples_per_prompt?"),
        ("train.algorithm=grpo", "Did you mean algorithm.name?"),
        ("run.resume=true", "coati train --resume"),
        ("logging.report_to=wandb", "logging.trackers"),
        ("train.cosine=1", "[train] has"),  # resembles train.compile
        ("lora.zzz=1", "[lora] has rank, alpha, target_modules; docs/from-trl.md"),
    ],
)
def test_an_unknown_key_suggests_a_known_one(override, suggestion):
    message = error_of(override)
    assert f"Unknown {'section' if override.startswith('rolout') else 'setting'}" in message
    assert suggestion in message


@pytest.mark.parametrize(
    ("override", "key", "close"),
    [
        ("algorithm=grop", "algorithm.name", "grpo"),
        ("algorithm=gpro", "algorithm.name", "gspo or grpo"),
        ("model.dtype=float16", "model.dtype", "bfloat16"),
        ("logging.trackers.wandbb={}", "logging.trackers.wandbb", "wandb"),
    ],
)
def test_a_misspelt_choice_suggests_the_closest_ones(override, key, close):
    message = error_of(override)
    assert f"{key} must be" in message
    assert f"Did you mean {close}?" in message


def test_errors_in_inherited_settings_are_reported_once():
    data = {"model": {"path": "m"}, "prompts": {"path": "p"}, "reward": {"function": "a b"}}
    one = {"name": "one", "prompts": {"path": "q"}}
    sets = [one, {**one, "name": "two", "rollout": {"temperature": -2}}]
    with pytest.raises(ConfigError) as caught:
        build_config({**data, "rollout": {"temperature": -1, "tok_p": 1}, "eval": sets})
    keys = [line.split(" must")[0] for line in str(caught.value).splitlines()[1:]]
    assert keys[:2] == ["  reward.function", "  rollout.temperature"]
    assert (len(keys), keys[-1]) == (4, "  eval[1].rollout.temperature"), "set in this table only"


def test_an_unknown_key_that_sets_inherit_is_reported_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, EVALUATED), ["rollout.foo=3"])
    (problem,) = str(caught.value).splitlines()[1:]
    assert problem.startswith("  Unknown setting rollout.foo. [rollout] has do_sample, ")


def test_foreign_names_map_to_existing_settings():
    names = [name for name in _FOREIGN_NAMES.values() if " " not in name]
    assert len(names) > 5
    assert [name for name in names if name.split(".")[1] not in _SECTIONS[name.split(".")[0]].model_fields] == []


@pytest.mark.parametrize("section", [{"logging": {"api_key": "sesame"}}, {"secrets": {"api_key": "sesame"}}])
def test_errors_do_not_repeat_the_value_of_an_unknown_secret(section):
    with pytest.raises(ConfigError) as caught:
        build_config({"model": {"path": "m"}, "prompts": {"path": "p"}, "reward": {"model": "r"}, **section})
    assert "sesame" not in str(caught.value)


def test_an_unknown_key_in_a_term_is_located():
    message = error_of('reward.terms=[{ functon = "a:b" }]', without="reward")
    assert "Unknown setting reward.terms[0].functon" in message
    assert "Did you mean reward.terms[0].function?" in message


def test_a_term_that_is_not_a_table():
    message = error_of("reward.terms=[3]", without="reward")
    assert "reward.terms[0] must be a table of settings, got 3. For example reward.terms = [{ function" in message


def test_a_section_that_is_not_a_table(tmp_path):
    with pytest.raises(ConfigError, match=r"train must be a table of settings, got 5\. Write its keys under \[train\]"):
        load_config(write(tmp_path, "train = 5\n" + MINIMAL))


def test_problems_are_reported_together_and_conflicts_between_sections_afterwards():
    between = "train.mixed_precision=true"  # while model.dtype is "float32"
    message = error_of("train.batch_size=true", "train.zzz=1", "lora.alpha=0.5", "rollout.top_k=-1", between)
    lines = message.splitlines()
    assert lines[0] == "3 settings are wrong:"
    keys = ["rollout.top_k", "train.batch_size", "train.zzz"]
    assert [key for line, key in zip(lines[1:], keys, strict=True) if key in line] == keys
    assert "train.mixed_precision" in error_of(between)


def test_the_algorithm_is_set_in_one_place(tmp_path):
    table = '[algorithm]\nname = "grpo"\nkl_coef = 0.0\n[rollout]\nsamples_per_prompt = 4\n'
    assert load_config(write(tmp_path, MINIMAL + table)).algorithm.name == "grpo"
    with pytest.raises(ConfigError, match=r"line 8.*twice.*\[algorithm\]"):
        load_config(write(tmp_path, 'algorithm = "grpo"\n' + MINIMAL + "[algorithm]\nkl_coef = 0.0\n"))


def test_paths_in_a_file_are_relative_to_its_folder_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("here", "runs/here", "elsewhere"):
        (tmp_path / name).mkdir()
    path = tmp_path / "runs" / "run.toml"
    path.write_text(
        '[model]\npath = "here"\nreference = "elsewhere"\ntokenizer = "owner/name"\n'
        '[prompts]\npath = "here"\n[reward]\nterms = [{ model = "here" }]\n',
        encoding="utf-8",
    )
    config = load_config(path.relative_to(tmp_path), ["prompts.path=here"])
    assert (config.model.path, config.model.reference, config.model.tokenizer) == (
        "runs/here",
        "elsewhere",
        "owner/name",
    )
    assert config.prompts.path == "here"  # overrides are relative to the working directory
    assert config.reward.terms[0].model == "runs/here"
    assert config.reward.search_paths == ("runs",)
    absolute = config.with_absolute_paths()
    assert absolute.model.path == str(tmp_path / "runs" / "here")
    assert absolute.reward.search_paths == (str(tmp_path / "runs"), str(tmp_path))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({}, r"exactly one of function, model and terms, got \[\]"),
        ({"function": "a:b", "model": "m"}, r'got \["function", "model"\].*--set reward.terms=\[\]'),
        (
            {"terms": [{"weight": 1.0}]},
            r"reward.terms\[0\] must be given as exactly one of function and model, got \[\]",
        ),
        ({"terms": [{"function": "a:b", "model": "m"}]}, r'terms\[0\].*got \["function", "model"\]'),
        ({"terms": [{"function": "a:b"}, {"function": "c:b"}]}, r'different names, got \["b", "b"\]'),
        (
            {"terms": [{"function": "a:b", "name": "A-b"}, {"function": "c:d", "name": "a_b"}]},
            r'different names, got \["A-b", "a_b"\]',
        ),
        ({"terms": [{"function": "a:b", "weight": float("inf")}]}, "weight must be a finite number, got inf"),
        ({"function": "a:b", "options": {"API_KEY": "sk-1"}}, r'options.API_KEY must be unset, .*got "\*\*\*"'),
        ({"function": "a:b", "columns": {"answer": 3}}, r"reward.columns.answer must be a valid string, got 3"),
        (
            {"terms": [{"function": "a b"}]},
            r'terms\[0\].function must be .*"module:function".* got "a b"',
        ),
    ],
)
def test_reward_is_given_in_exactly_one_way(reward, message):
    data = {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "reward": reward}
    with pytest.raises(ConfigError, match=message):
        build_config(data)


def test_bad_toml_names_file_and_line(tmp_path):
    path = write(tmp_path, "[model]\npath = unquoted\n")
    with pytest.raises(ConfigError, match=r"film-1\.toml is not valid TOML.*line 2"):
        load_config(path)
    path = write(tmp_path, '[lora]\ntarget_modules = ["q"\n[train]\nepochs = 1\n')
    with pytest.raises(ConfigError, match=r"line 3.*lists before it.*\]"):
        load_config(path)


def test_missing_file_folder_and_encoding(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist.*Check the path"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'[run]\nname = "\xe9"\n')
    with pytest.raises(ConfigError, match=r"latin\.toml must be .* UTF-8"):
        load_config(tmp_path / "latin.toml")


def test_the_error_names_the_file_and_whether_there_were_overrides(tmp_path):
    sound, unsound = write(tmp_path, MINIMAL), write(tmp_path, MINIMAL + "[train]\nepochs = 0\n", "film-2.toml")
    with pytest.raises(ConfigError, match=r"1 setting is wrong in .*film-1\.toml with --set:\n  train.ep"):
        load_config(sound, ["run.name=other", "train.epochs=0"])
    with pytest.raises(ConfigError, match=r"1 setting is wrong in .*film-1\.toml with overrides:\n  train.ep"):
        load_config(sound, {"train.epochs": 0})
    with pytest.raises(ConfigError, match=r"1 setting is wrong in .*film-2\.toml:\n  train.epochs"):
        load_config(unsound)


@pytest.mark.parametrize("option", ["repetition_penalty=1.3", "stop_string='.'", "tokenizer='a/path'", "min_p=2.0"])
def test_unsupported_generate_options_are_rejected_with_the_config(tmp_path, option):
    with pytest.raises(ConfigError, match=f"rollout.generate.{option.partition('=')[0]}"):
        load_config(write(tmp_path, MINIMAL), [f"rollout.generate.{option}"])
    assert load_config(write(tmp_path, MINIMAL), ["rollout.generate.stop_strings=['.']"])


def test_dump_then_load_is_the_identity(tmp_path):
    overrides = [
        "reward.function=''",
        'reward.terms=[{ function = "a:b", weight = -0.5 }, { model = "rm", name = "style" }]',
        'rollout.generate={ stop_strings = ["\\n", "é\\"\\\\"] }',
        "rollout.vllm={ cache_config = { deep = [1, 2.5, true] } }",
        "lora.rank=4",
        "train.actor_lr=1e-7",
        "run.output=odd \x7f \x01 \r name",
    ]
    config = load_config(write(tmp_path, MINIMAL), overrides)
    assert load_config(write(tmp_path, dump_config(config), "again.toml")) == config


# Characters that quoting may get wrong. For all of Unicode, Hypothesis spends seconds on a table.
texts = st.text("aZ0 _-.\"'\\\n\r\t#=[]{},:\x00\x1b\x7f\x85\u2028éß漢😀")
values = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(
    vllm=st.dictionaries(st.just("cache_config"), st.dictionaries(texts, values, max_size=4)),
    output=texts,
    learning_rate=st.floats(min_value=1e-300, max_value=1e300),
)
def test_dump_round_trips_any_text_and_value(tmp_path_factory, vllm, output, learning_rate):
    config = build_config(
        {
            "run": {"output": output},
            "model": {"path": "m"},
            "prompts": {"path": "p.jsonl"},
            "reward": {"model": "r"},
            "rollout": {"vllm": vllm},
            "train": {"actor_lr": learning_rate},
        }
    )
    path = tmp_path_factory.mktemp("dump") / "run.toml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config


def test_every_setting_has_a_description():
    for section, field in RunSettings.model_fields.items():
        kind = (*get_args(field.annotation), field.annotation)[0]  # of a list of tables, the type of one table
        for name, setting in kind.model_fields.items():
            assert setting.description, f"{section}.{name}"

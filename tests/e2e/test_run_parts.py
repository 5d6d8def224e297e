"""From settings to objects: every setting takes effect, and an object that cannot be loaded is named in the error."""

import contextlib
import json
import os
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coati import build
from coati.config import build_config
from coati.errors import ConfigError
from coati.experience_maker import NaiveExperienceMaker
from coati.ledger import LedgerRules
from coati.models.tiles import is_batch_invariant
from coati.trainer.strategies import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy


def config_of(**sections):
    settings = {
        "model": {"path": "some/model"},
        "prompts": {"path": "prompts.jsonl"},
        "reward": {"function": "rewards:praise"},
    }
    for section, values in sections.items():
        settings[section] = {**settings.get(section, {}), **values}
    return build_config(settings)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tokens = ["<pad>", "<eos>", "<unk>", "a", "b"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=8,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_local_paths_become_absolute_and_hub_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "reward-model", "actor", "functions"):
        (tmp_path / name).mkdir()
    (tmp_path / "prompts.jsonl").touch()
    config = config_of(
        model={"path": "model", "reference": "owner/name"},
        reward={
            "function": "",
            "terms": [
                {"model": "reward-model", "weight": 1.0},
                {"model": "owner/judge", "weight": 0.5},
                {"function": "rewards:praise", "weight": 2.0},
            ],
            "search_paths": ["functions"],
        },
    )
    absolute = config.with_absolute_paths()
    assert absolute.model.path == str(tmp_path / "model")
    assert absolute.model.reference == "owner/name"
    assert absolute.model.critic == "actor"  # the word, although a folder has that name
    assert absolute.model.tokenizer == ""
    assert absolute.prompts.path == str(tmp_path / "prompts.jsonl")
    assert [term.model for term in absolute.reward.terms] == [
        str(tmp_path / "reward-model"),
        "owner/judge",
        "",
    ]
    assert [term.label for term in absolute.reward.terms] == [term.label for term in config.reward.terms]
    assert absolute.reward.search_paths == (str(tmp_path / "functions"), str(tmp_path))
    single = config_of(reward={"function": "", "model": "reward-model"}).with_absolute_paths()
    assert single.reward.model == str(tmp_path / "reward-model")


@pytest.mark.parametrize(
    ("train", "expected", "private"),
    [
        ({}, DDPStrategy, {}),
        ({"strategy": "zero1"}, LowLevelZeroStrategy, {"_stage": 1, "_cpu_offload": False}),
        ({"strategy": "zero1", "cpu_offload": True}, LowLevelZeroStrategy, {"_stage": 1, "_cpu_offload": True}),
        ({"strategy": "zero2", "cpu_offload": True}, LowLevelZeroStrategy, {"_stage": 2, "_cpu_offload": True}),
        ({"strategy": "gemini", "cpu_offload": True}, GeminiStrategy, {"_cpu_offload": True}),
        ({"mixed_precision": True}, DDPStrategy, {"compute_dtype": torch.bfloat16}),
    ],
)
def test_trainers_get_the_chosen_strategy_and_makers_one_process(train, expected, private):
    config = config_of(
        train=train,
        model={"device": "cpu", "dtype": "bfloat16"},
        run={"seed": 5},
        deadlines={"batch_seconds": 70, "update_seconds": 50},
    )
    strategy = build.make_strategy(config, "trainer")
    try:
        assert type(strategy) is expected
        assert {name: getattr(strategy, name) for name in private} == private
        assert torch.initial_seed() == 5
        assert strategy.timeout_seconds == 70
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    maker = build.make_strategy(config, "maker")
    assert type(maker) is DDPStrategy
    assert maker.compute_dtype is None
    assert maker.timeout_seconds == 70


def test_ranks_wait_for_each_other_as_long_as_one_may_wait_for_an_update():
    config = config_of(model={"device": "cpu"}, deadlines={"batch_seconds": 30, "update_seconds": 90})
    assert build.make_strategy(config, "trainer").timeout_seconds == 90


def test_mixed_precision_trains_in_float32_and_makes_in_bfloat16(model_folder):
    config = config_of(
        model={"path": str(model_folder), "dtype": "bfloat16"},
        train={"mixed_precision": True},
        reward={"function": "builtins:len"},
    )
    trained = build.trainer_models(config)
    made = build.maker_models(config)
    assert {parameter.dtype for model in trained for parameter in model.parameters()} == {torch.float32}
    assert {parameter.dtype for model in (*made[:2], made[3]) for parameter in model.parameters()} == {torch.bfloat16}


def test_an_algorithm_without_a_critic_and_with_a_kl_term():
    config = config_of(
        algorithm={"name": "grpo", "kl_coef": 0.02}, rollout={"samples_per_prompt": 4, "max_new_tokens": 7}
    )
    algorithm = config.algorithm
    assert (algorithm.kl_loss_coef, algorithm.kl_reward_coef) == (0.02, 0.0)
    assert build.ledger_rules(config).group_size == 4
    assert build.ledger_rules(config_of(rollout={"samples_per_prompt": 4})).group_size == 1  # PPO's stand alone


def test_what_makers_lease_by():
    config = config_of(
        train={"total_steps": 10, "update_steps": 2, "batch_size": 8},
        topology={"makers": 3, "trainers": 2, "lead": 2, "max_staleness": 4},
    )
    assert build.ledger_rules(config, stream=1) == LedgerRules(
        samples_per_version=16,  # 2 batches of 8
        total_samples=80,
        lead=2,
        max_staleness=4,
        stream=1,
        num_streams=2,
    )
    assert build.ledger_rules(config_of(topology={"max_staleness": -1})).max_staleness is None


def test_deadlines_and_generate_options_arrive():
    config = config_of(
        deadlines={"start_seconds": 1.0, "batch_seconds": 2.0, "update_seconds": 3.0},
        rollout={
            "max_new_tokens": 5,
            "temperature": 0.7,
            "top_k": 9,
            "top_p": 0.8,
            "generate": {"min_p": 0.1},
        },
        algorithm={"correction": "none"},
    )
    assert config.rollout.generate_options == {
        "max_new_tokens": 5,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.1,
    }


@pytest.mark.parametrize(
    ("num_cores", "topology", "expected"),
    [
        (8, {"makers": 2, "trainers": 1}, 2),  # 8 cores among 3 actors
        (2, {"makers": 2, "trainers": 1}, 1),
        (None, {}, 1),
        (8, {"threads_per_actor": 5}, 5),
    ],
)
def test_threads_are_shared_out_unless_set(num_cores, topology, expected, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: num_cores)
    assert build.threads_per_actor(config_of(topology=topology)) == expected


def test_cores_are_divided_among_makers_and_trainers(monkeypatch):
    config = config_of(topology={"makers": 3, "trainers": 2})
    assert build.num_actors(config) == 5
    monkeypatch.setattr("os.cpu_count", lambda: 24)
    assert build.threads_per_actor(config) == 4


def test_models_are_the_same_in_every_process_that_builds_them(model_folder):
    config = config_of(model={"path": str(model_folder), "dtype": "bfloat16", "device": "cpu"})
    torch.manual_seed(123)
    first = build.trainer_models(config)
    torch.manual_seed(456)
    second = build.trainer_models(config)
    for one, other in zip(first, second, strict=True):
        assert one.state_dict().keys() == other.state_dict().keys()
        assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
        assert next(one.parameters()).dtype == torch.bfloat16


def test_a_maker_takes_updates_for_actor_and_critic_alone(model_folder):
    reward = {"function": "", "model": str(model_folder)}
    config = config_of(model={"path": str(model_folder), "device": "cpu"}, reward=reward)
    actor, critic, scorer, initial_model = build.maker_models(config)
    maker = NaiveExperienceMaker(actor, critic, scorer, initial_model)
    assert list(maker.trained_models.values()) == [actor, critic]


def test_a_maker_loads_a_reference_only_if_a_kl_is_measured(model_folder):
    def reference(**model):
        settings = {"model": {"path": str(model_folder), "device": "cpu", **model}, "algorithm": {"kl_coef": 0.0}}
        return build.maker_models(config_of(**settings, reward={"function": "builtins:len"}))[3]

    assert reference() is None
    assert reference(reference=str(model_folder)) is not None


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, set()),
        ({"compile": True}, {"critic", "reference", "reward"}),
    ],
)
def test_makers_compile_what_only_scores(model_folder, monkeypatch, train, expected):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(self))
    config = config_of(
        model={"path": str(model_folder), "device": "cpu"},
        reward={"function": "", "model": str(model_folder)},
        train=train,
    )
    actor, critic, scorer, reference = build.maker_models(config)
    reward = scorer.reward._model
    models = {"actor": actor, "critic": critic, "reference": reference, "reward": reward}
    of = {part: name for name, model in models.items() for part in model.modules()}
    assert [of[part] for part in compiled].count("actor") == 0
    assert {of[part] for part in compiled} == expected
    assert len(compiled) == 2 * len(expected)
    compiled.clear()
    build.make_scorer(config)  # as an evaluation does, which scores once
    assert compiled == []
    assert not any(is_batch_invariant(model) for model in models.values())


def test_batch_invariant_makers_mark_all_models_and_compile_none(model_folder, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: pytest.fail("compiled"))
    config = config_of(
        model={"path": str(model_folder), "device": "cpu"},
        reward={"function": "", "model": str(model_folder)},
        train={"compile": True},
        rollout={"batch_invariant": True},
    )
    actor, critic, scorer, reference = build.maker_models(config)
    for model in (actor, critic, scorer.reward._model, reference):
        assert all(is_batch_invariant(part) for part in model.modules())
    assert is_batch_invariant(build.load_actor(config, str(model_folder)))


def test_prompts_keep_to_the_sections(model_folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("a", "b")))
    config = config_of(
        model={"path": str(model_folder)},
        prompts={"path": str(path), "shuffle": False},
        rollout={"prompts_per_batch": 2, "samples_per_prompt": 3, "max_new_tokens": 4},
    )
    batch, _ = build.make_prompts(config).batch([0, 1], group_size=3)
    assert [sample.id for sample in batch] == [0, 1, 2, 3, 4, 5]
    assert [sample.group for sample in batch] == [0, 0, 0, 1, 1, 1]
    assert [sample.tokens for sample in batch] == [[3]] * 3 + [[4]] * 3


@pytest.mark.parametrize(
    ("call", "model", "key"),
    [
        (build.trainer_models, {}, r"model\.path"),
        (build.load_tokenizer, {}, r"model\.tokenizer"),
        (build.maker_models, {"reference": "missing"}, r"model\.reference"),
        (build.trainer_models, {"critic": "missing"}, r"model\.critic"),
    ],
)
def test_what_cannot_be_loaded_is_named(call, model, key, model_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    path = str(model_folder) if model else str(tmp_path / "empty")
    missing = {name: str(tmp_path / "empty") for name in model}
    with pytest.raises(ConfigError, match=f"{key} .*empty'"):
        call(config_of(model={"path": path, "device": "cpu", **missing}))


@pytest.mark.parametrize(("key", "size", "is_wrong"), [
    ("reference", 6, True), ("reference", 4, True), ("critic", 6, False), ("critic", 4, True), ("path", 4, True),
])  # fmt: skip
def test_a_run_refuses_vocabularies_that_do_not_go_together(key, size, is_wrong, model_folder, tmp_path):
    other = LlamaConfig.from_pretrained(model_folder, vocab_size=size)
    LlamaForCausalLM(other).save_pretrained(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    model = {
        "path": str(model_folder),
        "tokenizer": str(model_folder),
        "reference": str(model_folder),
        key: str(tmp_path),
    }
    if key == "path":  # then its tokenizer is too large
        model["reference"] = str(tmp_path)
    config = config_of(model=model, prompts={"path": str(tmp_path / "prompts.jsonl")}, rollout={"max_new_tokens": 4})
    with pytest.raises(ConfigError, match="share a vocabulary") if is_wrong else contextlib.nullcontext():
        build.check_inputs(config, len)


def test_prompts_of_a_model_without_a_config_name_the_model(tmp_path):
    (tmp_path / "empty").mkdir()
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\n")
    config = config_of(model={"path": str(tmp_path / "empty")}, prompts={"path": str(path)})
    with pytest.raises(ConfigError, match=r"model\.path"):
        build.make_prompts(config)


def test_a_model_with_code_of_its_own_is_refused_without_a_question(tmp_path, monkeypatch):
    """transformers asks the terminal whether to run a model's code, unless it is told not to."""
    own_code = {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd", "AutoTokenizer": ["odd.Odd", None]}}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({**own_code, "tokenizer_class": "Odd"}))
    (tmp_path / "odd.py").write_text("class Odd: ...")

    asked = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    config = config_of(model={"path": str(tmp_path)})
    for load in (build.trainer_models, build.load_tokenizer):
        with pytest.raises(ConfigError):
            load(config)
    assert asked == []


class Unsafe:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_of_weights_is_refused_and_does_not_run(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"weight": Unsafe(tmp_path / "it ran")}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.path"):
        build.trainer_models(config_of(model={"path": str(tmp_path / "model")}))
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04 cut off"])
def test_weights_in_a_bin_file_that_cannot_be_read_are_an_error_of_ours(content, model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.path"):
        build.trainer_models(config_of(model={"path": str(tmp_path / "model")}))

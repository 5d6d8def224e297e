"""Generate options are checked by name and range before anything runs."""

import doctest
import pickle
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from transformers import GenerationConfig

import coati.config.generate as options_module
from coati.config.generate import DEFAULT_MAX_NEW_TOKENS, KNOWN_OPTIONS, GenerateOptions, native_engine_problem
from coati.errors import GenerateOptionError


def test_docstring_examples_run():
    result = doctest.testmod(options_module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_options_of_the_contract_are_known():
    contract = (
        "max_length max_new_tokens do_sample temperature top_k top_p eos_token_id pad_token_id "
        "min_p stop_strings tokenizer stopping_criteria use_cache"
    )
    assert set(contract.split()) <= set(KNOWN_OPTIONS)


def test_defaults_sample_from_the_whole_distribution():
    options = GenerateOptions.parse()
    assert options == GenerateOptions()
    assert (options.do_sample, options.temperature, options.top_k, options.top_p) == (True, 1.0, 0, 1.0)


def test_an_unknown_option_raises_with_a_suggestion_and_the_known_options():
    with pytest.raises(GenerateOptionError) as caught:
        GenerateOptions.parse(max_new_token=8)
    message = str(caught.value)
    assert "unknown generate option max_new_token=8. Did you mean max_new_tokens?" in message
    assert all(name in message for name in KNOWN_OPTIONS)
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_an_option_unlike_any_other_gets_no_suggestion():
    with pytest.raises(GenerateOptionError, match=r"unknown generate option zzz=1\. Known options: "):
        GenerateOptions.parse(zzz=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("return_dict_in_generate", True),
        ("output_scores", True),
        ("generation_config", GenerationConfig()),
        ("penalty_alpha", 0.6),
        ("repetition_penalty", 1.3),
        ("no_repeat_ngram_size", 3),
        ("min_new_tokens", 4),
        ("bad_words_ids", [[5]]),
        ("typical_p", 0.9),
        ("logits_processor", [object()]),
        ("prompt_lookup_num_tokens", 3),
        ("watermarking_config", {"bias": 2.0}),
        ("top_h", 0.4),
        ("force_words_ids", [[1]]),
    ],
)
def test_options_that_would_not_sample_from_the_policy_are_rejected(name, value):
    assert name not in KNOWN_OPTIONS
    with pytest.raises(GenerateOptionError, match=rf"(?s){name}=.*Known options: .*samples of the policy"):
        GenerateOptions.parse(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("max_new_tokens", 0),
        ("max_length", 1),
        ("max_length", [9]),
        ("stop_strings", [""]),
        ("stop_strings", 3),
        ("tokenizer", "a/path"),
    ],
)
def test_an_out_of_range_value_raises_with_option_and_value(name, value):
    with pytest.raises(GenerateOptionError, match=rf"generate option {name}(\[0\])? must .*got "):
        GenerateOptions.parse(**{name: value})


def test_stop_strings_use_the_tokenizer_of_the_run_by_default():
    run, own = (SimpleNamespace(decode=None) for _ in range(2))
    options = GenerateOptions.parse(stop_strings="end")
    assert options.stop_strings == ("end",)
    assert options.with_tokenizer(run).tokenizer is run
    assert GenerateOptions.parse(stop_strings=["end"], tokenizer=own).with_tokenizer(run).tokenizer is own
    assert GenerateOptions.parse().with_tokenizer(None) == GenerateOptions.parse()
    with pytest.raises(GenerateOptionError, match="tokenizer"):
        options.with_tokenizer(None)


def test_greedy_decoding_needs_no_temperature():
    options = GenerateOptions.parse(do_sample=False, temperature=0.0)
    assert options.sampling_temperature == 1.0
    assert GenerateOptions.parse(temperature=0.5).sampling_temperature == 0.5


def test_none_means_unset_and_extra_options_are_kept():
    options = GenerateOptions.parse(temperature=None, top_k=None, use_cache=False, eos_token_id=[2, 3])
    assert options == GenerateOptions(eos_token_id=[2, 3], extra={"use_cache": False})


@pytest.mark.parametrize(
    ("given", "prompt", "limit"),
    [
        ({}, 5, DEFAULT_MAX_NEW_TOKENS),
        ({"max_new_tokens": 7}, 5, 7),
        ({"max_length": 12}, 5, 7),
        ({"max_length": 12, "max_new_tokens": 3}, 5, 3),
        ({"max_length": 6, "max_new_tokens": 3}, 5, 1),
        ({"max_length": 4}, 5, -1),
    ],
)
def test_the_tighter_limit_on_new_tokens_wins(given, prompt, limit):
    assert GenerateOptions.parse(**given).new_token_limit(prompt) == limit


def model_with(*, saved=None, config=None):
    """A stub of a model with a generation config and a config."""
    return SimpleNamespace(generation_config=SimpleNamespace(**(saved or {})), config=SimpleNamespace(**(config or {})))


def test_eos_tokens_come_from_option_then_generation_config_then_config():
    model = model_with(saved={"eos_token_id": [3, 4]}, config={"eos_token_id": 5})
    assert GenerateOptions.parse(eos_token_id=2).eos_token_ids(model) == (2,)
    assert GenerateOptions.parse(eos_token_id=[2, 6]).eos_token_ids(model) == (2, 6)
    assert GenerateOptions.parse(eos_token_id=[]).eos_token_ids(model) == ()
    assert GenerateOptions.parse().eos_token_ids(model) == (3, 4)
    assert GenerateOptions.parse().eos_token_ids(model_with(config={"eos_token_id": 5})) == (5,)
    assert GenerateOptions.parse().eos_token_ids(model_with()) == ()


def test_the_padding_token_falls_back_to_eos_then_zero():
    model = model_with(saved={"pad_token_id": 6}, config={"pad_token_id": 7, "eos_token_id": 5})
    assert GenerateOptions.parse(pad_token_id=1).pad_token(model) == 1
    assert GenerateOptions.parse().pad_token(model) == 6
    # some configs use -1 for none
    assert GenerateOptions.parse().pad_token(model_with(config={"pad_token_id": -1, "eos_token_id": 5})) == 5
    assert GenerateOptions.parse().pad_token(model_with()) == 0


def test_options_are_frozen():
    with pytest.raises(ValidationError):
        GenerateOptions.parse().temperature = 2.0


LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "rope_parameters": {"full_attention": {"rope_type": "linear"}, "sliding_attention": {"rope_type": "default"}},
}
OPT = {"architectures": ["OPTForCausalLM"], "hidden_size": 1024, "word_embed_proj_dim": 1024}


@pytest.mark.parametrize(
    ("model_config", "options", "reason"),
    [
        (LLAMA, {}, None),
        (LLAMA, {"stop_strings": ["."], "min_p": 0.1}, None),
        (LLAMA, {"use_cache": False}, "use_cache"),
        (LLAMA | {"rope_parameters": {"rope_type": "llama3"}}, {}, None),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "dynamic"),
        (LLAMA | {"pretraining_tp": 2}, {}, "pretraining_tp"),
        (GEMMA, {}, None),
        (GEMMA | {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, {}, "yarn"),
        (GEMMA | {"use_bidirectional_attention": True}, {}, "use_bidirectional_attention"),
        (OPT, {}, None),
        (OPT | {"word_embed_proj_dim": 512}, {}, "word_embed_proj_dim"),
        (OPT | {"do_layer_norm_before": False}, {}, "do_layer_norm_before"),
        ({"architectures": ["StableLmForCausalLM"]}, {}, "StableLmForCausalLM"),
        ({}, {}, "architecture"),
    ],
)
def test_model_config_and_options_decide_whether_the_native_engine_runs(model_config, options, reason):
    problem = native_engine_problem(model_config, GenerateOptions.parse(**options))
    assert (problem is None) if reason is None else reason in problem

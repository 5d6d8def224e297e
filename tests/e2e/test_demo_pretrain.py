import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, pipeline
from transformers.utils import logging as transformers_logging

from coati.demo.grammar import vocabulary
from coati.demo.pretrain import _next_word_loss, build_model_config, pretrain
from coati.demo.tokenizer import CONTEXT_LENGTH, build_tokenizer
from coati.errors import ConfigError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """A short training: 40 steps are enough to see learning, not enough to be good."""
    progress: list[tuple[int, int, float]] = []
    report = pretrain(
        tmp_path_factory.mktemp("trained"),
        steps=40,
        batch_size=16,
        on_progress=lambda step, steps, loss: progress.append((step, steps, loss)),
    )
    return report, progress


def test_loss_falls_from_a_blind_guess_to_knowing_word_order(trained):
    report, _ = trained
    # An untrained model guesses evenly among all tokens.
    assert report.first_loss == pytest.approx(math.log(len(build_tokenizer())), abs=0.2)
    assert report.final_loss < 0.5 * report.first_loss


@pytest.mark.parametrize(
    ("opening", "followers"),
    [
        ("the film", [" was", " seemed"]),
        ("the songs", [" were", " seemed"]),
        ("the film was good .", ["<eos>"]),
    ],
)
def test_probable_next_words_are_the_grammars(trained, opening: str, followers: list[str]):
    report, _ = trained
    tokenizer = build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(report.folder)
    with torch.no_grad():
        logits = model(**tokenizer(opening, return_tensors="pt", return_token_type_ids=False)).logits  # [1, S, V]
    probabilities = logits[0, -1].softmax(-1)  # [V]
    assert probabilities[tokenizer.convert_tokens_to_ids(followers)].sum() > 0.5


def test_padding_has_no_part_in_the_loss():
    tokenizer = build_tokenizer()
    model = LlamaForCausalLM(build_model_config(tokenizer))
    ids = tokenizer("the film was good .<eos>", return_tensors="pt").input_ids  # [1, S]
    padded = torch.nn.functional.pad(ids, (0, 5), value=tokenizer.pad_token_id)
    plain_loss, padded_loss = (_next_word_loss(model, x, pad_id=tokenizer.pad_token_id) for x in (ids, padded))
    torch.testing.assert_close(padded_loss, plain_loss)


def test_every_step_is_reported(trained):
    report, progress = trained
    assert [step for step, _, _ in progress] == list(range(1, 41))
    assert {steps for _, steps, _ in progress} == {40}
    assert progress[0][2] == report.first_loss
    assert report.final_loss == pytest.approx(sum(loss for _, _, loss in progress[-4:]) / 4)


def test_folder_is_an_ordinary_transformers_folder(trained):
    report, _ = trained
    assert (report.folder / "model.safetensors").is_file()
    model = AutoModelForCausalLM.from_pretrained(report.folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == report.num_parameters
    tokenizer = build_tokenizer()
    for settings in (model.config, model.generation_config):
        assert settings.pad_token_id == tokenizer.pad_token_id
        assert settings.bos_token_id == tokenizer.bos_token_id
        assert settings.eos_token_id == tokenizer.eos_token_id
    generate = pipeline("text-generation", model=str(report.folder))
    (output,) = generate("the film", max_new_tokens=6, do_sample=False)
    words = output["generated_text"].split()
    assert words[:2] == ["the", "film"]
    assert len(words) > 2
    assert set(words) <= set(vocabulary())


def test_same_seed_same_bits_other_seed_other_bits(tmp_path: Path):
    def weights(name: str, seed: int) -> bytes:
        return (pretrain(tmp_path / name, seed=seed, steps=4, batch_size=4).folder / "model.safetensors").read_bytes()

    first = weights("first", seed=0)
    # Draws between the runs must not matter.
    torch.rand(3)
    random.random()
    assert weights("second", seed=0) == first
    assert weights("third", seed=1) != first


def test_callers_state_is_left_alone(tmp_path: Path):
    torch_state, python_state, threads = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    shows_bars = transformers_logging.is_progress_bar_enabled()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            pretrain(tmp_path, steps=2, batch_size=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert transformers_logging.is_progress_bar_enabled() == shows_bars


def test_state_is_restored_when_the_callback_raises(tmp_path: Path):
    state, threads = torch.get_rng_state(), torch.get_num_threads()

    def stop(step: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            pretrain(tmp_path, steps=2, batch_size=2, on_progress=stop)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    assert not (tmp_path / "model.safetensors").exists()


def test_model_fits_the_tokenizer():
    tokenizer = build_tokenizer()
    config = build_model_config(tokenizer, hidden_size=32, num_layers=1, num_heads=2)
    assert config.vocab_size == len(tokenizer)
    assert config.max_position_embeddings == CONTEXT_LENGTH == tokenizer.model_max_length
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 1, 2)


@pytest.mark.parametrize("setting", ["steps", "batch_size"])
def test_settings_below_one_are_refused(tmp_path: Path, setting: str):
    with pytest.raises(ConfigError, match=f"{setting} must be 1 or more, got 0"):
        pretrain(tmp_path, **{setting: 0})

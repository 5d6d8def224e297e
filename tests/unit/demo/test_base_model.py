"""The demo's tokenizer and base model, and the cache that keeps it."""

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coati.demo import base_model
from coati.demo.base_model import CONTEXT_LENGTH, build_tokenizer, ensure_base_model, pretrain
from coati.demo.grammar import PROMPTS, sample_sentence, vocabulary
from coati.errors import ConfigError


def test_sentences_round_trip_with_bos_and_without_eos():
    tokenizer, rng = build_tokenizer(), random.Random(0)
    assert (
        len(tokenizer) == 4 + len(vocabulary()) + 3
    )  # special tokens; "i", "the" and "we" once more without the space
    for sentence in (sample_sentence(rng) for _ in range(100)):
        ids = tokenizer(sentence).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert len(ids) == 1 + len(sentence.split())
        assert not {tokenizer.eos_token_id, tokenizer.unk_token_id} & set(ids)
        assert tokenizer.decode(ids, skip_special_tokens=True) == sentence
        assert tokenizer.decode(ids[3:]) == sentence[len(" ".join(sentence.split()[:2])) :]  # with its space


def test_typed_text_is_understood_and_unknown_words_are_marked():
    tokenizer = build_tokenizer()
    assert tokenizer("The film  was\nGOOD. ").input_ids == tokenizer("the film was good .").input_ids
    assert tokenizer("the zebra").input_ids[-1] == tokenizer.unk_token_id


def test_prompts_are_padded_on_the_left():
    tokenizer = build_tokenizer()
    batch = tokenizer(list(PROMPTS), padding=True)
    for prompt, ids in zip(PROMPTS, batch.input_ids, strict=True):
        plain = tokenizer(prompt).input_ids
        assert ids == [tokenizer.pad_token_id] * (len(ids) - len(plain)) + plain


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short training: 40 steps are enough to see learning, not enough to be good."""
    folder, losses = tmp_path_factory.mktemp("trained"), []
    pretrain(folder, steps=40, batch_size=16, on_progress=lambda step, steps, loss: losses.append(loss))
    return folder, losses


def test_loss_falls_from_a_blind_guess_to_knowing_word_order(trained):
    _, losses = trained
    assert len(losses) == 40
    assert losses[0] == pytest.approx(math.log(len(build_tokenizer())), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("opening", "followers"),
    [("the film", [" was", " seemed"]), ("the songs", [" were", " seemed"]), ("the film was good .", ["<eos>"])],
)
def test_probable_next_words_are_the_grammars(trained, opening, followers):
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    model = AutoModelForCausalLM.from_pretrained(trained[0])
    assert model.config.max_position_embeddings == tokenizer.model_max_length == CONTEXT_LENGTH
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        logits = model(**tokenizer(opening, return_tensors="pt", return_token_type_ids=False)).logits  # [1, S, V]
    probabilities = logits[0, -1].softmax(-1)  # [V]
    assert probabilities[tokenizer.convert_tokens_to_ids(followers)].sum() > 0.5


def test_the_same_seed_gives_the_same_bits_and_leaves_the_callers_state_alone(tmp_path):
    def weights(name, seed):
        pretrain(tmp_path / name, seed=seed, steps=3, batch_size=4)
        return (tmp_path / name / "model.safetensors").read_bytes()

    torch_state, python_state, threads = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    first = weights("first", seed=0)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert torch.get_num_threads() == threads
    torch.rand(3)
    assert weights("second", seed=0) == first
    assert weights("third", seed=1) != first


@pytest.fixture
def builds(monkeypatch):
    """The folders that a model was built in; building is quick here."""
    folders, real = [], base_model.pretrain

    def quickly(folder, on_progress=None):
        folders.append(folder)
        real(folder, steps=1, batch_size=2, on_progress=on_progress)

    monkeypatch.setattr(base_model, "pretrain", quickly)
    return folders


def test_built_once_then_found_and_built_again_if_it_is_torn(tmp_path, builds):
    entry = ensure_base_model(tmp_path)
    assert ensure_base_model(tmp_path) == entry
    assert len(builds) == 1
    weights = entry / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert ensure_base_model(tmp_path) == entry
    assert weights.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


def test_an_interrupted_build_leaves_nothing(tmp_path, builds):
    def stop(step, steps, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_base_model(tmp_path, on_progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_wins(tmp_path, builds):
    inodes = []

    def other_finishes_first(step, steps, loss):
        inodes.append((ensure_base_model(tmp_path) / "model.safetensors").stat().st_ino)

    entry = ensure_base_model(tmp_path, on_progress=other_finishes_first)
    assert [(entry / "model.safetensors").stat().st_ino] == inodes
    assert list(tmp_path.iterdir()) == [entry]


def test_where_the_cache_is(tmp_path, monkeypatch, builds):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="COATI_CACHE"):
        ensure_base_model(tmp_path / "file")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COATI_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert ensure_base_model().parent == tmp_path / "home" / ".cache" / "coati"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ensure_base_model().parent == tmp_path / "xdg" / "coati"
    monkeypatch.setenv("COATI_CACHE", str(tmp_path / "chosen"))
    assert ensure_base_model().parent == tmp_path / "chosen"

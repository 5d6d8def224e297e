"""The demo's tokenizer and base model."""

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coati.demo.base_model import CONTEXT_LENGTH, build_tokenizer, pretrain
from coati.demo.grammar import PROMPTS, sample_sentence, vocabulary


def test_sentences_round_trip_with_bos_and_without_eos():
    tokenizer, rng = build_tokenizer(), random.Random(0)
    assert (
        len(tokenizer) == 4 + len(vocabulary()) + 3
    )  # special tokens; "i", "the" and "we" have a second id, without the space
    for sentence in (sample_sentence(rng) for _ in range(100)):
        ids = tokenizer(sentence).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert len(ids) == 1 + len(sentence.split())
        assert not {tokenizer.eos_token_id, tokenizer.unk_token_id} & set(ids)
        assert tokenizer.decode(ids, skip_special_tokens=True) == sentence
        assert tokenizer.decode(ids[3:]) == sentence[len(" ".join(sentence.split()[:2])) :]  # with its space


def test_text_is_normalized_and_unknown_words_are_marked():
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
    """A model after 40 steps: enough to show learning, but not a good model."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, pretrain(folder, steps=40, batch_size=16)


def test_loss_falls_from_that_of_a_uniform_guess(trained):
    _, losses = trained
    assert len(losses) == 40
    assert losses[0] == pytest.approx(math.log(len(build_tokenizer())), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("opening", "followers"),
    [("the film", [" was", " seemed"]), ("the songs", [" were", " seemed"]), ("the film was good .", ["<eos>"])],
)
def test_likely_next_words_follow_the_grammar(trained, opening, followers):
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    model = AutoModelForCausalLM.from_pretrained(trained[0])
    assert model.config.max_position_embeddings == tokenizer.model_max_length == CONTEXT_LENGTH
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        logits = model(**tokenizer(opening, return_tensors="pt", return_token_type_ids=False)).logits  # [1, S, V]
    probabilities = logits[0, -1].softmax(-1)  # [V]
    assert probabilities[tokenizer.convert_tokens_to_ids(followers)].sum() > 0.5


def test_pretraining_is_reproducible_and_leaves_global_state_unchanged(tmp_path):
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

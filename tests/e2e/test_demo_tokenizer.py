import random
from pathlib import Path

from transformers import AutoTokenizer

from coati.demo.grammar import PROMPTS, sample_sentence, vocabulary
from coati.demo.tokenizer import CONTEXT_LENGTH, build_tokenizer


def test_special_tokens_have_their_own_ids():
    tokenizer = build_tokenizer()
    specials = {
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
    }
    words = tokenizer.convert_tokens_to_ids([f" {word}" for word in vocabulary()] + ["i", "the", "we"])
    assert len(specials) == 4
    assert len(specials.union(words)) == 4 + len(vocabulary()) + 3 == len(tokenizer)
    assert tokenizer.model_max_length == CONTEXT_LENGTH


def test_a_response_decoded_alone_carries_the_space_before_it():
    tokenizer = build_tokenizer()
    rng = random.Random(0)
    for sentence in (sample_sentence(rng) for _ in range(20)):
        ids = tokenizer(sentence).input_ids
        for cut in range(2, len(ids)):
            prompt, response = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:cut], ids[cut:]))
            assert response.startswith(" ")
            assert prompt + response == sentence
            assert tokenizer(response, add_special_tokens=False).input_ids == ids[cut:]


def test_sentences_round_trip_with_bos_and_without_eos():
    tokenizer = build_tokenizer()
    rng = random.Random(0)
    for sentence in (sample_sentence(rng) for _ in range(100)):
        ids = tokenizer(sentence).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert len(ids) == 1 + len(sentence.split())
        assert not {tokenizer.eos_token_id, tokenizer.unk_token_id} & set(ids)
        assert tokenizer.decode(ids, skip_special_tokens=True) == sentence


def test_typed_text_is_understood_and_unknown_words_are_marked():
    tokenizer = build_tokenizer()
    assert tokenizer("The film  was\nGOOD. ").input_ids == tokenizer("the film was good .").input_ids
    assert tokenizer("the zebra").input_ids[-1] == tokenizer.unk_token_id


def test_prompts_are_padded_on_the_left():
    tokenizer = build_tokenizer()
    batch = tokenizer(list(PROMPTS), padding=True, return_tensors="pt")
    for prompt, ids, mask in zip(PROMPTS, batch.input_ids.tolist(), batch.attention_mask.tolist(), strict=True):
        plain = tokenizer(prompt).input_ids
        padding = len(ids) - len(plain)
        assert ids == [tokenizer.pad_token_id] * padding + plain
        assert mask == [0] * padding + [1] * len(plain)
    assert any(mask[0] == 0 for mask in batch.attention_mask.tolist())


def test_saved_tokenizer_reloads_the_same(tmp_path: Path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "i thought the plot was dull ."
    assert reloaded(text).input_ids == tokenizer(text).input_ids
    assert reloaded.decode(reloaded(text).input_ids, skip_special_tokens=True) == text
    assert reloaded.padding_side == "left"
    assert reloaded.model_max_length == CONTEXT_LENGTH
    assert reloaded.get_vocab() == tokenizer.get_vocab()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id"):
        assert getattr(reloaded, name) == getattr(tokenizer, name)

"""Decoding completions: the text that they add to the prompt, however the tokenizer treats spaces."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coati.experience import Experience
from coati.experience_maker.pipeline import sample_texts
from coati.rewards import FunctionReward, RewardScorer
from coati.rewards.base import decode_completions, decode_prompts

WORDS = ["<unk>", "<s>", "</s>", "▁the", "▁film", "▁was", "ly", "▁good"]


def metaspace_tokenizer():
    """Words include their space, and the decoder drops that of the first word, as for Llama 2 and Gemma."""
    backend = Tokenizer(models.WordLevel(vocab={word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def byte_level_tokenizer(alphabet):
    backend = Tokenizer(models.WordLevel(vocab={symbol: index for index, symbol in enumerate(alphabet)}))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


# `the film | was good </s>` and `film | ly </s>`, the second with padding on both sides
SEQUENCES = torch.tensor([[1, 3, 4, 5, 7, 2], [2, 1, 4, 6, 2, 5]])
ATTENTION_MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0]])
ACTION_MASK = torch.tensor([[True, True, True], [True, True, False]])
TOKENS = (SEQUENCES, ATTENTION_MASK, ACTION_MASK)


def test_the_first_space_of_a_completion_is_kept():
    tokenizer = metaspace_tokenizer()
    assert tokenizer.decode([5, 7]) == "was good"  # alone, the space is lost
    assert decode_prompts(tokenizer, *TOKENS) == ["the film", "film"]
    assert decode_completions(tokenizer, *TOKENS) == [" was good", "ly"]


def test_rewards_and_samples_have_the_same_texts():
    tokenizer, seen = metaspace_tokenizer(), []

    def watched(prompts, completions):
        seen.extend(zip(prompts, completions, strict=True))
        return [1.0, 2.0]

    reward = RewardScorer(FunctionReward(watched), tokenizer).begin(*TOKENS)()
    zeros = torch.zeros(ACTION_MASK.shape)
    experience = Experience(SEQUENCES, zeros, zeros, reward, zeros, zeros, ATTENTION_MASK, ACTION_MASK)
    samples = sample_texts(experience, tokenizer, 2)
    assert [(sample["prompt"], sample["response"]) for sample in samples] == seen
    assert seen == [("the film", " was good"), ("film", "ly")]


def test_a_long_prompt_and_an_empty_one():
    tokenizer = metaspace_tokenizer()
    prompt = torch.tensor([[3, 4] * 20])
    sequences = torch.cat([prompt, torch.tensor([[5]])], dim=1)
    assert decode_completions(tokenizer, sequences, torch.ones_like(sequences), torch.tensor([[True]])) == [" was"]
    alone = torch.tensor([[2, 5]])
    mask = torch.tensor([[0, 1]])
    assert decode_completions(tokenizer, alone, mask, torch.tensor([[True]])) == ["was"]


def test_a_character_that_begins_in_the_prompt():
    """Half of an é is in the prompt and half in the response, so the response is decoded alone."""
    tokenizer = byte_level_tokenizer(["a", "Ã", "©", "b"])
    sequences = torch.tensor([[0, 1, 2, 3]])
    masks = torch.ones_like(sequences), torch.tensor([[True, True]])
    assert decode_completions(tokenizer, sequences, *masks) == ["\ufffdb"]

"""Stop strings: found token by token, in every engine, with the tokenizer of the run."""

import pytest
import torch
from tiny import llama, samples_of
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from coati.config.generate import GenerateOptions
from coati.errors import GenerateOptionError
from coati.experience_maker import NaiveExperienceMaker
from coati.models import Critic
from coati.rewards import FunctionReward, RewardScorer
from coati.rollout import NativeEngine, ReferenceEngine, generate
from coati.rollout.sampling import StopStrings, stop_strings_of

CPU = torch.device("cpu")
PIECES = ["<pad>", "<eos>", *"abcdefgh", "ab", "bc", "c.", ".", " a", "da", ".b", "aa", "ba", "h.h"]


@pytest.fixture(scope="module")
def tokenizer():
    inner = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(PIECES)}, unk_token="<pad>"))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def first_stop(strings, pieces):
    """Return the number of tokens after which the text contains a stop string, by the definition."""
    for count in range(1, len(pieces) + 1):
        if any(string in "".join(pieces[:count]) for string in strings):
            return count
    return None


@pytest.mark.parametrize("strings", [["."], ["ab"], ["aab", "ba"], ["abab", "bb.", "h"], ["aaa"], ["abc."]], ids=str)
def test_the_automaton_matches_a_text_search(strings):
    stops = StopStrings(strings, PIECES, CPU)
    generator = torch.Generator().manual_seed(0)
    alphabet = [PIECES.index(piece) for piece in ("a", "b", "ab", "c.", "aa", "ba", "h.h", "bc")]
    for _ in range(300):
        tokens = [alphabet[i] for i in torch.randint(len(alphabet), (8,), generator=generator).tolist()]
        state, found = torch.zeros(1, dtype=torch.long), None
        for count, token in enumerate(tokens, start=1):
            state = stops.advance(state, torch.tensor([token]))
            if int(state) == stops.found:
                found = count
                break
        assert found == first_stop(strings, [PIECES[token] for token in tokens])


def test_tokens_without_text_do_not_change_the_state(tokenizer):
    stops = stop_strings_of(tokenizer, ("ab",), CPU)
    state = torch.zeros(1, dtype=torch.long)
    for token in (PIECES.index("a"), 0, 999, PIECES.index("b")):
        state = stops.advance(state, torch.tensor([token]))
    assert int(state) == stops.found


def test_tokens_keep_the_space_that_decoding_them_alone_drops():
    class Stripping:
        """A tokenizer that drops the space at the start of a text, like many do."""

        texts = (" a", "b")

        def __len__(self):
            return len(self.texts)

        def batch_decode(self, rows, *, skip_special_tokens):
            assert skip_special_tokens
            return ["".join(self.texts[token] for token in row).removeprefix(" ") for row in rows]

    stops = stop_strings_of(Stripping(), ("b a",), CPU)
    after_b = stops.advance(torch.tensor([0]), torch.tensor([1]))
    assert stops.advance(after_b, torch.tensor([0])).tolist() == [stops.found]
    assert after_b.tolist() != [stops.found]


def test_a_stop_string_that_tokens_cannot_spell_is_rejected(tokenizer):
    with pytest.raises(GenerateOptionError, match="stop_strings"):
        stop_strings_of(tokenizer, ("z",), CPU)


def request_for(tokenizer, **options):
    prompts = torch.tensor(
        [[2, 3, 4], [0, 4, 14], [5, 6, 12]]
    )  # the first and third end with the start of a stop string
    return samples_of(
        input_ids=prompts.repeat(8, 1),
        attention_mask=(prompts != 0).long().repeat(8, 1),
        sample_ids=torch.arange(24),
        seed=0,
        options=GenerateOptions.parse(tokenizer=tokenizer, **options),
        max_new_tokens=10,
    )


@pytest.mark.parametrize("engine", [ReferenceEngine, lambda model: NativeEngine(model, num_slots=5)])
@pytest.mark.parametrize("strings", [["."], ["c.", "da"]], ids=str)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(tokenizer, engine, strings):
    engine = engine(llama(initializer_range=0.2))
    free = generate(engine, request_for(tokenizer, eos_token_id=[1]))
    stopped = generate(engine, request_for(tokenizer, eos_token_id=[1], stop_strings=strings))
    seen = set()
    for row in range(24):
        tokens = free.sequences[row, 3:][free.action_mask[row]].tolist()
        pieces = ["" if token < 2 else PIECES[token] for token in tokens]
        count = first_stop(strings, pieces) or len(tokens)
        assert stopped.sequences[row, 3:][stopped.action_mask[row]].tolist() == tokens[:count]
        assert bool(stopped.is_cut[row]) == (bool(free.is_cut[row]) and first_stop(strings, pieces) is None)
        torch.testing.assert_close(stopped.action_log_probs[row, :count], free.action_log_probs[row, :count])
        seen.add((first_stop(strings, pieces) is not None, bool(stopped.is_cut[row])))
    assert {(True, False), (False, True)} <= seen


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_a_maker_uses_the_tokenizer_of_its_reward(tokenizer, engine):
    """This is what `[rollout.generate] stop_strings = ["."]` in a config does; the reward sees the stopped text."""
    texts = []

    def length(completions):
        texts.extend(completions)
        return [float(len(text)) for text in completions]

    model = llama(initializer_range=0.2)
    scorer = RewardScorer(FunctionReward(length), tokenizer)
    maker = NaiveExperienceMaker(model, Critic(llama(1)), scorer, llama(), engine=engine)
    experience = maker.make_experience(torch.tensor([[2, 3, 4]] * 16), stop_strings=["."], max_new_tokens=12)
    rows = [row[mask].tolist() for row, mask in zip(experience.sequences[:, 3:], experience.action_mask, strict=True)]
    assert texts == [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert any("." in text for text in texts)
    for row, text in zip(rows, texts, strict=True):
        assert "." not in tokenizer.decode(row[:-1], skip_special_tokens=True)
        assert ("." in text) or len(row) == 12 or row[-1] == 1

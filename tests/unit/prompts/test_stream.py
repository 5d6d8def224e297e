"""Batches of prompts: tokens, ids, order, look-ups, skips."""

import itertools
import logging
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from coati.config import PromptSettings, RolloutSettings
from coati.errors import DataError
from coati.prompts.stream import CUT_SHORT, SKIP_TOO_LONG, PromptStream
from coati.prompts.table import PromptTable

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<bot>", "a", "b", "c", "d", "e"]
ID = {word: index for index, word in enumerate(WORDS)}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def make_tokenizer(*, adds_eos=False, **special):
    backend = Tokenizer(models.WordLevel(vocab=ID, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>" if adds_eos else "<bos> $A",
        special_tokens=[("<bos>", ID["<bos>"]), ("<eos>", ID["<eos>"])],
    )
    names = {
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        **special,
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{name: token for name, token in names.items() if token})


TOKENIZER = make_tokenizer()


def table_of(*prompts, **columns):
    rows = [{"prompt": prompt} for prompt in prompts]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return PromptTable(rows=rows, source="test.jsonl")


def stream_of(table, tokenizer=TOKENIZER, *, seed=0, context_length=None, name="[prompts]", **options):
    options = {"shuffle": False, "prompts_per_batch": 2, "max_new_tokens": 1, **options}
    prompts, rollout = (
        {name: value for name, value in options.items() if name in kind.model_fields}
        for kind in (PromptSettings, RolloutSettings)
    )
    settings = PromptSettings(path="test.jsonl", **prompts), RolloutSettings(**rollout)
    assert len(prompts) + len(rollout) == len(options)
    return PromptStream(table, tokenizer, *settings, seed=seed, context_length=context_length, name=name)


def batches_of(stream, size=2, samples_per_prompt=1):
    """Yield batches of usable prompts in order."""
    whole = {"group_size": samples_per_prompt}
    usable = (number for number in itertools.count() if stream.batch([number], **whole)[0])
    while True:
        yield stream.batch(list(itertools.islice(usable, size)), **whole)[0]


def first_batch(*arguments, size=2, **options):
    return next(batches_of(stream_of(*arguments, **options), size))


def summary(sample):
    return sample.id, sample.group, sample.columns["prompt"]


def column(batch, name="prompt"):
    return [sample.columns[name] for sample in batch]


def tokens(batch):
    return [sample.tokens for sample in batch]


def samples_below(position, stream, samples_per_prompt=1):
    """Return (sample id, group id, prompt) of every sample whose group comes before this position."""
    samples = []
    for batch in batches_of(stream, samples_per_prompt=samples_per_prompt):
        samples += [summary(sample) for sample in batch if sample.group < position]
        if max(sample.group for sample in batch) >= position:
            return samples


def test_samples_have_the_tokens_and_columns_of_their_prompts():
    batch = first_batch(table_of("a b c", "d", topic=["x", "y"]))
    assert tokens(batch) == [[ID["<bos>"], ID["a"], ID["b"], ID["c"]], [ID["<bos>"], ID["d"]]]
    assert [summary(sample) for sample in batch] == [(0, 0, "a b c"), (1, 1, "d")]
    assert column(batch, "topic") == ["x", "y"]


def test_samples_of_a_prompt_are_adjacent():
    stream = stream_of(table_of("a", "b", "c"), samples_per_prompt=2)
    batches = list(itertools.islice(batches_of(stream, samples_per_prompt=2), 2))
    assert [column(batch) for batch in batches] == [["a", "a", "b", "b"], ["c", "c", "a", "a"]]
    assert [[sample.group for sample in batch] for batch in batches] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert [[sample.id for sample in batch] for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_every_pass_is_a_new_order_of_all_prompts():
    table = table_of("a", "b", "c", "d", "e")
    samples = samples_below(30, stream_of(table, shuffle=True, seed=1))
    passes = [tuple(prompt for _, _, prompt in samples[start : start + 5]) for start in range(0, 30, 5)]
    assert all(sorted(order) == ["a", "b", "c", "d", "e"] for order in passes)
    assert len(set(passes)) > 1
    assert samples_below(30, stream_of(table, shuffle=True, seed=2)) != samples


@given(
    size=st.integers(1, 7),
    samples_per_prompt=st.integers(1, 3),
    epochs=st.integers(1, 4),
    shuffle=st.booleans(),
    long_rows=st.sets(st.integers(0, 6)),
    in_groups=st.booleans(),
    seed=st.integers(0, 99),
)
def test_groups_do_not_depend_on_the_order_of_look_ups(
    size, samples_per_prompt, epochs, shuffle, long_rows, in_groups, seed
):
    # At least one row must be usable, or the stream raises.
    long_rows = {row for row in long_rows if row < size - 1}
    prompts = ["a b c d e a b c" if row in long_rows else WORDS[6 + row % 5] for row in range(size)]
    options = {"samples_per_prompt": samples_per_prompt, "shuffle": shuffle, "seed": 5, "max_tokens": 4}
    expected = samples_below(size * epochs, stream_of(table_of(*prompts), **options), samples_per_prompt)
    group_size = samples_per_prompt if in_groups else 1
    numbers = list(range(size * epochs * samples_per_prompt // group_size))
    random.Random(seed).shuffle(numbers)
    stream, found, skipped = stream_of(table_of(*prompts), **options), [], {}
    for start in range(0, len(numbers), 3):
        batch, unusable = stream.batch(numbers[start : start + 3], group_size=group_size)
        skipped |= unusable
        found += [summary(sample) for sample in batch]
    assert sorted(found) == expected
    assert len(skipped) * group_size + len(found) == size * epochs * samples_per_prompt
    assert stream.skipped.total() * samples_per_prompt == len(skipped) * group_size


def test_unusable_prompts_are_counted_by_reason_and_keep_their_ids(caplog):
    table = table_of("a", "a b c d", "b", " ", "a b c")
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    stream = stream_of(table, tokenizer, context_length=4, max_tokens=3)
    with caplog.at_level(logging.WARNING):
        batches = list(itertools.islice(batches_of(stream), 3))
    assert [group for batch in batches for group in [sample.group for sample in batch]] == [0, 2, 4, 5, 7, 9]
    assert stream.skipped == {"longer than prompts.max_tokens": 2, "without tokens": 2}
    skips = [record.getMessage() for record in caplog.records if "Skipping" in record.getMessage()]
    assert len(skips) == 2  # once per reason, not once per prompt
    assert "row 1" in skips[0]
    assert "[prompts]" in skips[0]


def test_a_survey_counts_skipped_prompts_and_cut_responses():
    table = table_of(*["a b c"] * 3, "a", "a")
    stream = stream_of(table, max_tokens=2, context_length=8, max_new_tokens=7)
    assert stream.survey() == {SKIP_TOO_LONG: 3, CUT_SHORT: 2}
    assert stream.survey(4) == {SKIP_TOO_LONG: 3, CUT_SHORT: 1}


def recording_tokenizer(tokenized):
    class Recording(type(TOKENIZER)):
        def __call__(self, text, **options):
            tokenized.append(text)
            return super().__call__(text, **options)

    tokenizer = make_tokenizer()
    tokenizer.__class__ = Recording
    return tokenizer


def test_a_prompt_of_megabytes_is_skipped_without_tokenizing_it():
    table, tokenized = table_of("a " * 25_000_000, "b"), []
    stream = stream_of(table, recording_tokenizer(tokenized), context_length=16, prompts_per_batch=1)
    assert column(next(batches_of(stream, 1))) == ["b"]
    assert stream.skipped == {"without room for a response": 1}
    assert tokenized == ["b"]


@pytest.mark.parametrize(("size", "expected"), [(2, 2), (3000, 6000)])
def test_a_small_table_is_tokenized_once_and_a_large_one_on_demand(size, expected):
    """The cache does not grow with the number of prompts."""
    tokenized = []
    stream = stream_of(table_of(*["a"] * size), recording_tokenizer(tokenized))
    for _ in range(2):
        stream.batch(range(size))
    assert len(tokenized) == expected


def test_a_prompt_needs_room_for_one_new_token():
    table = table_of("a b", "a b c")  # 3 and 4 tokens with <bos>
    stream = stream_of(table, context_length=4)
    assert column(next(batches_of(stream))) == ["a b", "a b"]
    assert stream.skipped == {"without room for a response": 1}
    assert column(first_batch(table, context_length=5)) == ["a b", "a b c"]


def test_responses_cut_short_by_the_context_cause_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        stream = stream_of(table_of("a", "b"), context_length=8, max_new_tokens=7, name="[[eval]] held-out")
        list(itertools.islice(batches_of(stream), 3))
    (record,) = caplog.records
    assert "cut short" in record.getMessage()
    assert "[[eval]] held-out" in record.getMessage()


def test_a_table_without_a_usable_prompt_is_an_error():
    with pytest.raises(DataError) as caught:
        first_batch(table_of("a b c", "a b c d"), max_tokens=2, context_length=64)
    for part in ("test.jsonl", "2 longer than prompts.max_tokens", "prompts.max_tokens = 2", "64"):
        assert part in str(caught.value)


def test_an_end_token_that_a_tokenizer_prepends_removes_nothing_from_the_end():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.bos_token  # as in OPT
    batch = first_batch(table_of("a b c"), tokenizer)
    assert tokens(batch)[0] == [ID["<bos>"], ID["a"], ID["b"], ID["c"]]


def test_chat_messages_go_through_the_template():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = [{"role": "user", "content": "a b"}]
    batch = first_batch(table_of(chat, "c"), tokenizer)
    assert column(batch) == ["<user> a b <eos> <bot>", "c"]
    # The template writes its own special tokens, so no <bos> is added, and the <eos> inside the chat is kept.
    assert tokens(batch) == [
        [ID["<user>"], ID["a"], ID["b"], ID["<eos>"], ID["<bot>"]],
        [ID["<bos>"], ID["c"]],
    ]


def test_chat_without_a_template_and_with_one_that_raises():
    table = table_of([{"role": "user", "content": "a"}])
    with pytest.raises(DataError, match=r"test\.jsonl, row 0: 'prompt'.*model\.tokenizer"):
        first_batch(table)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"user: .*roles must alternate"):
        first_batch(table, tokenizer)


def test_a_chat_that_ends_with_the_assistant_is_continued():
    """Its last message is not closed, and no new turn is added."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    batch = first_batch(table_of(chat), tokenizer)
    assert column(batch)[0] == "<user> a <eos> <assistant> b c"
    assert tokens(batch)[0][-2:] == [ID["b"], ID["c"]]


def test_the_error_for_text_that_the_tokenizer_rejects_names_the_row():
    class Tokenizer(type(TOKENIZER)):
        def __call__(self, text, **options):
            raise TypeError("no")

    tokenizer = make_tokenizer()
    tokenizer.__class__ = Tokenizer
    with pytest.raises(DataError, match=r"test\.jsonl, row 0.*TypeError: no"):
        first_batch(table_of("a"), tokenizer)


def test_an_end_token_added_by_the_tokenizer_is_removed():
    tokenizer = make_tokenizer(adds_eos=True)
    assert tokenizer("a").input_ids == [ID["<bos>"], ID["a"], ID["<eos>"]]
    batch = first_batch(table_of("a", "b <eos>"), tokenizer)
    assert tokens(batch) == [
        [ID["<bos>"], ID["a"]],
        [ID["<bos>"], ID["b"], ID["<eos>"]],  # part of the text
    ]


@pytest.mark.parametrize("name", ["input_ids", "sample_ids", "completions"])
def test_a_reserved_column_name_is_an_error(name):
    with pytest.raises(DataError, match=f"test.jsonl.*'{name}'"):
        stream_of(table_of("a", **{name: [1]}))


def test_the_prompt_column_may_have_another_name():
    batch = first_batch(PromptTable(rows=[{"question": "a", "answer": 1}], column="question"))
    assert column(batch) == ["a", "a"]
    assert column(batch, "answer") == [1, 1]
    assert "question" not in batch[0].columns
    both = PromptTable(rows=[{"question": "a", "prompt": "b"}], column="question")
    with pytest.raises(DataError, match="'prompt'"):
        stream_of(both)


def test_a_missing_value_of_a_column_is_none():
    table = PromptTable(rows=[{"prompt": "a", "answer": 1}, {"prompt": "b"}])
    batch = first_batch(table)
    assert column(batch, "answer") == [1, None]


def test_an_end_token_in_a_prompt_is_kept_even_if_other_words_have_no_token():
    backend = Tokenizer(models.WordLevel(vocab={"<eos>": 0, "w1": 1}))  # unknown words are dropped
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    assert tokens(first_batch(table_of("w1 <eos>"), tokenizer))[0] == [1, 0]


def test_a_curriculum_orders_every_pass_and_shuffles_equal_levels():
    prompts, levels = "abcdeabcde", [2, 1.5, 1, 2, 2, 1, 2, 1, 1.5, 2]
    table = table_of(*prompts, level=levels, n=range(10))

    def passes(**options):
        stream = stream_of(table, shuffle=True, **options)
        return [column(batch, "n") for batch in itertools.islice(batches_of(stream, 10), 3)]

    rising, falling = passes(curriculum="level", seed=1), passes(curriculum="-level", seed=1)
    for orders, expected in ((rising, sorted(levels)), (falling, sorted(levels, reverse=True))):
        assert all([levels[n] for n in order] == expected for order in orders)
        assert all(sorted(order) == list(range(10)) for order in orders)
        assert len(set(map(tuple, orders))) == 3
    assert passes(curriculum="level", seed=1) == rising
    assert passes(curriculum="level", seed=2) != rising
    assert column(first_batch(table, size=10, curriculum="level"), "n") == [2, 5, 7, 1, 8, 0, 3, 4, 6, 9]


@pytest.mark.parametrize("level", ["hard", None, True, float("nan")])
def test_a_curriculum_needs_a_number_in_every_row(level):
    with pytest.raises(DataError, match=r"row 1: column 'level'.*prompts\.curriculum"):
        stream_of(table_of("a", "b", level=[1, level]), curriculum="-level")

"""Rewards: what functions may return, how they can fail, models, sums and decoding."""

import asyncio
import contextlib
import copy
import json
import math
import pickle
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from coati.config import RewardSettings
from coati.errors import ConfigError, RewardError
from coati.rewards import (
    FunctionReward,
    ModelReward,
    Reward,
    RewardRequest,
    RewardScorer,
    WeightedSum,
    build_reward,
)


def request_of(*completions, **columns):
    size = len(completions)
    return RewardRequest(
        prompts=[f"prompt {index}" for index in range(size)],
        completions=list(completions),
        columns=columns,
        sequences=torch.arange(size * 4).reshape(size, 4),
        attention_mask=torch.ones(size, 4, dtype=torch.long),
        action_mask=torch.ones(size, 2, dtype=torch.bool),
    )


def score_with(function, request=None, **options):
    reward = FunctionReward(function, **{"timeout_seconds": 60, **options})
    return tiny.ask(reward, request or request_of("a", "b b")).values


def test_scores_come_back_as_float32():
    scores = score_with(lambda completions: [len(text) for text in completions])
    assert scores.tolist() == [1.0, 3.0]
    assert scores.dtype == torch.float32


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2.0],
        (1, 2),
        np.array([1.0, 2.0]),
        [np.float32(1), np.int64(2)],
        torch.tensor([1.0, 2.0]),
        [torch.tensor(1.0), torch.tensor([2])],
        iter([1, 2]),
        {1: "a", 2: "b"}.keys(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_collection_of_numbers_is_accepted(returned):
    assert score_with(lambda completions: returned).tolist() == [1.0, 2.0]
    assert score_with(lambda completions: [True, False]).tolist() == [1.0, 0.0]


def test_no_score_is_nan():
    # None, NaN, both infinities, and numbers too large for float32 or for any float
    bad = [None, math.nan, math.inf, -math.inf, 1e300, 10**400]
    scores = score_with(lambda completions: [*bad, 0.5], request_of(*"abcdefg"))
    assert scores.isnan().tolist() == [True] * 6 + [False]
    assert scores[-1] == 0.5


def test_a_function_gets_the_arguments_in_its_signature():
    seen = {}

    def few(completions, topic, extra="default"):
        seen.update(completions=completions, topic=topic, extra=extra)
        return [0, 0]

    def all_of_it(**kwargs):
        seen.update(kwargs=sorted(kwargs))
        return [0, 0]

    request = request_of("a", "b", topic=["x", "y"], answer=[1, 2])
    score_with(few, request)
    assert seen == {"completions": ["a", "b"], "topic": ["x", "y"], "extra": "default"}
    score_with(all_of_it, request)
    assert seen["kwargs"] == ["answer", "completion_ids", "completions", "prompts", "topic"]


def test_a_function_can_take_token_ids_and_its_time_limit():
    seen = {}

    def curious(completion_ids, timeout_seconds):
        seen.update(ids=completion_ids, seconds=timeout_seconds)
        return [0, 0]

    score_with(curious, timeout_seconds=30)
    assert seen == {"ids": [[2, 3], [6, 7]], "seconds": 30}


def test_a_parameter_takes_the_column_that_the_settings_name():
    request = request_of("a", "b", solution=[1, 2])
    assert score_with(lambda answer: answer, request, columns={"answer": "solution"}).tolist() == [1.0, 2.0]
    with pytest.raises(RewardError, match=r"'answer' from the column 'truth', but the columns are solution"):
        score_with(lambda answer: answer, request, columns={"answer": "truth"})


def test_a_function_written_for_chat_datasets_gets_messages():
    seen = {}

    def of_trl(completions, prompts, answer, **kwargs):
        seen.update(prompts=prompts)
        contents = [completion[0]["content"] for completion in completions]
        return [float(text == right) for text, right in zip(contents, answer, strict=True)]

    request = request_of("a", "b", answer=["a", "a"])
    assert score_with(of_trl, request, messages=True).tolist() == [1.0, 0.0]
    assert seen["prompts"][1] == [{"role": "user", "content": "prompt 1"}]
    settings = RewardSettings(terms=[{"function": "m:of_trl", "messages": True}, {"function": "length"}])
    assert [part.messages for part in settings.parts] == [True, False]
    terms = [{"function": "m:of_trl"}, {"function": "length"}, {"function": "m:g", "columns": {"b": "c"}}]
    settings = RewardSettings(terms=terms, messages=True, columns={"a": "d"})
    assert [part.messages for part in settings.parts] == [True, False, True]
    assert [part.columns for part in settings.parts] == [{"a": "d"}, {}, {"b": "c"}]
    made = build_reward(settings, load_model=None, given=[of_trl, max, min])
    assert [reward._messages for reward, _ in made.terms] == [True, False, True]
    assert [reward._function.args for reward, _ in made.terms] == [(of_trl,), (max,), (min,)]
    with pytest.raises(ValueError, match="function is your own"):
        RewardSettings(function="length", messages=True)


def test_details_come_with_scores():
    def judge(completions):
        return [{"score": 1, "why": ["x"] * 999, "at": math.nan}, {"score": None, "why": "no idea"}]

    found = tiny.ask(FunctionReward(judge), request_of("a", "b"))
    assert found.values.tolist() == pytest.approx([1.0, math.nan], nan_ok=True)
    first, second = (remarks["details"]["judge"] for remarks in found.remarks())
    assert (len(first["why"]), first["at"]) == (1000, "nan")
    assert second == {"why": "no idea"}
    assert found.failures == {}


def test_details_that_are_too_large_for_a_file_are_truncated():
    loop = []
    loop.append(loop)
    deep = json.loads("[" * 900 + "]" * 900)
    many = {str(index): index for index in range(100)}
    judge = lambda completions: [{"score": 1, "loop": loop, "deep": deep, "set": {1}, **many}]  # noqa: E731
    ((_, details, _),) = FunctionReward(judge).score(request_of("a"))
    assert len(json.dumps(details)) < 10_000
    assert len(details) == 8


def test_a_function_may_fail_on_some_samples():
    def picky(completions):
        return [1.0, KeyError("no such word"), {"error": "no judge", "tries": 3}]

    first, second, third = FunctionReward(picky, name="judge").score(request_of("a", "b", "c"))
    assert (first.score, first.error) == (1.0, "")
    assert second.error.startswith("Reward function 'judge' raised KeyError: 'no such word'.")
    assert "returned an error: no judge" in third.error
    with pytest.raises(RewardError, match="no such word"):
        score_with(picky, request_of("a", "b", "c"))


def test_callable_objects_and_methods_work():
    class Judge:
        def __call__(self, completions):
            return [1.0] * len(completions)

        def strict(self, *, prompts):
            return [0.0] * len(prompts)

    assert FunctionReward(Judge()).name == "Judge"
    assert score_with(Judge()).tolist() == [1.0, 1.0]
    assert score_with(Judge().strict).tolist() == [0.0, 0.0]


def message_of(function, request=None, **options):
    with pytest.raises(RewardError) as caught:
        score_with(function, request, name="judge", **options)
    message = str(caught.value)
    assert message.startswith("Reward function 'judge' ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    return message


@pytest.mark.parametrize(
    "read",
    [
        lambda completion: completion[0]["content"],
        lambda completion: completion[0].get("content"),
        lambda completion: [message["content"] for message in completion],
    ],
)
def test_the_error_of_a_function_that_expects_messages_names_the_setting(read):
    def of_trl(completions, **_):
        return [float("a" in read(completion)) for completion in completions]

    assert "messages = true" in message_of(of_trl)
    assert "messages = true" in message_of(
        lambda completions: [one[0]["content"] for one in completions], request_of("")
    )
    assert score_with(of_trl, messages=True).tolist() == [1.0, 0.0]
    assert "messages = true" not in message_of(lambda completions: [{}["content"]])


def test_a_function_that_raises():
    def broken(completions):
        raise KeyError("no such word")

    message = message_of(broken)
    assert "raised KeyError: 'no such word'" in message
    assert "test_rewards.py:" in message  # where it happened
    with pytest.raises(RewardError) as caught:
        FunctionReward(broken).score(request_of("a"))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_exits():
    assert "raised SystemExit: 3" in message_of(lambda completions: sys.exit(3))


def test_a_function_that_hangs_is_abandoned_at_the_deadline():
    release = threading.Event()
    assert score_with(lambda completions: [1, 2], timeout_seconds=1e12).tolist() == [1.0, 2.0]
    message = message_of(lambda completions: release.wait(60), timeout_seconds=0.1)
    assert "did not return within 0.1 s" in message
    assert "reward.timeout_seconds" in message
    hung = [thread for thread in threading.enumerate() if thread.name == "reward-judge"]
    assert all(thread.daemon for thread in hung)
    release.set()
    for thread in hung:
        thread.join(60)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_an_async_function_is_awaited(is_wrong):
    async def judge(completions):
        await asyncio.sleep(0)
        if is_wrong:
            raise KeyError("no such word")
        return [len(text) for text in completions]

    if is_wrong:
        assert "raised KeyError" in message_of(judge)
    else:
        assert score_with(judge).tolist() == [1.0, 3.0]


class Later:
    """An awaitable that is neither a coroutine nor a future, such as a client's call object."""

    def __init__(self, judge):
        self.judge = judge

    def __await__(self):
        return self.judge.__await__()


async def lengths(completions):
    await asyncio.sleep(0)
    return [len(text) for text in completions]


def test_an_object_that_can_be_awaited_is_awaited():
    assert score_with(lambda completions: Later(lengths(completions))).tolist() == [1.0, 3.0]


def test_a_pending_future_of_another_loop_is_an_error():
    with contextlib.closing(asyncio.new_event_loop()) as other:
        future = other.create_future()
        assert "attached to a different loop" in message_of(lambda completions: future)
        future.set_result([1, 2])
        assert score_with(lambda completions: future).tolist() == [1.0, 2.0]


def test_a_function_that_raises_timeout_error_is_not_reported_as_slow():
    def broken(completions):
        raise TimeoutError("of the server")

    assert "raised TimeoutError: of the server" in message_of(broken)


def test_a_generator_that_hangs_while_it_is_read():
    release = threading.Event()

    def lazily(completions):
        release.wait(30)
        yield 1.0

    assert "within 0.1 s" in message_of(lazily, timeout_seconds=0.1)
    release.set()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_wrong_number_of_scores(count):
    message = message_of(lambda completions: [0.5] * count)
    assert f"returned {count} score" in message


def test_an_endless_generator_is_too_many():
    def endless(completions):
        while True:
            yield 1.0

    assert "returned 3 scores" in message_of(endless)


@pytest.mark.parametrize("returned", [0.5, None, "ab", {"a": 1, "b": 2}, torch.zeros(2, 1)], ids=repr)
def test_a_result_that_is_not_a_list(returned):
    assert "list of scores" in message_of(lambda completions: returned)


@pytest.mark.parametrize("value", ["0.5", [1], 1j, torch.zeros(2)], ids=repr)
def test_a_score_that_is_not_a_number(value):
    message = message_of(lambda completions: [1.0, value])
    assert "as score 1" in message


def test_a_parameter_that_is_not_a_column():
    message = message_of(lambda completions, answer: [0, 0], request_of("a", "b", topic=["x", "y"]))
    assert "'answer'" in message
    assert "topic, prompts, completions, completion_ids" in message


def test_long_texts_are_truncated_in_errors():
    request = request_of("x" * 500)
    with pytest.raises(RewardError) as caught:
        score_with(lambda completions: [], request)
    assert len(str(caught.value)) < 400


class LastToken(nn.Module):
    """Scores a sequence by its last token. Has dropout, so that training mode would change the scores."""

    def __init__(self, shape=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.9)
        self.shape = shape

    def forward(self, sequences, attention_mask):
        scores = self.dropout(self.weight * sequences[:, -1].double() * attention_mask[:, -1])
        return scores if self.shape is None else scores.reshape(self.shape)


def test_a_model_scores_tokens_without_gradients_or_dropout():
    reward = ModelReward(LastToken().train(), "rm")
    scores = reward.score(request_of("a", "b"))
    assert scores.tolist() == [3.0, 7.0]
    assert scores.dtype == torch.float32
    assert not scores.requires_grad
    assert isinstance(reward, Reward)


def test_a_model_with_the_wrong_shape_or_a_bad_score():
    assert ModelReward(LastToken((2, 1))).score(request_of("a", "b")).shape == (2,)
    with pytest.raises(RewardError, match=r"'rm'.* each of 2 sequences, got shape \[3\]"):
        ModelReward(lambda *_: torch.zeros(3), "rm").score(request_of("a", "b"))
    model = LastToken()
    model.weight.data.fill_(math.inf)
    assert ModelReward(model).score(request_of("a")).isnan().all()


def constant(name, *values):
    return FunctionReward(lambda completions: list(values), name=name)


def test_a_weighted_sum_by_hand():
    # 1 × (1, 2, none) - 0.5 × (4, none, 8) = (-1, none, none)
    total = WeightedSum([(constant("kind", 1, 2, None), 1.0), (constant("long", 4, None, 8), -0.5)])
    scores = tiny.ask(total, request_of("a", "b", "c")).values
    assert scores[0] == -1.0
    assert scores.isnan().tolist() == [False, True, True]


def test_a_weight_of_zero_does_not_hide_a_missing_score():
    total = WeightedSum([(constant("kind", 1, 2), 1.0), (constant("odd", None, 3), 0.0)])
    assert tiny.ask(total, request_of("a", "b")).values.isnan().tolist() == [True, False]


def test_terms_need_different_names():
    with pytest.raises(ConfigError, match="different names"):
        WeightedSum([(constant("x", 1), 1.0), (constant("x", 2), 1.0)])
    with pytest.raises(ConfigError, match="got \\[\\]"):
        WeightedSum([])


WORDS = ["<eos>", "<bos>", "<unk>", "a", "b", "c"]


def make_tokenizer():
    backend = Tokenizer(models.WordLevel(vocab={word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # pad = eos, as in many models: only the masks distinguish padding from text
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )


SEQUENCES = torch.tensor([[0, 1, 3, 4, 5, 0], [1, 5, 4, 0, 3, 3]])  # P = 3, A = 3; garbage `a a` after the end
ATTENTION_MASK = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
ACTION_MASK = torch.tensor([[True, True, True], [True, False, False]])


class Recorder(Reward):
    name = "recorder"

    def score(self, request):
        self.request = request
        return torch.arange(len(request), dtype=torch.float32)


def test_the_scorer_decodes_the_tokens_that_the_masks_keep():
    recorder = Recorder()
    scores = RewardScorer(recorder, make_tokenizer()).begin(
        SEQUENCES, ATTENTION_MASK, ACTION_MASK, {"topic": ["x", "y"]}
    )()
    assert scores.tolist() == [0.0, 1.0]
    assert recorder.request.prompts == ["a", "c b"]
    assert recorder.request.completions == [" b c", ""]
    assert recorder.request.columns == {"topic": ["x", "y"]}
    assert recorder.request.sequences is SEQUENCES


def test_the_scorer_prefers_the_original_texts_of_prompts():
    recorder = Recorder()
    columns = {"prompt": ["A!", "C b"], "sample_ids": torch.tensor([4, 5])}
    RewardScorer(recorder, make_tokenizer()).begin(SEQUENCES, ATTENTION_MASK, ACTION_MASK, columns)()
    assert recorder.request.prompts == ["A!", "C b"]
    assert recorder.request.columns == {"sample_ids": [4, 5]}


def test_the_scorer_with_empty_responses_and_without_columns():
    recorder = Recorder()
    nothing = torch.zeros(2, 0, dtype=torch.bool)
    RewardScorer(recorder, make_tokenizer()).begin(SEQUENCES[:, :3], ATTENTION_MASK[:, :3], nothing)()
    assert recorder.request.completions == ["", ""]
    assert recorder.request.prompts == ["a", "c b"]


def test_rewards_from_settings(tmp_path):
    (tmp_path / "scoring_for_settings.py").write_text(
        "def length(completions):\n    return [len(text) for text in completions]\n"
    )
    term = {"function": "scoring_for_settings:length", "weight": 2.0}
    asked = []

    def load_model(path):
        asked.append(path)
        return LastToken()

    def built(settings):
        return build_reward(RewardSettings(**settings), search_paths=[tmp_path], load_model=load_model)

    request = request_of("a", "bb")
    assert tiny.ask(built({"function": term["function"]}), request).values.tolist() == [1.0, 2.0]
    assert built({"model": "models/rm"}).name == "rm"
    total = built({"terms": [term, {"model": "rm", "name": "style"}]})
    assert tiny.ask(total, request).values.tolist() == [2 * 1 + 3.0, 2 * 2 + 7.0]
    assert [reward.name for reward, _ in total.terms] == ["length", "style"]
    assert asked == ["models/rm", "rm"]


def batch_of(scorer):
    """Start to score a batch of one row."""
    ids = torch.tensor([[1, 2]])
    return scorer.begin(ids, torch.ones_like(ids), torch.ones(1, 1, dtype=torch.bool))


class Tokens(nn.Module):
    """A reward model that counts tokens."""

    def forward(self, sequences, attention_mask):
        return attention_mask.sum(dim=1).float()


@pytest.mark.parametrize("kind", ["a function", "a model", "both"])
def test_texts_are_decoded_only_when_a_reward_reads_them(kind):
    words, seen = make_tokenizer(), []

    def length(completions):
        seen.append(list(completions))
        return [1.0] * len(completions)

    length.is_host_work = False  # called when the scores are needed
    terms = {"a function": [FunctionReward(length)], "a model": [ModelReward(Tokens())]}
    terms["both"] = terms["a function"] + terms["a model"]
    decoded = []
    tokenizer = SimpleNamespace(decode=lambda *ids, **options: (decoded.append(ids), words.decode(*ids, **options))[1])
    scorer = RewardScorer(WeightedSum([(term, 1.0) for term in terms[kind]]), tokenizer)
    scores = scorer.begin(SEQUENCES, ATTENTION_MASK, ACTION_MASK)
    assert not decoded
    assert scores().tolist() == {"a function": [1.0, 1.0], "a model": [5.0, 4.0], "both": [6.0, 5.0]}[kind]
    assert bool(decoded) == (kind != "a model")
    assert seen == ([] if kind == "a model" else [[" b c", ""]])


class Shorter(ModelReward):
    def score(self, request):
        return super().score(request) - torch.tensor([float(len(text)) for text in request.completions])


class Longest(WeightedSum):
    def score(self, request):
        return torch.tensor([float(len(text)) for text in request.completions])


@pytest.mark.parametrize("reward", [Shorter(Tokens()), Longest([(ModelReward(Tokens()), 1.0)])], ids=["model", "sum"])
def test_subclasses_of_model_reward_and_weighted_sum_get_the_texts(reward):
    scores = RewardScorer(reward, make_tokenizer()).begin(SEQUENCES, ATTENTION_MASK, ACTION_MASK)()
    assert scores.tolist() == ([5.0 - 4, 4.0 - 0] if isinstance(reward, Shorter) else [4.0, 0.0])


def test_a_function_is_called_for_one_batch_at_a_time():
    inside, most, may_end, first_in = [], [], threading.Event(), threading.Event()

    def watched(completions):
        inside.append(1)
        most.append(len(inside))
        first_in.set()
        assert may_end.wait(30)
        inside.pop()
        return [1.0]

    scorer = RewardScorer(FunctionReward(watched, timeout_seconds=60), make_tokenizer())
    both = [batch_of(scorer), batch_of(scorer)]
    assert first_in.wait(30)
    may_end.set()
    assert [float(scores()) for scores in both] == [1.0, 1.0]
    assert most == [1, 1]


def test_a_batch_is_ready_when_its_scores_are():
    may_end = threading.Event()
    scorer = RewardScorer(FunctionReward(lambda completions: [float(may_end.wait(30))]), make_tokenizer())
    scores = batch_of(scorer)
    assert not scores.is_ready
    may_end.set()
    scores.wait(30)
    assert scores.is_ready
    assert float(scores()) == 1.0


def test_a_function_that_hangs_does_not_block_the_next_batch():
    may_end = threading.Event()
    answers = iter([lambda: may_end.wait(30), lambda: [1.0]])
    reward = FunctionReward(lambda completions: next(answers)(), timeout_seconds=0.01)
    scorer = RewardScorer(reward, make_tokenizer())
    with pytest.raises(RewardError, match="did not return"):
        batch_of(scorer)()
    reward.timeout_seconds = 60.0
    assert float(batch_of(scorer)()) == 1.0
    may_end.set()


def test_a_scorer_can_be_copied_while_a_call_is_running():
    may_end = threading.Event()
    scorer = RewardScorer(FunctionReward(lambda completions: [float(may_end.wait(30))]), make_tokenizer())
    scores = batch_of(scorer)
    other = copy.copy(scorer)
    may_end.set()
    assert float(scores()) == float(batch_of(other)()) == 1.0


def test_a_scorer_needs_a_reward():
    with pytest.raises(ConfigError, match="FunctionReward"):
        RewardScorer(lambda completions: [], make_tokenizer())


@pytest.mark.parametrize(
    "result", [torch.zeros(3), [1.0, 2.0], []], ids=["a score too many", "plain numbers", "nothing"]
)
def test_the_error_for_an_invalid_result_names_the_custom_reward(result):
    class Own(Reward):
        name = "own"

        def score(self, _request):
            return result

    with pytest.raises(RewardError, match=r"'own'.*2 scores"):
        tiny.ask(Own(), request_of("a", "b"))

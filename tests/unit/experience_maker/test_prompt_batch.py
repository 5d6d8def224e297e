"""The batches that a data loader may return."""

import doctest

import pytest
import torch

import coati.prompts.batch as batch_module
from coati.errors import DataError
from coati.experience import UNKNOWN_ID
from coati.prompts.batch import parse_prompts


def test_docstring_examples_run():
    result = doctest.testmod(batch_module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    "batch", [torch.tensor([[3, 4]]), {"input_ids": [[3, 4]]}, {"input_ids": torch.tensor([[3, 4]])}]
)
def test_a_tensor_or_a_dict_of_input_ids_without_a_mask_is_unpadded(batch):
    (sample,) = parse_prompts(batch)
    assert (sample.tokens, sample.id, sample.group, sample.columns) == ([3, 4], UNKNOWN_ID, None, {})


def test_other_keys_are_columns_and_ids_are_recognized():
    batch = {
        "input_ids": torch.tensor([[0, 3], [4, 5]], dtype=torch.int32),
        "attention_mask": torch.tensor([[False, True], [True, True]]),
        "sample_ids": [7, 8],
        "group_ids": torch.tensor([1, 1], dtype=torch.int32),
        "answer": ["a", "b"],
        "level": torch.tensor([0.5, 1.5]),
    }
    first, second = parse_prompts(batch)
    assert (first.tokens, second.tokens) == ([3], [4, 5])
    assert (first.id, second.id, first.group, second.group) == (7, 8, 1, 1)
    assert (first.columns, second.columns) == ({"answer": "a", "level": 0.5}, {"answer": "b", "level": 1.5})
    assert "input_ids" in batch  # the loader's dict is unchanged


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "a tensor of input_ids, or a dict .*got list"),
        ({"text": ["a"]}, r"a tensor of input_ids, or a dict .*got keys \['text'\]"),
        ({"input_ids": [[1, 2], [3]]}, "rows have different lengths .*Pad prompts on the left"),
        ({"input_ids": ["a"]}, "are not numbers"),
        (torch.tensor([1, 2]), r"input_ids of a batch must be \[B, P\].*got \[2\]"),
        (torch.zeros(0, 2), r"at least one prompt and one token, got \[0, 2\]"),
        (
            {"input_ids": [[1]], "attention_mask": [1]},
            r"attention_mask of a batch must be \[B, P\].*got \[1\]",
        ),
        ({"input_ids": [[1]], "answer": ["a", "b"]}, "'answer' of a batch .* each of its 1 prompts, got 2"),
        ({"input_ids": [[1]], "answer": 7}, "'answer' of a batch .* each of its 1 prompts, got int"),
    ],
)
def test_a_bad_batch_is_an_error_that_names_what_it_got(batch, message):
    with pytest.raises(DataError, match=message):
        parse_prompts(batch)

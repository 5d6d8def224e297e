"""What a data loader may hand over."""

import doctest

import pytest
import torch

import coati.prompts.batch as batch_module
from coati.errors import DataError
from coati.prompts.batch import PromptBatch


def test_docstring_examples_run():
    result = doctest.testmod(batch_module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    "batch", [torch.tensor([[3, 4]]), {"input_ids": [[3, 4]]}, {"input_ids": torch.tensor([[3, 4]])}]
)
def test_a_tensor_or_a_dict_of_input_ids_without_a_mask_is_unpadded(batch):
    parsed = PromptBatch.parse(batch)
    assert len(parsed) == 1
    assert parsed.input_ids.tolist() == [[3, 4]]
    assert parsed.attention_mask.tolist() == [[1, 1]]
    assert parsed.sample_ids is None
    assert parsed.group_ids is None
    assert parsed.columns == {}


def test_further_keys_are_columns_and_ids_are_told_apart():
    batch = {
        "input_ids": torch.tensor([[0, 3], [4, 5]], dtype=torch.int32),
        "attention_mask": torch.tensor([[False, True], [True, True]]),
        "sample_ids": [7, 8],
        "group_ids": torch.tensor([1, 1], dtype=torch.int32),
        "answer": ["a", "b"],
        "level": torch.tensor([0.5, 1.5]),
    }
    parsed = PromptBatch.parse(batch)
    assert parsed.input_ids.dtype == parsed.attention_mask.dtype == parsed.sample_ids.dtype == torch.long
    assert parsed.attention_mask.tolist() == [[0, 1], [1, 1]]
    assert (parsed.sample_ids.tolist(), parsed.group_ids.tolist()) == ([7, 8], [1, 1])
    assert parsed.columns["answer"] == ["a", "b"]
    assert set(parsed.columns) == {"answer", "level"}
    assert "input_ids" in batch  # the loader's dict is left as it was


def test_select_takes_the_same_prompts_of_everything():
    batch = PromptBatch.parse(
        {
            "input_ids": [[1], [2], [3]],
            "sample_ids": [4, 5, 6],
            "group_ids": [7, 8, 9],
            "answer": ["a", "b", "c"],
        }
    )
    part = batch.select([1, 2])
    assert part.input_ids.tolist() == [[2], [3]]
    assert part.attention_mask.tolist() == [[1], [1]]
    assert (part.sample_ids.tolist(), part.group_ids.tolist()) == ([5, 6], [8, 9])
    assert part.columns == {"answer": ["b", "c"]}
    bare = PromptBatch.parse(torch.tensor([[1], [2]])).select([0])
    assert (len(bare), bare.sample_ids, bare.group_ids) == (1, None, None)


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
def test_a_bad_batch_is_an_error_that_says_what_came(batch, message):
    with pytest.raises(DataError, match=message):
        PromptBatch.parse(batch)

"""What a leader tells its followers, as text: everything arrives, and nothing that could run does."""

import pytest
import torch

from coati.errors import ConfigError
from coati.experience_maker.lock_step import EndNotice, MakeNotice, _read, _written
from coati.weights.canary import Canary
from coati.weights.mirrored import CommitNotice


def test_notices_arrive_as_they_were_sent():
    options = {
        "max_new_tokens": 4,
        "top_p": 0.1 + 0.2,
        "eos_token_id": [2, 5],
        "sample_ids": torch.tensor([1 << 62, 7]),
    }
    made = MakeNotice(3, torch.tensor([[1, 2], [0, 9]]), torch.tensor([[1, 1], [0, 1]]), options)
    read = _read(_written(made).encode())
    assert (read.version, read.options.keys(), read.options["top_p"]) == (3, options.keys(), 0.1 + 0.2)
    assert read.options["eos_token_id"] == [2, 5]
    for sent, found in (
        (made.input_ids, read.input_ids),
        (made.attention_mask, read.attention_mask),
        (options["sample_ids"], read.options["sample_ids"]),
    ):
        assert torch.equal(found, sent)
    assert _read(_written(made._replace(attention_mask=None)).encode()).attention_mask is None
    commit = CommitNotice(2, (("actor", "w"), ("critic", "b")), Canary(logprobs=(-0.1, -1 / 3), tolerance=1e-4))
    assert _read(_written(commit).encode()) == commit
    assert _read(_written(commit._replace(canary=None)).encode()).canary is None
    assert isinstance(_read(_written(EndNotice()).encode()), EndNotice)


def test_options_that_are_not_plain_are_refused():
    with pytest.raises(ConfigError, match="must be plain numbers and texts, got a object"):
        _written(MakeNotice(0, torch.ones(1, 1), None, {"logits_processor": object()}))

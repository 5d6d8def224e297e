"""Damaged optimizer files are refused with a reason, and the optimizer stays unchanged."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from coati.errors import CheckpointError
from coati.trainer.strategies import DDPStrategy, base
from coati.trainer.strategies.files import iter_state


def make_optimizer(seed, *, steps=1):
    torch.manual_seed(seed)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=seed / 10, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return optimizer


def state_of(optimizer):
    state = {name: value.clone() for name, value in iter_state(optimizer)}
    return state, [group["lr"] for group in optimizer.param_groups]


def assert_same_state(one, other):
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(value, other[0][name]) for name, value in one[0].items())


@pytest.fixture
def saved(tmp_path):
    DDPStrategy(device="cpu").save_optimizer(make_optimizer(1), tmp_path / "optimizer")
    return tmp_path / "optimizer"


def change_tensors(change):
    """Apply `change` to the tensors in the file."""
    return lambda folder: save_file(
        change(load_file(folder / "optimizer.safetensors")), folder / "optimizer.safetensors"
    )


def change_json(change):
    def damage(folder):
        file = folder / "optimizer.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps(change(settings)))

    return damage


def flip_a_bit(tensors):
    tensors["1.exp_avg"].view(torch.uint8)[3] ^= 1
    return tensors


def without(key):
    return lambda mapping: {name: value for name, value in mapping.items() if name != key}


def other_lr(settings):
    settings["groups"][0]["lr"] = 7.0
    return settings


DAMAGE = {
    "wrong shape": (change_tensors(lambda t: {**t, "1.exp_avg": torch.zeros(1)}), "must have the digest"),
    "flipped bit": (change_tensors(flip_a_bit), "must have the digest"),
    "missing entry": (change_tensors(without("1.exp_avg")), "must have the digest"),
    "stray name": (change_tensors(lambda t: {**t, "hello": torch.zeros(2)}), "must have the digest"),
    "torn": (
        lambda f: [file.write_bytes(file.read_bytes()[:-1]) for file in f.glob("*.safetensors")],
        "must have the digest",
    ),
    "file gone": (lambda f: [file.unlink() for file in f.glob("*.safetensors")], "missing or unreadable"),
    "no shapes": (change_json(without("shapes")), "must have the digest"),
    "other manifest": (lambda f: (f / "manifest.json").write_text("[]"), "missing or unreadable"),
    "other learning rate": (change_json(other_lr), "must have the digest"),
    "no JSON": (lambda f: (f / "optimizer.json").write_bytes(b"\xff{"), "must have the digest"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_and_nothing_is_loaded(saved, damage, message):
    damage(saved)
    optimizer = make_optimizer(2)
    before = state_of(optimizer)
    with pytest.raises(CheckpointError, match=message) as caught:
        DDPStrategy(device="cpu").load_optimizer(optimizer, saved)
    assert str(saved) in str(caught.value)
    assert_same_state(state_of(optimizer), before)


def test_saved_state_is_restored_bit_for_bit(saved):
    optimizer = make_optimizer(2, steps=0)
    DDPStrategy(device="cpu").load_optimizer(optimizer, saved)
    assert_same_state(state_of(optimizer), state_of(make_optimizer(1)))


def test_state_that_was_saved_wrong_is_refused(tmp_path):
    optimizer = make_optimizer(1)
    optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg_sq"] = torch.zeros(1)
    strategy = DDPStrategy(device="cpu")
    strategy.save_optimizer(optimizer, tmp_path / "optimizer")
    with pytest.raises(CheckpointError, match=r"1\.exp_avg_sq must have the shape of its parameter, \[2\], got \[1\]"):
        strategy.load_optimizer(make_optimizer(2), tmp_path / "optimizer")


def test_a_file_of_another_format_is_refused(saved):
    change_json(lambda settings: {**settings, "format": 1})(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="format 5, got 1"):
        DDPStrategy(device="cpu").load_optimizer(make_optimizer(2), saved)


@pytest.mark.parametrize("index", [[], {"weight_map": []}, {"weight_map": {"weight": 3}}, {"weights": {}}, 1])
def test_a_malformed_index_of_a_model_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="index"):
        DDPStrategy(device="cpu").load_model(nn.Linear(1, 1), tmp_path)


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_rank_that_fails_to_load_informs_the_others(kind, monkeypatch, tmp_path):
    strategy = DDPStrategy(device="cpu")
    votes = []
    monkeypatch.setattr(strategy, "all_reduce_sum", lambda vote: votes.append(int(vote)) or vote)

    def fails(*_, **__):
        raise OSError("the disk is gone")

    optimizer = make_optimizer(1)
    monkeypatch.setattr(base, "read_tensors", lambda *_: None)
    monkeypatch.setattr(base, "copy_into", fails)
    monkeypatch.setattr(base, "read_optimizer", lambda *_, **__: {})
    monkeypatch.setattr(optimizer, "load_state_dict", fails)
    load = {
        "model": lambda: strategy.load_model(nn.Linear(1, 1), tmp_path),
        "optimizer": lambda: strategy.load_optimizer(optimizer, tmp_path),
    }
    with pytest.raises(OSError, match="the disk is gone"):
        load[kind]()
    assert votes == [0, 1]  # the check passed, then loading failed

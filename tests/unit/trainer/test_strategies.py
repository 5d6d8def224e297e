"""Strategies in one process: exactness, shards and files. tests/ranks tests two ranks."""

import copy
import itertools

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from coati.errors import CheckpointError, ConfigError, DeadlineExceeded
from coati.models import Actor, Critic, action_logprobs
from coati.models.lora import LoRASettings
from coati.trainer.optim import HybridAdam
from coati.trainer.strategies import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy

STRATEGIES = {
    "ddp": lambda **options: DDPStrategy(device="cpu", **options),
    "zero1": lambda **options: LowLevelZeroStrategy(stage=1, device="cpu", **options),
    "zero2": lambda **options: LowLevelZeroStrategy(device="cpu", **options),
    "gemini": lambda **options: GeminiStrategy(device="cpu", **options),
}


pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def make_strategy():
    return lambda name="ddp", **options: STRATEGIES[name](**options)


def tiny_llama(*, tie=False, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tie,
    )
    return LlamaForCausalLM(config).to(dtype)


def batch(step):
    return torch.randint(0, 23, (3, 6), generator=torch.Generator().manual_seed(step))  # [B, S]


def loss_of(model, step):
    ids = batch(step)
    logits = model(input_ids=ids).logits[:, :-1]  # [B, S - 1, V]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def plain_torch_steps(model, optimizer, steps, max_norm=1.0):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


def strategy_steps(strategy, model, optimizer, steps, max_norm=1.0):
    for step in steps:
        optimizer.zero_grad()
        strategy.backward(loss_of(model, step), model, optimizer)
        strategy.clip_grad_norm(model, max_norm)
        strategy.optimizer_step(optimizer)


def full_state(strategy, model):
    return {
        name: tensor.clone() for chunk in strategy.get_model_state_dict_shard(model) for name, tensor in chunk.items()
    }


def test_ddp_on_one_rank_is_plain_torch_bit_for_bit(make_strategy):
    reference = tiny_llama()
    plain_torch_steps(reference, torch.optim.Adam(reference.parameters(), 1e-2), range(5))
    strategy = make_strategy()
    model = tiny_llama()
    prepared, optimizer = strategy.prepare((model, torch.optim.Adam(model.parameters(), 1e-2)))
    assert prepared is model
    assert not torch.distributed.is_initialized()
    strategy_steps(strategy, prepared, optimizer, range(5))
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_like_torch(make_strategy, name):
    reference = tiny_llama(tie=True, dtype=torch.float64)
    plain_torch_steps(reference, torch.optim.AdamW(reference.parameters(), 1e-2), range(3))
    strategy = make_strategy(name)
    model = tiny_llama(tie=True, dtype=torch.float64)
    model, optimizer = strategy.prepare((model, HybridAdam(model.parameters(), 1e-2, weight_decay=0.01)))
    strategy_steps(strategy, model, optimizer, range(3))
    state = full_state(strategy, model)
    expected = reference.state_dict()
    del expected["lm_head.weight"]
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-6)


def test_prepare_returns_the_structure_of_its_arguments(make_strategy):
    strategy = make_strategy()
    net, reward = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters())
    assert strategy.prepare(reward) is reward
    (actor, actor_optimizer), lone = strategy.prepare((net, optimizer), reward)
    assert (actor, actor_optimizer, lone) == (net, optimizer, reward)
    with strategy.model_init_context():
        assert nn.Linear(1, 1).weight.device.type == "cpu"
    for wrong in ([optimizer], [(net, "adam")], [(net, optimizer, 1)], [(reward, optimizer)]):
        with pytest.raises(ConfigError, match="prepare"):
            strategy.prepare(*wrong)


def test_accumulation_over_micro_batches_adds_up(make_strategy):
    strategy = make_strategy("gemini")
    model = tiny_llama(dtype=torch.float64)
    model, optimizer = strategy.prepare((model, HybridAdam(model.parameters())))
    with strategy.no_sync(model):
        strategy.backward(loss_of(model, 0), model, optimizer)
    strategy.backward(loss_of(model, 1), model, optimizer)
    reference = tiny_llama(dtype=torch.float64)
    (loss_of(reference, 0) + loss_of(reference, 1)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_clip_grad_norm(make_strategy, name):
    strategy = make_strategy(name)
    net = nn.Linear(2, 1, bias=False)
    net, optimizer = strategy.prepare((net, HybridAdam(net.parameters())))
    # the gradient of w·(3, 4) is (3, 4), of norm 5
    strategy.backward(net(torch.tensor([[3.0, 4.0]])).sum(), net, optimizer)

    def grad():
        gradient = net.weight.grad
        return gradient if name == "ddp" else gradient.full_tensor()

    for only_measure in (0, float("inf"), 100.0):
        assert strategy.clip_grad_norm(net, only_measure).item() == pytest.approx(5.0)
        assert grad().tolist() == [[3.0, 4.0]]
    assert strategy.clip_grad_norm(net, 1.0).item() == pytest.approx(5.0)
    torch.testing.assert_close(grad(), torch.tensor([[0.6, 0.8]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_norm_is_returned_and_scales_nothing(make_strategy, bad):
    strategy = make_strategy()
    net = nn.Linear(2, 1, bias=False)
    net.weight.grad = torch.tensor([[bad, 4.0]])
    assert not strategy.clip_grad_norm(net, 1.0).isfinite()
    assert net.weight.grad[0, 1].item() == 4.0


def test_gradients_of_two_dtypes_have_one_norm_and_are_scaled_alike(make_strategy):
    grads = [torch.tensor([3.0]), torch.tensor([4.0, 0.0]).bfloat16(), torch.tensor([12.0]).double()]
    net = nn.ParameterList(torch.zeros_like(grad) for grad in grads)
    for parameter, grad in zip(net, grads, strict=True):
        parameter.grad = grad
    net.append(nn.Parameter(torch.zeros(1)))  # without a gradient
    assert make_strategy().clip_grad_norm(net, 6.5).item() == pytest.approx(13.0)
    assert [grad.tolist() for grad in grads] == [[pytest.approx(1.5)], [2.0, 0.0], [pytest.approx(6.0)]]


@pytest.mark.parametrize(("name", "tie"), [("ddp", False), ("gemini", True)])
def test_shards_are_bounded_and_cover_the_state_once(make_strategy, name, tie):
    strategy = make_strategy(name)
    model = tiny_llama(tie=tie)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    model, _ = strategy.prepare((model, HybridAdam(model.parameters())))
    bound = 1024
    chunks = list(strategy.get_model_state_dict_shard(model, shard_size=bound / 2**20))
    assert len(chunks) > 3
    for chunk in chunks:
        num_bytes = sum(tensor.nbytes for tensor in chunk.values())
        assert num_bytes <= bound or len(chunk) == 1
        assert not any(tensor.requires_grad for tensor in chunk.values())
    for left, right in itertools.pairwise(chunks):  # no chunk could have taken the next tensor
        assert sum(t.nbytes for t in left.values()) + next(iter(right.values())).nbytes > bound
    names = [key for chunk in chunks for key in chunk]
    assert len(names) == len(set(names))
    assert set(expected) - set(names) == ({"lm_head.weight"} if tie else set())
    for chunk in chunks:
        for key, tensor in chunk.items():
            assert torch.equal(tensor, expected[key])
            assert tensor.dtype == expected[key].dtype
    assert len(list(strategy.get_model_state_dict_shard(model))) == 1


def test_shards_of_some_names_in_another_dtype(make_strategy):
    strategy = make_strategy("gemini")
    model = tiny_llama()
    model, _ = strategy.prepare((model, HybridAdam(model.parameters())))
    names = {"model.norm.weight", "model.embed_tokens.weight"}
    (chunk,) = strategy.get_model_state_dict_shard(model, names=names, dtype=torch.bfloat16)
    assert chunk.keys() == names
    assert {tensor.dtype for tensor in chunk.values()} == {torch.bfloat16}


def test_shards_keep_buffers_and_dtypes(make_strategy):
    net = nn.Module()
    net.register_buffer("count", torch.tensor([3], dtype=torch.int64))
    net.register_buffer("scratch", torch.zeros(2), persistent=False)
    net.weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    net.empty = nn.Parameter(torch.ones(0))
    net.also_empty = nn.Parameter(torch.ones(0))
    (chunk,) = make_strategy().get_model_state_dict_shard(net)
    assert {key: tensor.dtype for key, tensor in chunk.items()} == {
        "count": torch.int64,
        "weight": torch.bfloat16,
        "empty": torch.float32,
        "also_empty": torch.float32,
    }
    assert chunk["weight"].data_ptr() == net.weight.data_ptr()


def test_shard_options_are_checked(make_strategy):
    strategy = make_strategy()
    with pytest.raises(ConfigError, match="shard_size must be a positive number of MiB, got 0"):
        strategy.get_model_state_dict_shard(nn.Linear(1, 1), shard_size=0)


@pytest.mark.parametrize(("saver", "loader", "tie"), [("ddp", "gemini", True), ("gemini", "ddp", False)])
def test_a_saved_run_continues_under_another_strategy(make_strategy, saver, loader, tie, tmp_path):
    """tests/ranks tests every pair of strategies, with one rank and two."""
    reference = tiny_llama(tie=tie, dtype=torch.float64)
    plain_torch_steps(reference, torch.optim.AdamW(reference.parameters(), 1e-2), range(3))
    strategy = make_strategy(saver)
    model = tiny_llama(tie=tie, dtype=torch.float64)
    model, optimizer = strategy.prepare((model, torch.optim.AdamW(model.parameters(), 1e-2)))
    strategy_steps(strategy, model, optimizer, range(2))
    strategy.save_model(model, tmp_path / "model")
    strategy.save_optimizer(optimizer, tmp_path / "optimizer")
    assert {file.suffix for file in (tmp_path / "optimizer").iterdir()} == {".json", ".safetensors"}

    other = make_strategy(loader)
    resumed = tiny_llama(tie=tie, dtype=torch.float64, seed=99)
    resumed, optimizer = other.prepare((resumed, HybridAdam(resumed.parameters(), lr=5.0)))
    other.load_model(resumed, tmp_path / "model")
    other.load_optimizer(optimizer, tmp_path / "optimizer")
    strategy_steps(other, resumed, optimizer, [2])
    for key, tensor in full_state(other, resumed).items():
        torch.testing.assert_close(tensor, reference.state_dict()[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["ddp", "gemini"])
def test_transformers_loads_what_is_saved(make_strategy, name, tmp_path):
    strategy = make_strategy(name)
    model = tiny_llama(tie=True)
    model, _ = strategy.prepare((model, HybridAdam(model.parameters())))
    strategy.save_model(model, tmp_path / "model")
    strategy.save_model(model, tmp_path / "model")  # a model folder may be replaced
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded) is LlamaForCausalLM
    assert torch.equal(loaded.lm_head.weight, full_state(strategy, model)["model.embed_tokens.weight"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]  # no temporary folders are left


def tied_net():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    return net


def test_a_plain_module_is_one_safetensors_file(make_strategy, tmp_path):
    strategy = make_strategy()
    net = tied_net()
    strategy.save_model(net, str(tmp_path / "net"))
    assert load_file(tmp_path / "net" / "model.safetensors").keys() == {"0.weight"}
    fresh = tied_net()
    strategy.load_model(fresh, tmp_path / "net")
    assert torch.equal(fresh[1].weight, net[0].weight)


def test_loading_is_all_or_nothing(make_strategy, tmp_path):
    strategy = make_strategy()
    strategy.save_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), tmp_path / "net")
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4))
    other.extra = nn.Linear(1, 1)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"missing \(extra\.bias.*another shape \(1\.\w+ .*Nothing was loaded"):
        strategy.load_model(other, tmp_path / "net")
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    with pytest.raises(CheckpointError, match=r"2 are unexpected .*1\.weight \(.*, not None"):
        strategy.load_model(nn.Sequential(nn.Linear(2, 2)), tmp_path / "net")


def test_missing_and_torn_files_are_named(make_strategy, tmp_path):
    strategy = make_strategy()
    net = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"nowhere.model\.safetensors does not exist"):
        strategy.load_model(net, tmp_path / "nowhere")
    strategy.save_model(net, tmp_path / "net")
    file = tmp_path / "net" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="must have the digest"):
        strategy.load_model(net, tmp_path / "net")
    (tmp_path / "net" / "manifest.json").unlink()  # as if the folder came from elsewhere
    with pytest.raises(CheckpointError, match="unreadable"):
        strategy.load_model(net, tmp_path / "net")
    optimizer = torch.optim.Adam(net.parameters())
    with pytest.raises(CheckpointError, match=r"optimizer\.json does not exist"):
        strategy.load_optimizer(optimizer, tmp_path / "nowhere")


def test_foreign_folders_and_files_are_not_replaced(make_strategy, tmp_path):
    strategy = make_strategy()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="not something coati saved"):
        strategy.save_model(nn.Linear(1, 1), tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        strategy.save_model(nn.Linear(1, 1), tmp_path / "file")
    (tmp_path / "empty").mkdir()
    strategy.save_model(nn.Linear(1, 1), tmp_path / "empty")


def test_a_model_and_an_optimizer_do_not_replace_each_other(make_strategy, tmp_path):
    strategy, net = make_strategy(), nn.Linear(1, 1)
    optimizer = torch.optim.Adam(net.parameters())
    strategy.save_model(net, tmp_path / "model")
    strategy.save_optimizer(optimizer, tmp_path / "optimizer")
    with pytest.raises(CheckpointError, match="not something coati saved"):
        strategy.save_optimizer(optimizer, tmp_path / "model")
    with pytest.raises(CheckpointError, match="not something coati saved"):
        strategy.save_model(net, tmp_path / "optimizer")


class FullDisk(nn.Linear):
    def save_pretrained(self, path, state_dict):
        (path / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")


def no_room(folder):
    (folder / "tokenizer.json").write_text("half")
    raise Exception("No space left on device")  # as the tokenizers library does


@pytest.mark.parametrize(("model_class", "add"), [(FullDisk, None), (nn.Linear, no_room)])
def test_a_full_disk_leaves_the_old_model(make_strategy, tmp_path, model_class, add):
    strategy = make_strategy()
    net = nn.Linear(1, 1)
    strategy.save_model(net, tmp_path / "net")
    with pytest.raises(CheckpointError, match=r"could not write .*net: .*No space left on device"):
        strategy.save_model(model_class(1, 1), tmp_path / "net", add=add)
    assert {file.name for file in (tmp_path / "net").iterdir()} == {"manifest.json", "model.safetensors"}
    strategy.load_model(nn.Linear(1, 1), tmp_path / "net")
    assert [entry.name for entry in tmp_path.iterdir()] == ["net"]


def test_optimizer_state_of_something_else_is_refused(make_strategy, tmp_path):
    strategy = make_strategy()
    net = nn.Linear(2, 2)
    strategy.save_optimizer(torch.optim.Adam(net.parameters()), tmp_path / "optimizer")
    with pytest.raises(CheckpointError, match="with Adam, not SGD"):
        strategy.load_optimizer(torch.optim.SGD(net.parameters()), tmp_path / "optimizer")
    with pytest.raises(CheckpointError, match=r"\[2, 2\] as parameter 0, not \[3, 2\]"):
        strategy.load_optimizer(torch.optim.Adam(nn.Linear(2, 3).parameters()), tmp_path / "optimizer")
    two_groups = torch.optim.Adam([{"params": [net.weight]}, {"params": [net.bias]}])
    with pytest.raises(CheckpointError, match=r"groups of \[2\] parameters, not groups of \[1, 1\]"):
        strategy.load_optimizer(two_groups, tmp_path / "optimizer")


def test_sharding_refuses_a_used_optimizer(make_strategy):
    strategy = make_strategy("gemini")
    net = nn.Linear(2, 2)
    optimizer = HybridAdam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="prepare must come before the first optimizer step"):
        strategy.prepare((net, optimizer))


def test_optimizer_settings_and_object_survive_sharding(make_strategy):
    net = nn.Linear(2, 2)
    groups = [{"params": [net.bias], "lr": 0.5}, {"params": [net.weight], "weight_decay": 0.3}]
    optimizer = HybridAdam(groups, lr=0.1)
    _, returned = make_strategy("zero2").prepare((net, optimizer))
    assert returned is optimizer
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.5, 0),
        (0.1, 0.3),
    ]
    assert [group["params"][0] for group in optimizer.param_groups] == [net.bias, net.weight]


@pytest.mark.parametrize("wrapper", ["actor", "critic", "lora_actor"])
@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_our_models_load_what_they_saved(make_strategy, wrapper, name, tmp_path):
    def build(seed):
        base = tiny_llama(seed=0 if wrapper == "lora_actor" else seed)
        torch.manual_seed(seed)
        if wrapper == "critic":
            model = Critic(base)
        else:
            model = Actor(base, lora=LoRASettings(rank=2) if wrapper == "lora_actor" else None)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
        return model

    strategy = make_strategy(name)
    saved = build(1)
    optimizer = HybridAdam([p for p in saved.parameters() if p.requires_grad])
    saved, _ = strategy.prepare((saved, optimizer))
    strategy.save_model(saved, tmp_path / "model")
    fresh = build(2)
    expected = full_state(strategy, saved)
    assert any(not torch.equal(value, fresh.state_dict()[key]) for key, value in expected.items())
    strategy.load_model(fresh, tmp_path / "model")
    for key, value in full_state(strategy, fresh).items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", STRATEGIES)
def test_mixed_precision_is_bit_identical_to_a_bfloat16_model(make_strategy, name):
    strategy, base = make_strategy(name, compute_dtype=torch.bfloat16), Actor(tiny_llama(tie=True))
    maker = copy.deepcopy(base)
    for parameter in maker.parameters():
        parameter.data = parameter.data.bfloat16()
    actor, _ = strategy.prepare((base, HybridAdam(base.parameters())))
    with torch.no_grad():
        ours, theirs = (action_logprobs(model, batch(0), None, 4)[0] for model in (actor, maker))
    assert torch.equal(ours, theirs)
    assert {tensor.dtype for tensor in full_state(strategy, actor).values()} == {torch.float32}


@pytest.mark.parametrize("name", ["ddp", "gemini"])
def test_adapters_on_tied_embeddings_are_saved_as_peft_loads_them(make_strategy, name, tmp_path):
    base, strategy = tiny_llama(tie=True), make_strategy(name)
    actor = Actor(copy.deepcopy(base), lora=LoRASettings(rank=2))
    trainable = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    for parameter in trainable:
        nn.init.normal_(parameter)
    actor, _ = strategy.prepare((actor, HybridAdam(trainable)))
    strategy.save_model(actor, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    expected = {key.removeprefix("model."): value for key, value in full_state(strategy, actor).items()}
    adapters = {key for key in expected if "lora_" in key}
    assert len(adapters) == len(trainable)
    assert all(torch.equal(loaded.state_dict()[key], expected[key]) for key in adapters)


def test_a_failed_rendezvous_names_the_address(monkeypatch):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for key, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2", **here}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(DeadlineExceeded, match=rf"rank 0 of 2 .* 127\.0\.0\.1:{port} within 0\.1 s"):
        DDPStrategy(device="cpu", timeout_seconds=0.1)

"""Every strategy on two ranks, compared with one rank and plain torch. The two ranks are started once for all tests."""

import contextlib
import copy
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from coati.algos.losses import clipped_value_loss
from coati.algos.masked import masked_whiten
from coati.devices import set_up_cpu
from coati.models import Critic, action_logprobs, action_values
from coati.trainer.objective import StepCounts, policy_objective
from ranks import learner as worker
from ranks import strategies as bare

IN_FLIGHT = 2  # each of gloo's threads may hold a tensor for a moment after it has arrived


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """Use this process as the single rank; a strategy that needs a process group creates it."""
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(key, None)
    threads = torch.get_num_threads()
    set_up_cpu(1)
    yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def backward_of(actor, critic, joined, rows):
    """Add the gradients of some rows of a step's batch to both models, as a single-process loop does."""
    algorithm = worker.ALGORITHM
    mask = joined.full_action_mask()
    counts = StepCounts(mask.sum(), mask.any(-1).sum())
    advantages = masked_whiten(joined.advantages, mask)[rows]
    part = joined.select(rows)
    inputs = (part.sequences, part.attention_mask, part.num_actions)
    logprobs, entropy = action_logprobs(actor, *inputs, with_entropy=True)
    policy = policy_objective(logprobs, part, advantages, counts, algorithm)
    bonus = entropy[part.action_mask].sum() / counts.tokens
    (policy.loss - algorithm.entropy_coef * bonus).backward()
    value = clipped_value_loss(
        action_values(critic, *inputs),
        part.values,
        part.advantages + part.values,
        part.action_mask,
        clip=algorithm.value_clip,
        num_tokens=counts.tokens,
    )
    value.loss.backward()


def optimizers_of(actor, critic):
    rates = worker.TRAIN.actor_lr, worker.TRAIN.critic_lr
    return [
        torch.optim.Adam(model.parameters(), lr=lr, fused=True)
        for model, lr in zip((actor, critic), rates, strict=True)
    ]


def clip_and_step(models, optimizers):
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.nn.utils.clip_grad_norm_(model.parameters(), worker.TRAIN.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


def state_of(actor, critic):
    named = {"actor": actor, "critic": critic}
    return {f"{key}.{n}": p.detach().clone() for key, m in named.items() for n, p in m.named_parameters()}


def reference_run(folder, num_steps):
    """Train with plain torch, without strategy and learner; return the weights after `num_steps` and after one more."""
    models = [model.eval() for model in worker.load_models(folder)]
    optimizers = optimizers_of(*models)
    states = []
    for step in range(num_steps + 1):
        for rows in worker.passes_of(1, step):
            backward_of(*models, worker.batch(step), rows)
        clip_and_step(models, optimizers)
        states.append(state_of(*models))
    return states[-2], states[-1]


def mixed_run(folder, *, world_size):
    """Train with plain torch in bfloat16, pass by pass; return the gradients and weights of every step.

    The gradients of the passes are summed in float32.
    """
    models = [model.eval() for model in worker.load_models(folder, torch.float32)]
    computing = [copy.deepcopy(model) for model in models]
    for model in computing:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    pairs = [
        pair
        for model, copied in zip(models, computing, strict=True)
        for pair in zip(model.parameters(), copied.parameters(), strict=True)
    ]
    optimizers, gradients, start = optimizers_of(*models), [], state_of(*models)
    for step in range(worker.NUM_MIXED_STEPS):
        for stored, computed in pairs:
            stored.grad = torch.zeros_like(stored)
            computed.data.copy_(stored.data)
        for rows in worker.passes_of(world_size, step):
            backward_of(*computing, worker.in_float32(worker.batch(step)), rows)
            for stored, computed in pairs:
                stored.grad += computed.grad
                computed.grad = None
        gradients += [{n: p.grad.clone() for n, p in model.named_parameters()} for model in models]
        clip_and_step(models, optimizers)
    return {"gradients": gradients, "start": start, "state": state_of(*models)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "learner"
    folder.mkdir()
    worker.write_models(folder)
    return folder


def run_ranks(folder, *, seconds=240):
    """Run the two ranks until they end; show the log of the first that fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": paths}
    ranks = subprocess.Popen(
        [sys.executable, "-m", "ranks", folder],
        env={**os.environ, **shared, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        failures, _ = ranks.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        failures = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("rank*.log")))
        pytest.fail(f"the ranks did not end within {seconds} s. Their logs end with:\n{failures}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, failures


@pytest.fixture(scope="module")
def reference(folder):
    return reference_run(folder, worker.NUM_STEPS)


@pytest.fixture(scope="module")
def alone(folder):
    """The results of one rank, in this process; its checkpoints are in the folder."""
    seen = {}
    for name in worker.STRATEGIES:
        learner, seen[name] = worker.train(folder, name)
        worker.save_all(learner, folder / f"{name}-1")
        seen[f"mixed-{name}"] = worker.mixed_precision(folder, name)
    seen["drawn"] = worker.draw_weights(folder, "gemini")
    seen["off-policy"] = worker.train(folder, "ddp", worker.OFF_POLICY, num_steps=3)[1]
    return seen


@pytest.fixture(scope="module")
def together(folder, reference, alone):
    """The results of each of two ranks, in separate processes."""
    torch.save(reference[1], folder / "expected.pt")
    (folder.parent / "strategies" / "foreign").mkdir(parents=True)
    (folder.parent / "strategies" / "foreign" / "notes.txt").write_text("not a model")
    run_ranks(folder.parent)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def test_one_rank_of_ddp_is_bit_identical_to_plain_torch(alone, reference):
    ours, theirs = alone["ddp"]["state"], reference[0]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", worker.STRATEGIES)
def test_steps_give_the_weights_of_plain_torch(alone, together, reference, name):
    for seen in (alone, *together):
        assert seen[name]["is_packed"]  # every strategy supports computing without padding
        assert worker.furthest(seen[name]["state"], reference[0]) < 1e-6


@pytest.mark.parametrize("name", worker.STRATEGIES)
def test_ranks_report_the_joined_batch(alone, together, name):
    for step in range(worker.NUM_STEPS):
        for seen in together:
            assert seen[name]["metrics"][step] == pytest.approx(alone["ddp"]["metrics"][step], rel=1e-6, abs=1e-9)
    # The batches trigger clipping of ratios and norms; otherwise the test would miss much of the above.
    metrics = alone["ddp"]["metrics"]
    assert all(step["policy/clip_fraction"] > 0 and step["policy/grad_norm"] > 0.5 for step in metrics)


@pytest.mark.parametrize("name", ["ddp", "gemini"])
def test_off_policy_corrections_use_the_joined_batch_too(alone, together, name):
    expected = alone["off-policy"]
    assert 0 < expected["metrics"][0]["off_policy/effective_tokens"] < 0.9
    for seen in together:
        ours = seen[f"off-policy-{name}"]
        assert worker.furthest(ours["state"], expected["state"]) < 1e-6
        for step, tolerance in enumerate((1e-9, 1e-6, 1e-6)):  # rank 0 has no data in the first step, but in the others
            assert ours["metrics"][step] == pytest.approx(expected["metrics"][step], rel=tolerance, abs=1e-12)


def test_memory_per_rank_shrinks_as_each_strategy_claims(alone, together):
    whole = alone["ddp"]["held"]
    assert whole["parameters"] == whole["gradients"] == whole["state"] // 2  # Adam has two moments
    sharded_parts = {
        "ddp": (),
        "zero1": ("parameters", "gradients", "state"),
        "zero2": ("parameters", "gradients", "state"),
        "gemini": ("parameters", "gradients", "state"),
    }
    for name, sharded in sharded_parts.items():
        assert alone[name]["held"] == whole
        for part in whole:
            of_ranks = [seen[name]["held"][part] for seen in together]
            if part in sharded:
                assert sum(of_ranks) == whole[part], (name, part)
                assert max(of_ranks) < 0.55 * whole[part], (name, part)
            else:
                assert of_ranks == [whole[part]] * 2, (name, part)


@pytest.mark.parametrize("name", ["zero1", "zero2", "gemini"])
def test_only_rank_0_holds_a_whole_model_while_it_is_loaded(together, name):
    for seen in together:
        assert len(seen[name]["fill_bytes"]) == 2 * 3  # actor and critic: two blocks, then the rest
    # At most one block of two is whole and the other half sharded: 3/4 of the blocks, and nothing of the rest.
    whole = sum(tensor.nbytes for key, tensor in seen[name]["state"].items() if key.startswith("actor."))
    assert 0 < max(together[1][name]["fill_bytes"]) < 0.65 * whole


@pytest.mark.parametrize("name", ["zero2", "gemini"])
def test_weights_are_streamed_from_shards_without_gathering_the_model(together, name):
    for seen in together:
        tensors = [tensor.nbytes for key, tensor in seen[name]["state"].items() if key.startswith("actor.")]
        # The chunk being read and the one being made, of 4 KiB or one tensor each
        limit = 2 * 4096 + IN_FLIGHT * max(tensors)
        assert 0 < seen[name]["streamed"] <= limit
        assert sum(tensors) > 2 * limit


@pytest.mark.parametrize(
    ("name", "counts"), [("gemini", [1, 1, 1, 1]), ("zero2", [1, 2, 1, 2]), ("zero1", [1, 2, 2, 2])]
)
def test_how_many_blocks_are_whole_at_once_in_the_forward_pass(alone, together, name, counts):
    for seen in (alone, *together):
        # Two passes through two blocks. With ZeRO, the first stays whole until its backward pass; in stage 1, both stay
        # whole until the last pass has ended.
        assert seen[name]["whole_blocks"] == counts


def test_weights_dtypes_and_buffers_missing_from_files_come_from_rank_0(alone, together):
    for seen in together:
        for ours, theirs in zip(seen["drawn"], alone["drawn"], strict=True):
            assert worker.furthest(ours, theirs) == 0
            assert {name: tensor.dtype for name, tensor in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    actor, critic, *_ = alone["drawn"]
    assert all(tensor.std() > 0 for name, tensor in actor.items() if "norm" not in name and "lora_B" not in name)
    assert {tensor.dtype for tensor in critic.values()} == {torch.bfloat16}


def test_ranks_that_build_different_models_raise(together):
    assert "another rank" in together[0]["different"]
    assert "same model" in together[1]["different"]


def test_unsharded_models_are_streamed_without_copies(together):
    assert [seen["ddp"]["streamed"] for seen in together] == [0, 0]


@pytest.fixture(scope="module")
def resumed(folder, together, reference):
    """For one rank and for each of two: the deviation of every loader of every checkpoint from the expected weights."""
    return [worker.resume_from_all(folder, reference[1]), *(seen["resumed"] for seen in together)]


@pytest.mark.parametrize("loader", worker.STRATEGIES)
@pytest.mark.parametrize("saver", worker.STRATEGIES)
def test_every_strategy_continues_from_what_any_other_saved(resumed, saver, loader):
    for seen in resumed:
        distance, _ = seen[loader, saver]
        assert distance < 1e-6


@pytest.mark.parametrize("loader", worker.STRATEGIES)
def test_ranks_load_only_the_optimizer_state_that_they_hold(alone, together, resumed, loader):
    by_one, *by_two = ({key: loaded for key, (_, loaded) in seen.items() if key[0] == loader} for seen in resumed)
    assert set(by_one.values()) == {alone["ddp"]["held"]["state"]}
    for seen, loaded in zip(together, by_two, strict=True):
        assert set(loaded.values()) == {seen[loader]["held"]["state"]}


@pytest.mark.parametrize("saver", ["ddp", "gemini"])
def test_transformers_and_our_models_load_what_two_ranks_saved(folder, together, saver):
    checkpoint, state = folder / f"{saver}-2", together[0][saver]["state"]
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint / "actor", dtype=torch.float64)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[f"actor.model.{name}"])
    critic = Critic.from_pretrained(checkpoint / "critic", dtype=torch.float64)
    for name, tensor in critic.state_dict().items():
        assert torch.equal(tensor, state[f"critic.{name}"])
    suffixes = {file.suffix for file in checkpoint.rglob("*") if file.is_file()}
    assert suffixes == {".json", ".safetensors"}


@pytest.fixture(scope="module")
def mixed(folder):
    """The expected numbers by hand, for each number of ranks."""
    return {ranks: mixed_run(folder, world_size=ranks) for ranks in (1, 2)}


def relative_distance(ours, theirs):
    assert ours.keys() == theirs.keys()
    return sum_of_squares({n: ours[n] - theirs[n] for n in ours}) ** 0.5 / sum_of_squares(theirs) ** 0.5


def sum_of_squares(tensors):
    return sum(float(tensor.double().square().sum()) for tensor in tensors.values())


@pytest.mark.parametrize("name", worker.STRATEGIES)
def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(alone, together, mixed, name):
    for seen, ranks in ((alone, 1), *((rank, 2) for rank in together)):
        ours, theirs = seen[f"mixed-{name}"], mixed[ranks]
        assert ours["computed"] == torch.bfloat16
        assert ours["stored"] == ours["moments"] == {torch.float32}
        assert ours["wire"] == {torch.bfloat16}
        # If ranks summed gradients in bfloat16, these would differ by a thousandth.
        for gradients, expected in zip(ours["gradients"], theirs["gradients"], strict=True):
            assert relative_distance(gradients, expected) < 1e-5
        moved, expected = ({n: run["state"][n] - theirs["start"][n] for n in run["state"]} for run in (ours, theirs))
        assert relative_distance(moved, expected) < 1e-3
    left, right = (seen[f"mixed-{name}"]["state"] for seen in together)
    assert worker.furthest(left, right) == 0


def test_sharded_gradients_stay_sharded_between_micro_batches(folder):
    learner = worker.make_learner(folder, worker.STRATEGIES["gemini"]())
    strategy, example = learner.strategy, worker.batch(0)
    with strategy.no_sync(learner.critic):
        loss = learner.critic(example.sequences, example.attention_mask).sum()
        strategy.backward(loss, learner.critic, learner.optimizers["critic"])
    assert all(isinstance(parameter.grad, DTensor) for parameter in learner.critic.parameters())


# Strategies without the learner: a bare model, tied weights, two parameter groups.


@pytest.fixture(scope="module")
def out(folder):
    return folder.parent / "strategies"


@pytest.fixture(scope="module")
def seen(together, out):
    """The results that each of the two ranks recorded."""
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def bare_reference():
    """The results of plain torch on the joined batch, in one process."""
    rows = slice(None)
    model = bare.tiny_llama(100)
    weights = [p for p in model.parameters() if p.ndim > 1]
    scales = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": scales, "lr": 3e-2, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    tokens = [bare.batch(step)[1][:, 1:].sum() for step in range(bare.NUM_STEPS + 2)]
    run = {"norms": []}
    sum(bare.loss_of(model, step, rows, tokens[0] + tokens[1]) for step in (0, 1)).backward()
    run["accumulated"] = {name: p.grad.clone() for name, p in model.named_parameters()}
    for step in range(bare.NUM_STEPS + 2):
        optimizer.zero_grad()
        bare.loss_of(model, step, rows, tokens[step]).backward()
        if step == 0:
            run["grads"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), bare.MAX_NORM)
        run["norms"].append(norm)
        optimizer.step()
        if step == bare.NUM_STEPS - 1:
            run["state"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    run["resumed"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def assert_same(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", bare.STRATEGIES)
def test_steps_of_two_ranks_are_those_of_one_on_the_joined_batch(seen, bare_reference, name):
    expected = bare_reference
    assert min(expected["norms"]) > bare.MAX_NORM  # otherwise the test would miss a wrong scale
    for rank in range(2):
        ours = seen[rank][name]
        assert_same(ours["grads"], expected["grads"], 1e-12)
        assert_same(ours["accumulated"], expected["accumulated"], 1e-12)
        norms = torch.stack(expected["norms"][: bare.NUM_STEPS])
        torch.testing.assert_close(torch.stack(ours["norms"]), norms, rtol=0, atol=1e-6)
    assert_same(seen[0][name]["state"], expected["state"], 1e-6)
    assert_same(seen[1][name]["state"], seen[0][name]["state"], 0)  # ranks agree to the last bit


def test_what_each_rank_holds(seen):
    def of_both(key, name):
        return [seen[rank][name][key] for rank in range(2)]

    num_params = len(seen[0]["ddp"]["state"])
    numel = sum(tensor.numel() for tensor in seen[0]["ddp"]["state"].values())
    assert of_both("wrapped", "ddp") == [True, True]
    assert of_both("num_states", "ddp") == [num_params, num_params]
    for name in ("zero1", "zero2", "gemini"):
        assert sum(of_both("local_numel", name)) == numel
        assert max(of_both("local_numel", name)) < 0.6 * numel
    assert not seen[0]["lone_is_wrapped"]


@pytest.mark.parametrize("name", bare.STRATEGIES)
def test_a_run_continues_from_another_strategys_files(seen, bare_reference, name):
    for rank in range(2):
        assert_same(seen[rank][f"resumed-{name}"], bare_reference["resumed"], 1e-6)


@pytest.mark.parametrize("name", bare.STRATEGIES)
def test_one_process_loads_what_two_ranks_saved(out, seen, name):
    loaded = AutoModelForCausalLM.from_pretrained(out / f"model-{name}", dtype=torch.float64)
    for key, tensor in seen[0][name]["state"].items():
        assert torch.equal(loaded.state_dict()[key], tensor)


def test_a_failed_save_raises_on_every_rank(seen):
    assert "not something coati saved" in seen[0]["foreign"]
    assert "another rank could not save" in seen[1]["foreign"]


def test_a_load_that_fails_on_one_rank_fails_on_all(seen):
    assert [seen[rank]["missing"][1] for rank in range(2)] == [True, True], "nothing was loaded"
    assert ["another rank could not load" in message for message in seen[0]["missing"][0]] == [True, True]
    assert ["does not exist" in message for message in seen[1]["missing"][0]] == [True, True]

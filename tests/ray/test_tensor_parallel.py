"""Models cut over two ranks against the same models whole, in two processes; then the same in two Ray actors."""

import functools
import importlib.util
import socket
from pathlib import Path

import pytest
import ray
import ray_testing
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coati.errors import PeerDied
from coati.models import Actor, Critic
from coati.ray.experience_maker_holder import ExperienceMakerHolder
from coati.ray.maker_follower import MakerFollower

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
_spec = importlib.util.spec_from_file_location("tensor_parallel_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


@pytest.fixture(scope="module")
def seen(tmp_path_factory, run_ranks):
    """What each of two ranks wrote down."""
    out = tmp_path_factory.mktemp("tensor-parallel")
    run_ranks(WORKER, out)
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("model", worker.MODELS)
def test_a_cut_model_computes_what_the_whole_one_does(seen, model):
    for rank in seen:
        for kind in ("logits", "logprobs", "values"):
            whole, cut = rank[model][kind]
            torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-5)
            assert whole.std() > 0.1
        assert rank[model]["names"][0] == rank[model]["names"][1]
        assert rank[model]["shapes"][0] == rank[model]["shapes"][1]  # as checks of weight updates see them
    # The ranks agree to the last bit, so they draw the same tokens.
    assert torch.equal(seen[0][model]["logits"][1], seen[1][model]["logits"][1])


@pytest.mark.parametrize("model", worker.MODELS)
def test_both_ranks_write_what_the_whole_model_writes(seen, model):
    tokens = seen[0][model]["whole_tokens"]
    assert len(set(tokens[:, 4:].flatten().tolist())) > 5
    for rank in seen:
        assert torch.equal(rank[model]["cut_tokens"], tokens)


def test_each_rank_holds_half_of_what_is_cut(seen):
    # Per layer: q 32 x 32, k and v 16 x 32 each, o 32 x 32, three of 24 x 32. Llama's head is 22 x 32; Qwen's is tied.
    cut_numbers = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 24 * 32)
    for rank in seen:
        whole, held = rank["llama"]["numbers_held"]
        assert whole - held == (cut_numbers + 22 * 32) // 2
        whole, held = rank["qwen"]["numbers_held"]
        assert whole - held == (cut_numbers + 2 * (32 + 2 * 16)) // 2  # and the biases of q, k and v
        assert (rank["llama"]["num_cut"], rank["qwen"]["num_cut"]) == (15, 14)


def test_an_update_reaches_every_piece_on_every_rank(seen):
    actor, critic, _ = worker.maker_models(30)
    whole = {("actor", name): tensor for name, tensor in actor.state_dict().items()}
    whole |= {("critic", name): tensor for name, tensor in critic.state_dict().items()}
    for rank, story in enumerate(seen):
        held = story["lock_step"]["held"]
        assert held.keys() == whole.keys()
        for key, (piece, dim) in held.items():
            # isinstance(...) and dim gives False for a weight that is whole.
            expected = whole[key] if dim is False else whole[key].chunk(2, dim=dim)[rank]
            assert torch.equal(piece, expected), key
        assert story["lock_step"]["version"] == 2


def test_the_leader_makes_the_experience_of_a_plain_maker_with_the_same_weights(seen):
    made = seen[0]["lock_step"]["made"]
    cut, plain = made["at 2"], made["plain"]
    assert torch.equal(cut.sequences, plain.sequences)
    assert torch.equal(cut.reward, plain.reward)  # the leader's own reward, not the followers' zeros
    assert plain.reward.min() > 0
    for name in ("action_log_probs", "values", "kl", "advantages"):
        torch.testing.assert_close(getattr(cut, name), getattr(plain, name), atol=1e-5, rtol=1e-4)
    assert set(cut.policy_versions.flatten().tolist()) == {2}


def test_an_update_that_comes_during_work_waits_on_all_ranks(seen):
    made = seen[0]["lock_step"]["made"]
    versions = {name: set(made[name].policy_versions.flatten().tolist()) for name in ("before 1", "at 1", "before 2")}
    assert versions == {"before 1": {0}, "at 1": {1}, "before 2": {1}}


def test_models_that_cannot_be_cut_say_why(seen):
    for rank in seen:
        assert "must divide the model's num_key_value_heads (1 in LlamaForCausalLM), got 2" in rank["errors"]["heads"]
        assert "must divide the vocabulary of LlamaForCausalLM (21), got 2" in rank["errors"]["vocabulary"]
        assert "must divide the model's intermediate_size (23" in rank["errors"]["width"]
        assert "also has packed_colwise" in rank["errors"]["style"]
        assert "LlamaForCausalLM has none" in rank["errors"]["plan"]


def test_ranks_that_write_different_tokens_stop_together(seen):
    for rank in seen:
        assert "wrote different tokens" in rank["different_tokens"]


def test_a_follower_does_not_wait_for_ever(seen):
    assert "rank 1 waited 0.1 s for its leader (rank 0)" in seen[1]["silent_leader"]


@pytest.mark.slow
def test_a_maker_of_two_actors_takes_weights_and_delivers(cluster, unique, keep, sinks):
    """Leader and follower as Ray actors: a real trainer's update, real deliveries, and the end of the leader."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = [unique("maker"), unique("follower")]
    meet = {"world_size": "2", "master_addr": "127.0.0.1", "master_port": str(port), "local_rank": "0"}
    settings = {"deadlines": ray_testing.QUICK, "num_threads": 1, "seed": 5}
    leader = keep(
        ExperienceMakerHolder.options(name=names[0], num_cpus=0).remote(
            list(sinks),
            ray_testing.strategy,
            functools.partial(ray_maker_models, 0),
            {**meet, "rank": "0"},
            sync_models_from_trainers=True,
            tensor_parallel=True,
            max_new_tokens=4,
            **settings,
        )
    )
    follower = keep(
        MakerFollower.options(name=names[1], num_cpus=0).remote(
            ray_testing.strategy, functools.partial(ray_maker_models, 0), {**meet, "rank": "1"}, **settings
        )
    )
    following = follower.follow.remote()
    new_actor, new_critic, _, _ = ray_maker_models(1)
    update = leader.update_experience_maker.remote(
        new_actor_state_dict=new_actor.state_dict(),
        new_critic_state_dict=new_critic.state_dict(),
        fully_update=True,
        chunk_start=True,
        chunk_end=True,
    )
    ray.get(update, timeout=ray_testing.PATIENCE)
    ray.get(leader.workingloop.remote(lambda: ray_testing.prompts(num_batches=2)), timeout=ray_testing.PATIENCE)
    delivered = sum(len(ids) for ids in ray.get([sink.sample_ids.remote() for sink in sinks.values()]))
    assert delivered == 8
    assert ray.get(leader.progress.remote(), timeout=ray_testing.PATIENCE).version == 1
    assert ray.get(follower.progress.remote(), timeout=ray_testing.PATIENCE) == 1
    ray.kill(leader)
    with pytest.raises(PeerDied, match=r"leader of this maker \(rank 0\) is gone"):
        ray.get(following, timeout=ray_testing.PATIENCE)


def ray_maker_models(seed):
    """Models with two key-value heads, so that they can be cut in two."""
    config = LlamaConfig(**{**ray_testing.tiny_llama(seed).config.to_dict(), "num_key_value_heads": 2})
    torch.manual_seed(seed)
    actor, critic, reference = (LlamaForCausalLM(config) for _ in range(3))
    return Actor(actor), Critic(critic), ray_testing.TokenReward(), Actor(reference)

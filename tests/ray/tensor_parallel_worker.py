"""One rank of the two in test_tensor_parallel.py: `python tensor_parallel_worker.py OUT_FOLDER`.

Each rank has the whole models beside the cut ones, and writes down how they compare.
"""

import copy
import dataclasses
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from coati.errors import ConfigError, DataError, DeadlineExceeded
from coati.experience_maker import NaiveExperienceMaker
from coati.experience_maker.lock_step import EndNotice, FollowingMaker, LeadingMaker, LockStep, NoReward, follow
from coati.models import Actor, Critic, action_logprobs
from coati.models.tensor_parallel import cut_model, local_part
from coati.rollout import GenerateOptions, ReferenceEngine, RolloutRequest
from coati.trainer.strategies import DDPStrategy
from coati.weights import WeightStage, new_header, weight_messages
from coati.weights.canary import make_canary
from coati.weights.mirrored import LeadingModels

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 22,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # strong opinions: a token drawn from wrong logits is a wrong token
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PROMPTS = torch.tensor([[0, 3, 4, 5], [6, 7, 8, 9], [0, 0, 10, 11]])
MASK = (PROMPTS != 0).long()
OPTIONS = {"max_new_tokens": 12}


def llama(seed, **changes):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "tie_word_embeddings": False, **changes})).eval()


def qwen(seed):
    """Biases in attention, and a head tied to the embeddings."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "tie_word_embeddings": True})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    return model


MODELS = {"llama": llama, "qwen": qwen}


def generate(model):
    request = RolloutRequest(
        input_ids=PROMPTS,
        attention_mask=MASK,
        sample_ids=torch.arange(3),
        seed=5,
        options=GenerateOptions.parse(**OPTIONS),
        max_new_tokens=12,
    )
    return ReferenceEngine(model).generate(request)


def compare(name, mesh):
    """A whole model and its cut copy on the same sequences, and on the same dice."""
    whole, cut = Actor(MODELS[name](0)), Actor(MODELS[name](0))
    num_cut = cut_model(cut, mesh)
    drawn = generate(whole)
    with torch.no_grad():
        pair = [action_logprobs(model, drawn.sequences, drawn.attention_mask, 8)[0] for model in (whole, cut)]
        values = [Critic(MODELS[name](1)) for _ in range(2)]
        nn.init.normal_(values[0].value_head.weight, generator=torch.Generator().manual_seed(2))
        values[1].value_head.load_state_dict(values[0].value_head.state_dict())
        cut_model(values[1], mesh)
        valued = [critic(drawn.sequences, drawn.attention_mask) for critic in values]
        logits = [model(drawn.sequences, drawn.attention_mask).logits for model in (whole, cut)]
    return {
        "num_cut": num_cut,
        "logprobs": pair,
        "values": valued,
        "logits": logits,
        "whole_tokens": drawn.sequences,
        "cut_tokens": generate(cut).sequences,
        "numbers_held": [sum(local_part(p).numel() for p in model.parameters()) for model in (whole, cut)],
        "names": [list(model.state_dict()) for model in (whole, cut)],
        "shapes": [[tuple(t.shape) for t in model.state_dict().values()] for model in (whole, cut)],
    }


def maker_models(seed):
    """Actor, critic and reference; the critic's head must not be zero, or its values would all agree."""
    critic = Critic(llama(seed + 1))
    nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(seed))
    return Actor(llama(seed)), critic, Actor(llama(9))


class CountTokens(nn.Module):
    """A reward that only the leader has."""

    def forward(self, sequences, attention_mask=None):
        return attention_mask.sum(dim=1).float()


def in_lock_step(rank, mesh):
    """Two versions of weights and an experience from each, on the leader; the follower's pieces at the end."""
    lock_step = LockStep(deadline_seconds=60)
    actor, critic, reference = maker_models(0)
    for model in (actor, critic, reference):
        cut_model(model, mesh)
    if rank == 1:
        maker = FollowingMaker(actor, critic, NoReward(), reference, lock_step=lock_step, seed=5)
        follow(maker)
        return {"held": pieces(maker), "version": maker.policy_version}
    maker = LeadingMaker(actor, critic, CountTokens(), reference, lock_step=lock_step, seed=5)
    served = LeadingModels(maker.trained_models, group=lock_step.group, announce=lock_step.say)
    stage = WeightStage(maker.trained_models, newest_weight=served.newest_weight)
    made = {}
    for version, seed in ((1, 20), (2, 30)):
        new_actor, new_critic, _ = maker_models(seed)
        header = new_header(version=version, source="trainer")
        shards = [("actor", new_actor.state_dict()), ("critic", new_critic.state_dict())]
        *chunks, manifest = weight_messages(header, shards)
        manifest = dataclasses.replace(manifest, canary=make_canary(new_actor))
        stage.begin(header.update_id, version=version, source="trainer")
        for chunk in chunks:
            stage.add_chunk(chunk)
        with served.use():  # somebody works: the update waits, here and on the follower
            assert not served.offer(stage.finish(manifest))
            maker.policy_version = served.version
            made[f"before {version}"] = maker.make_experience(PROMPTS, MASK, columns={"x": [1, 2, 3]}, **OPTIONS)
        with served.use() as now:
            maker.policy_version = now
            made[f"at {version}"] = maker.make_experience(PROMPTS, MASK, sample_ids=torch.arange(3), **OPTIONS)
    lock_step.say(EndNotice())
    plain = NaiveExperienceMaker(*maker_models(30)[:2], CountTokens(), maker_models(0)[2], seed=5)
    made["plain"] = plain.make_experience(PROMPTS, MASK, sample_ids=torch.arange(3), **OPTIONS)
    return {"made": made, "held": pieces(maker), "version": served.version}


def pieces(maker):
    return {
        (label, name): (local_part(tensor).clone(), isinstance(tensor, DTensor) and tensor.placements[0].dim)
        for label, module in maker.trained_models.items()
        for name, tensor in module.state_dict().items()
    }


def errors(mesh):
    """What models that cannot be cut say."""
    found = {}
    for name, changes in {
        "heads": {"num_key_value_heads": 1},
        "vocabulary": {"vocab_size": 21},
        "width": {"intermediate_size": 23},
    }.items():
        try:
            cut_model(llama(0, **changes), mesh)
        except ConfigError as error:
            found[name] = str(error)
    odd = llama(0)
    odd.config.base_model_tp_plan = {**odd.config.base_model_tp_plan, "layers.*.mlp.up_proj": "packed_colwise"}
    for name, model in {"style": odd, "plan": copy.deepcopy(odd)}.items():
        if name == "plan":
            model.config.base_model_tp_plan = None
        try:
            cut_model(model, mesh)
        except ConfigError as error:
            found[name] = str(error)
    return found


def different_tokens(rank, mesh):
    """Ranks that do not draw alike must not go on."""
    actor, critic, reference = maker_models(0)
    for model in (actor, critic, reference):
        cut_model(model, mesh)
    lock_step = LockStep(deadline_seconds=60)
    maker = FollowingMaker(actor, critic, NoReward(), reference, lock_step=lock_step, seed=rank)
    try:
        maker.make_experience(PROMPTS, MASK, max_new_tokens=1)
    except DataError as error:
        return str(error)
    return "nobody noticed"


def silent_leader(rank):
    """A follower does not wait for ever."""
    lock_step = LockStep(deadline_seconds=0.1)
    if rank == 0:
        return ""
    try:
        lock_step._count = 1_000_000
        lock_step.hear()
    except DeadlineExceeded as error:
        return str(error)
    return "heard something"


def main(out):
    torch.set_num_threads(1)
    strategy = DDPStrategy(device="cpu", timeout_seconds=180)
    mesh = init_device_mesh("cpu", (2,))
    seen = {name: compare(name, mesh) for name in MODELS}
    seen["lock_step"] = in_lock_step(strategy.rank, mesh)
    seen["errors"] = errors(mesh)
    seen["different_tokens"] = different_tokens(strategy.rank, mesh)
    seen["silent_leader"] = silent_leader(strategy.rank)
    torch.save(seen, out / f"rank{strategy.rank}.pt")
    strategy.barrier(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

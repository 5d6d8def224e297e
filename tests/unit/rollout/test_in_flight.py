"""Weight updates between two tokens: earlier tokens stay, and every token has the version that generated it."""

import copy

import pytest
import torch
from tiny import samples_of
from transformers import LlamaConfig

from coati.experience_maker import NaiveExperienceMaker
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.models import Actor, Critic, RewardModel
from coati.prompts.batch import parse_prompts
from coati.rollout import GenerateOptions, ReferenceEngine
from coati.rollout import generate as generate_with
from coati.weights.served import ServedModels, VerifiedUpdate

CONFIG = LlamaConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=20,
    max_position_embeddings=32,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)
PROMPTS = torch.randint(1, 20, (3, 4), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def actors():
    torch.manual_seed(0)
    old = Actor.from_config(CONFIG).eval()
    torch.manual_seed(1)
    return old, Actor.from_config(CONFIG).eval()


def generate(actor, **kwargs):
    request = samples_of(
        input_ids=PROMPTS,
        attention_mask=torch.ones_like(PROMPTS),
        sample_ids=torch.arange(3),
        seed=0,
        options=GenerateOptions.parse(max_new_tokens=8),
        max_new_tokens=8,
    )
    return generate_with(ReferenceEngine(actor), request, **kwargs)


def switch_after(actor, new, num_tokens, version):
    """Return a commit point that loads the new weights after `num_tokens` tokens."""
    state = {"tokens": 0}

    def between_tokens():
        state["tokens"] += 1
        if state["tokens"] == num_tokens:
            actor.load_state_dict(new.state_dict())
        return version + (state["tokens"] >= num_tokens)

    return between_tokens


def test_tokens_before_the_update_are_from_the_old_weights(actors):
    old, new = actors
    of_old = generate(copy.deepcopy(old))
    actor = copy.deepcopy(old)
    mixed = generate(actor, version=6, between_tokens=switch_after(actor, new, 3, 6))
    assert torch.equal(mixed.sequences[:, :7], of_old.sequences[:, :7])
    assert torch.equal(mixed.action_log_probs[:, :3], of_old.action_log_probs[:, :3])
    assert mixed.policy_versions.tolist() == [[6, 6, 6, 7, 7, 7, 7, 7]] * 3
    assert not torch.equal(mixed.action_log_probs[:, 3:], of_old.action_log_probs[:, 3:])


def test_without_an_update_all_tokens_have_one_version(actors):
    assert generate(actors[0], version=4).policy_versions.eq(4).all()


def update_to(actor, version):
    tensors = {("actor", name): tensor for name, tensor in actor.state_dict().items()}
    return VerifiedUpdate(version=version, tensors=tensors, is_full=False)


@pytest.fixture
def pipeline(actors):
    def build(in_flight, offer_after=3):
        old, new = actors
        actor = copy.deepcopy(old)
        served = ServedModels({"actor": actor})
        maker = NaiveExperienceMaker(actor, Critic.from_config(CONFIG), RewardModel.from_config(CONFIG), old)
        pipeline = ExperiencePipeline(
            maker, served, generate_kwargs={"max_new_tokens": 8}, commit_between_tokens=in_flight
        )
        # Offer the update from inside the forward pass of the third token, the most dangerous interleaving.
        count = {"steps": 0}

        def forward(*args, **kwargs):
            count["steps"] += 1
            if count["steps"] == offer_after:
                served.offer(update_to(new, 1))
            return original(*args, **kwargs)

        original = actor.model.forward
        actor.model.forward = forward
        return pipeline

    return build


BATCH = parse_prompts(PROMPTS)


def test_in_flight_updates_apply_from_the_next_token(pipeline):
    running = pipeline(in_flight=True)
    made = running.finish_batch(running.make_batch(BATCH))
    # The update is offered during the forward pass of the third token. That token is drawn, then the weights change.
    assert made.policy_versions.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]] * 3


def test_between_batches_an_update_waits_for_the_batch(pipeline):
    running = pipeline(in_flight=False)
    made = running.finish_batch(running.make_batch(BATCH))
    assert made.policy_versions.eq(0).all()
    assert running.served.version == 1


def test_no_update_is_committed_while_others_use_the_models(actors):
    old, new = actors
    served = ServedModels({"actor": copy.deepcopy(old)})
    with served.use():
        with served.use():
            served.offer(update_to(new, 1))
        assert served.version == 0
    assert served.version == 1

"""Actor, Critic and RewardModel: any body, any padding, and save and load without change."""

import doctest
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2ForSequenceClassification,
    LlamaForSequenceClassification,
)

import coati.models.actor
import coati.models.calls
from coati.errors import CheckpointError, ConfigError
from coati.models import Actor, Critic, LoRASettings, RewardModel, action_logprobs, as_critic
from coati.models.actor import unwrap
from coati.models.calls import context_length_of, last_real_position
from coati.models.memory import shapes_only, tied_names
from coati.models.value_head import HEAD_FILE

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])


def left_padded(ids, num_padding, token=1):
    """Pad rows on the left with `num_padding` columns of a token that must not matter."""
    width = (ids.shape[0], num_padding)
    padded = torch.cat([torch.full(width, token), ids], dim=1)
    return padded, torch.cat([torch.zeros(width, dtype=torch.long), torch.ones_like(ids)], dim=1)


def randomise_head(model):
    nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(5))
    return model


def assert_close(left, right):
    torch.testing.assert_close(left, right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("module", [coati.models.actor, coati.models.calls])
def test_docstring_examples_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# The policy


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_actors_from_config_path_and_model_are_equivalent(request, family, tmp_path):
    model = request.getfixturevalue(family)()
    wrapped = Actor(model)
    wrapped.save_pretrained(tmp_path)
    expected = model(IDS).logits
    assert torch.equal(wrapped(IDS).logits, expected)
    assert_close(Actor.from_pretrained(tmp_path)(IDS).logits, expected)
    fresh = Actor.from_config(model.config)
    assert fresh(IDS).logits.shape == expected.shape
    assert {name: value.shape for name, value in fresh.state_dict().items()} == {
        name: value.shape for name, value in wrapped.state_dict().items()
    }
    assert Actor.from_config(tmp_path).config.vocab_size == 11


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("with_state_dict", [False, True])
def test_transformers_loads_what_an_actor_saves(request, family, tmp_path, with_state_dict):
    actor = Actor(request.getfixturevalue(family)())
    actor.save_pretrained(tmp_path, **({"state_dict": actor.state_dict()} if with_state_dict else {}))
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(loaded(IDS).logits, actor(IDS).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("num_padding", [1, 5])
def test_left_padding_does_not_matter(request, family, num_padding):
    model = request.getfixturevalue(family)(num_hidden_layers=2)
    padded, mask = left_padded(IDS, num_padding)
    expected = Actor(model)(IDS, torch.ones_like(IDS)).logits
    assert_close(Actor(model)(padded, mask).logits[:, num_padding:], expected)
    critic, reward_model = randomise_head(Critic(model)), randomise_head(RewardModel(model))
    assert_close(critic(padded, mask)[:, num_padding:], critic(IDS))
    assert_close(reward_model(padded, mask), reward_model(IDS))


def test_without_position_ids_left_padding_would_matter(gpt2):
    # The control of the test above: learned positions shift unless positions count real tokens only.
    model = gpt2()
    padded, mask = left_padded(IDS, 5)
    shifted = model(padded, attention_mask=mask).logits[:, 5:]
    assert (shifted - model(IDS).logits).abs().max() > 0.1


class Wrapper(nn.Module):
    """Looks like DistributedDataParallel from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class HandWritten(nn.Module):
    """A policy that is not a transformers model and has different argument names."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, tokens, mask):
        return self.inner(input_ids=tokens, attention_mask=mask).logits


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("wrap", [lambda model: model, Actor, Wrapper, lambda model: Wrapper(Actor(model))])
def test_action_logprobs_are_the_full_log_softmax_at_the_tokens(request, family, temperature, wrap):
    model = request.getfixturevalue(family)(num_hidden_layers=2)
    padded, mask = left_padded(IDS, 2)
    scale = temperature or 1.0
    expected = torch.log_softmax(model(IDS).logits.double() / scale, dim=-1)
    tokens = expected[:, 0:3].gather(-1, IDS[:, 1:4].unsqueeze(-1)).squeeze(-1)
    entropy = -(expected.exp() * expected).sum(-1)[:, 0:3]
    logprobs, entropies = action_logprobs(
        wrap(model),
        padded,
        mask,
        3,
        temperatures=None if temperature is None else torch.full((2,), temperature),
        with_entropy=True,
    )
    assert_close(logprobs.double(), tokens)
    assert_close(entropies.double(), entropy)


def test_action_logprobs_of_a_model_with_adapters_ignore_left_padding(gpt2):
    model = gpt2()
    padded, mask = left_padded(IDS, 3)
    expected, _ = action_logprobs(model, IDS, None, 2)
    expected = expected.detach()
    with_adapters = Actor(model, lora=LoRASettings(rank=2, target_modules=("c_attn",)))
    for wrapped in (with_adapters, with_adapters.model):
        assert_close(action_logprobs(wrapped, padded, mask, 2)[0].detach(), expected)


def test_action_logprobs_accept_a_custom_policy_that_returns_logits(llama):
    model = llama()
    expected, none = action_logprobs(model, IDS, None, 2)
    assert none is None
    assert_close(action_logprobs(HandWritten(model), IDS, None, 2)[0], expected)


def test_no_actions_have_no_logprobs(llama):
    logprobs, entropy = action_logprobs(llama(), IDS, None, 0, with_entropy=True)
    assert logprobs.shape == entropy.shape == (2, 0)
    assert action_logprobs(llama(), IDS, None, 0)[1] is None


def test_action_logprobs_carry_gradients_to_the_weights(llama):
    actor = Actor(llama())
    action_logprobs(actor, IDS, None, 2)[0].sum().backward()
    assert actor.model.lm_head.weight.grad.abs().sum() > 0


def test_an_actor_generates_like_its_model(llama):
    model = llama()
    kwargs = {"do_sample": False, "max_new_tokens": 3}
    assert torch.equal(Actor(model).generate(IDS, **kwargs), model.generate(IDS, **kwargs))


def test_unwrap_finds_the_model_in_any_wrapping(llama):
    model = llama()
    for wrapped in (model, Actor(model), Wrapper(Actor(model)), Wrapper(model)):
        assert unwrap(wrapped) is model


def test_context_length_is_read_from_the_config(llama, gpt2):
    assert context_length_of(llama(max_position_embeddings=48)) == 48
    assert context_length_of(gpt2(n_positions=24)) == 24
    assert context_length_of(nn.Linear(1, 1)) is None
    assert context_length_of(SimpleNamespace(config=SimpleNamespace(hidden_size=16))) is None


# Values and rewards


@pytest.mark.parametrize("kind", [Critic, RewardModel])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_new_head_starts_at_zero_on_causal_lm_and_bare_body(request, kind, family):
    model = request.getfixturevalue(family)()
    shape = (2, 4) if kind is Critic else (2,)
    for source in (model, model.base_model):
        values = kind(source)(IDS)
        assert values.shape == shape
        assert not values.any()
    assert kind.from_config(model.config)(IDS).shape == shape


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_classification_model_keeps_its_head(request, family):
    config = request.getfixturevalue(family)(num_labels=1).config
    torch.manual_seed(3)
    kind = LlamaForSequenceClassification if family == "llama" else GPT2ForSequenceClassification
    model = kind(config).eval()
    expected = model(IDS, attention_mask=torch.ones_like(IDS)).logits.squeeze(-1)  # transformers' own score
    assert expected.abs().min() > 0
    padded, mask = left_padded(IDS, 2)
    assert_close(RewardModel(model)(padded, mask), expected)
    assert_close(Critic(model)(IDS)[:, -1], expected)


def test_a_reward_is_read_at_the_last_real_token(llama):
    # rows of 4 and 2 real tokens, padded on the right with garbage
    reward_model = randomise_head(RewardModel(llama()))
    ids, mask = IDS.clone(), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert last_real_position(mask).tolist() == [3, 1]
    values = reward_model.token_values(ids)
    assert_close(reward_model(ids, mask), torch.stack([values[0, 3], values[1, 1]]))
    ids[1, 2:] = 1
    assert_close(reward_model(ids, mask), torch.stack([values[0, 3], values[1, 1]]))


def test_rewards_of_a_large_batch_are_computed_in_parts(llama, monkeypatch):
    reward_model = randomise_head(RewardModel(llama()))
    ids, mask = IDS.repeat(3, 1), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).repeat(3, 1)
    whole = reward_model(ids, mask).detach()
    calls = []
    reward_model.body.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    monkeypatch.setattr("coati.models.value_head.SCORED_TOKENS", 6)
    with torch.no_grad():
        assert_close(reward_model(ids, mask), whole)
    assert calls == [6, 6, 6]
    calls.clear()
    assert reward_model(ids, mask).requires_grad
    assert calls == [18]


@pytest.mark.parametrize("kind", [Critic, RewardModel])
def test_two_labels_are_rejected(kind, llama_config, tmp_path):
    model = LlamaForSequenceClassification(llama_config(num_labels=2))
    with pytest.raises(ConfigError, match="needs one label, but LlamaForSequenceClassification has 2"):
        kind(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="num_labels=1"):
        kind.from_pretrained(tmp_path)


def test_other_modules_are_rejected_with_a_hint():
    with pytest.raises(ConfigError, match="needs a transformers model, got Linear"):
        Critic(nn.Linear(1, 1))


@pytest.mark.parametrize("kind", [Critic, RewardModel])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("with_state_dict", [False, True])
def test_body_and_head_survive_a_round_trip(request, kind, family, tmp_path, with_state_dict):
    model = randomise_head(kind(request.getfixturevalue(family)())).eval()
    model.save_pretrained(tmp_path, **({"state_dict": model.state_dict()} if with_state_dict else {}))
    loaded = kind.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(IDS), model(IDS))
    assert loaded(IDS).abs().min() > 0
    saved, restored = model.state_dict(), loaded.state_dict()
    assert saved.keys() == restored.keys()
    assert all(torch.equal(saved[name], restored[name]) for name in saved)


def test_a_saved_classification_model_loads_with_its_head(llama_config, tmp_path):
    torch.manual_seed(3)
    LlamaForSequenceClassification(llama_config(num_labels=1)).save_pretrained(tmp_path)
    expected = AutoModelForSequenceClassification.from_pretrained(tmp_path)(IDS).logits.squeeze(-1)
    assert_close(RewardModel.from_pretrained(tmp_path)(IDS), expected)


def test_a_saved_causal_lm_loads_as_a_critic_with_a_new_head(llama, tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    critic = Critic.from_pretrained(tmp_path)
    assert not critic(IDS).any()
    body = critic.body.state_dict()
    assert all(torch.equal(body[name], value) for name, value in model.model.state_dict().items())
    assert Critic.from_config(tmp_path).config.hidden_size == 16


def test_a_head_of_another_size_is_a_checkpoint_error(llama, tmp_path):
    Critic(llama()).save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(1, 3)}, tmp_path / HEAD_FILE)
    with pytest.raises(CheckpointError, match=HEAD_FILE):
        Critic.from_pretrained(tmp_path)


def test_a_critic_with_adapters_trains_adapters_and_head_only(llama):
    critic = Critic(llama(), lora=LoRASettings(rank=2))
    trainable = {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert "value_head.weight" in trainable
    assert all("lora_" in name or name == "value_head.weight" for name in trainable)
    padded, mask = left_padded(IDS, 2)
    assert_close(randomise_head(critic)(padded, mask)[:, 2:], critic(IDS))


def test_as_critic_wraps_only_transformers_models(llama):
    critic = Critic(llama())
    assert as_critic(critic) is critic
    assert isinstance(as_critic(llama()), Critic)
    hand_written = nn.Linear(1, 1)
    assert as_critic(hand_written) is hand_written


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_values_are_at_least_float32(llama, dtype, expected):
    assert Critic(llama().to(dtype))(IDS).dtype == expected


def test_models_of_one_config_do_not_change_each_other(llama_config):
    config = llama_config()
    before = config.to_dict()
    halves = [made.from_config(config, dtype=torch.bfloat16) for made in (Actor, Critic)]
    assert all(parameter.dtype == torch.bfloat16 for model in halves for parameter in model.parameters())
    assert next(Actor.from_config(config).parameters()).dtype == torch.float32
    assert config.to_dict() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="models go to the GPU, which is a copy")
@pytest.mark.parametrize("made", [Actor, Critic])
def test_a_loaded_model_does_not_change_with_its_file(llama, tmp_path, made):
    made(llama()).save_pretrained(tmp_path)
    loaded = made.from_pretrained(tmp_path)
    before = [parameter.detach().clone() for parameter in loaded.parameters()]
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:  # in place, like cp and rsync --inplace
        handle.seek(-512, 2)
        handle.write(bytes(512))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(loaded.parameters(), before, strict=True))


def layout_of(model):
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in named}


@pytest.mark.parametrize("lora", [None, LoRASettings(rank=2)], ids=["whole", "lora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("made", [Actor, Critic])
def test_empty_models_have_the_layout_of_loaded_ones(request, tmp_path, made, family, lora):
    made(request.getfixturevalue(family)(tie_word_embeddings=True).bfloat16()).save_pretrained(tmp_path)
    with shapes_only():
        empty, asked = made.from_pretrained(tmp_path, lora=lora), made.from_config(tmp_path, dtype=torch.float16)
        loaded = made.from_pretrained(tmp_path, lora=lora, revision="main")  # not an option of a config
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert not any(tensor.is_meta for tensor in loaded.parameters())
    assert layout_of(empty) == layout_of(loaded) == layout_of(made.from_pretrained(tmp_path, lora=lora))
    assert tied_names(empty) == tied_names(loaded)
    assert {parameter.dtype for parameter in asked.parameters()} == {torch.float16}
    assert not any(tensor.is_meta for tensor in made.from_config(tmp_path).parameters())

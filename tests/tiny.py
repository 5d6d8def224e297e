"""Models, samples and prompts small enough for any test, made in one place.

    from tiny import llama, actor_and_critic, items, prompts
    model = llama(seed=0, num_hidden_layers=2)

Every model is seeded; keyword arguments change its configuration. Tests of Ray send these functions to their workers
by value (tests/ray/conftest.py), so imports of transformers stay inside.
"""

import copy
import json

import torch
from torch import nn

from coati.batching import make_experience_batch
from coati.experience import BufferItem, Sample
from coati.models import Actor, Critic
from coati.models.lora import has_adapters

PAD, EOS, VOCAB = 0, 1, 20


def llama_config(**changes):
    """One layer, 16 dimensions, 20 tokens."""
    from transformers import LlamaConfig

    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    return LlamaConfig(**{**settings, **changes})


def gpt2_config(**changes):
    from transformers import GPT2Config

    settings = {
        "vocab_size": VOCAB,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    return GPT2Config(**{**settings, **changes})


class Prototypes(dict):
    """Models that were made before, which are faster to copy than to make again; a Ray worker starts without any."""

    def __reduce__(self):
        return Prototypes, ()


PROTOTYPES = Prototypes()


def make_seeded(make, seed, changes):
    """Return a copy of what `make` makes after seeding, with torch's random state as making it leaves it."""
    key = make, seed, repr(sorted(changes.items())), torch.get_default_dtype(), torch.get_default_device()
    torch.manual_seed(seed)
    if key not in PROTOTYPES:
        PROTOTYPES[key] = make(**changes).eval(), torch.get_rng_state()
    prototype, random_state = PROTOTYPES[key]
    torch.set_rng_state(random_state)
    # Most of a module are empty dicts, of hooks, which `deepcopy` is slow to rebuild.
    dicts = (each for module in prototype.modules() for each in vars(module).values() if isinstance(each, dict))
    return copy.deepcopy(prototype, {id(each): type(each)() for each in dicts if not each})


def make_llama(**changes):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(llama_config(**changes))


def make_gpt2(**changes):
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(gpt2_config(**changes))


def llama(seed=0, **changes):
    return make_seeded(make_llama, seed, changes)


def gpt2(seed=0, **changes):
    return make_seeded(make_gpt2, seed, changes)


SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
PLACES = {"max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
GROUPS = {"intermediate_size": 24, "num_key_value_heads": 2, "initializer_range": 0.4}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ARCHITECTURES = {
    "gpt2": ("gpt2", {"initializer_range": 0.4, "n_inner": 24}),
    "opt": ("opt", {"init_std": 0.4, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "gemma": ("gemma", {**GROUPS, "head_dim": 8}),
    "gemma3": (
        "gemma3_text",
        {
            **GROUPS,
            "head_dim": 8,
            "query_pre_attn_scalar": 6,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": {**ROPE, "rope_theta": 1e6}, "sliding_attention": ROPE},
        },
    ),
    "phi": ("phi", {**GROUPS, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "phi3": ("phi3", {**GROUPS, "sliding_window": 4}),
}
"""Decoders that differ from Llama: their `model_type`, and what its config gets beyond sizes."""


def decoder(name, seed=0, **changes):
    """One of `ARCHITECTURES`, or of another `model_type`, with norms and biases that have something to say."""
    return make_seeded(make_decoder, seed, {"name": name, **changes})


def make_decoder(name, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = ARCHITECTURES.get(name, (name, {}))
    config = AutoConfig.for_model(kind, **{**SIZES, **PLACES, **settings, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def copy_without_adapters(model):
    """A copy of a transformers model as it was before it got adapters."""
    duplicate = copy.deepcopy(model)
    return duplicate.unload() if hasattr(duplicate, "unload") else duplicate


def adapters_of(model):
    """The adapters in a model's state dict."""
    return {name: tensor for name, tensor in model.state_dict().items() if has_adapters([name])}


def actor_and_critic(seed=0, **changes):
    """What a trainer's `model_fn` returns."""
    return Actor(llama(seed, **changes)), Critic(llama(seed + 1, **changes))


def save_words(folder):
    """Write what a run reads: `model`, which knows eight words, with its tokenizer, and `prompts.jsonl`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", *"abcdefgh"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder / "model")
    model = llama(
        vocab_size=len(tokens),
        hidden_size=8,
        num_attention_heads=1,
        max_position_embeddings=16,
        bos_token_id=1,
        eos_token_id=2,
    )
    model.save_pretrained(folder / "model")
    prompts = ["a b", "b", "d e f", "g h", "a"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))


class TokenReward(nn.Module):
    """Scores the share of token 7 in a sequence."""

    def forward(self, sequences, attention_mask=None):
        return (sequences == 7).float().mean(dim=1)


def maker_models(seed=0, reward=None, **changes):
    """What a maker's `model_fn` returns: actor, critic, reward model, initial model."""
    actor, critic = actor_and_critic(seed, **changes)
    return actor, critic, reward or TokenReward(), Actor(llama(seed, **changes))


def prompts(num_batches=1, batch_size=4, first=2):
    """Batches of prompts of three tokens."""
    return [
        torch.arange(batch * batch_size, (batch + 1) * batch_size)[:, None].remainder(VOCAB - 4)
        + torch.tensor([[first, first + 1, first]])
        for batch in range(num_batches)
    ]


def item(sample_id, *, num_prompt=2, num_actions=3):
    """A sample whose every value tells which sample it is."""
    generator = torch.Generator().manual_seed(sample_id)
    floats = [torch.randn(num_actions, generator=generator) for _ in range(4)]
    length = num_prompt + num_actions
    return BufferItem(
        sequences=torch.randint(2, VOCAB, (length,), generator=generator),
        action_log_probs=floats[0],
        values=floats[1],
        reward=torch.tensor(float(sample_id)),
        kl=floats[2],
        advantages=floats[3],
        attention_mask=torch.ones(length, dtype=torch.long),
        action_mask=torch.ones(num_actions, dtype=torch.bool),
        sample_ids=torch.tensor(sample_id),
    )


def items(first, count):
    """Samples with ids from `first` on."""
    return [item(first + index) for index in range(count)]


def experience(first, count):
    """A batch of these samples."""
    return make_experience_batch(items(first, count))


class NumberStream:
    """Prompts that are looked up by the numbers of leases, as in a `PromptStream`; some cannot be used."""

    def __init__(self, samples_per_batch, *, unusable=()):
        self.samples_per_batch, self.unusable = samples_per_batch, set(unusable)

    def batch(self, numbers, *, group_size=1):
        bad = {number: "too long" for number in numbers if number in self.unusable}
        ids = [number * group_size + index for number in numbers if number not in bad for index in range(group_size)]
        return [Sample(one, [3, 3]) for one in ids], bad


def ask(reward, request):
    """What a scorer makes of a reward for a request: its scores and all that it says; a failure is raised."""
    from coati.rewards import PendingScores, RewardScorer

    pending = PendingScores(RewardScorer(reward, None), request, torch.device("cpu"))
    pending.values = pending()
    return pending


def samples_of(input_ids, attention_mask, sample_ids, seed, options, max_new_tokens, **fields):
    """Samples for an engine, from padded prompts; the limit is one number, or one for each."""
    limits = torch.as_tensor(max_new_tokens).expand(len(input_ids)).tolist()
    rows = zip(sample_ids.tolist(), input_ids, attention_mask.bool(), limits, strict=True)
    return [Sample(one, row[mask].tolist(), limit, seed, options, **fields) for one, row, mask, limit in rows]

"""`rollout.batch_invariant`: a sample's tokens, log-probs and scores have the same bits alone and beside others."""

import pytest
import torch
from tiny import samples_of
from transformers import Qwen2Config, Qwen2ForCausalLM

from coati.models import Actor, Critic, action_logprobs, action_values
from coati.models.tiles import set_batch_invariant
from coati.rollout import GenerateOptions, NativeEngine, generate

# As wide as a model of 0.5B, so that libraries choose among their kernels as they do for one.
SHAPE = {
    "vocab_size": 50_000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 3,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
}
ROWS, SLOTS = 150, 96


def make_model():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval().to("cuda", torch.bfloat16)


def make_request():
    """Prompts of 5 to 900 tokens, a few of them twice; responses end at all lengths up to 200."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(5, 900, (ROWS,), generator=generator).tolist()
    ids = torch.randint(100, 50_000, (ROWS, 900), generator=generator)
    ids[7], lengths[7] = ids[6], lengths[6]
    mask = torch.arange(900).expand(ROWS, -1) >= 900 - torch.tensor(lengths).unsqueeze(1)
    options = GenerateOptions.parse(eos_token_id=list(range(100, 900)), pad_token_id=0)
    sample_ids = torch.arange(ROWS) + 40
    return samples_of(
        input_ids=ids, attention_mask=mask.long(), sample_ids=sample_ids, seed=1, options=options, max_new_tokens=200
    )


def written(model, requests):
    """Tokens and log-probs of each sample, generated request by request."""
    engine = NativeEngine(model, num_slots=SLOTS)
    found = {}
    for request in requests:
        rollout = generate(engine, request)
        first = rollout.num_prompt_tokens
        for row, one in enumerate(rollout.sample_ids.tolist()):
            count = int(rollout.action_mask[row].sum())
            tokens = rollout.sequences[row, first : first + count]
            found[one] = tokens.tolist(), rollout.action_log_probs[row, :count].tolist()
    return found


def in_companies(request):
    """The same samples all at once, in the opposite order in small groups, and some alone."""
    groups = [request[start : start + 13] for start in range(0, ROWS, 13)]
    return [request], [list(reversed(group)) for group in reversed(groups)], [[one] for one in request[::29]]


def num_different(model):
    together, *others = [written(model, company) for company in in_companies(make_request())]
    return sum(together[one] != other[one] for other in others for one in other)


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "lora"])
def test_an_engine_writes_a_sample_the_same_beside_any_others(adapters):
    model = make_model()
    if adapters:
        from coati.config import LoRASettings

        model = Actor(model, lora=LoRASettings(rank=8))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    if not adapters:
        assert num_different(model) > 0  # else there is nothing to be shown
    set_batch_invariant(model)
    assert num_different(model) == 0


def scores(policy, critic, rows):
    width = max(map(len, rows))
    sequences = torch.tensor([row + [0] * (width - len(row)) for row in rows], device="cuda")
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device="cuda")
    with torch.no_grad():
        logprobs, _ = action_logprobs(
            policy, sequences, mask, width - 1, temperatures=torch.ones(len(rows), device="cuda")
        )
        values = action_values(critic, sequences, mask, width - 1)
    return {
        tuple(row): (logprobs[index, : len(row) - 1].tolist(), values[index, : len(row) - 1].tolist())
        for index, row in enumerate(rows)
    }


def test_models_score_a_sample_the_same_beside_any_others():
    policy, critic = Actor(make_model()), Critic(make_model())
    torch.nn.init.normal_(critic.value_head.weight)
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 400, (60,), generator=generator).tolist()
    rows = [torch.randint(100, 50_000, (length,), generator=generator).tolist() for length in lengths]
    rows[1] = rows[0][:60] + rows[1]  # a beginning in common
    for model in (policy, critic):
        set_batch_invariant(model)
    together = scores(policy, critic, rows)
    for company in ([rows[0]], [rows[1]], rows[5:8], list(reversed(rows[20:50]))):
        for row, found in scores(policy, critic, company).items():
            assert found == together[row]

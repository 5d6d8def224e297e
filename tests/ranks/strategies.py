"""One of two ranks: runs every strategy through the same steps and records the results for comparison with torch."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from coati.errors import CheckpointError
from coati.trainer.optim import HybridAdam
from coati.trainer.strategies import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy

STRATEGIES = {
    "ddp": lambda: DDPStrategy(device="cpu", timeout_seconds=180),
    "zero1": lambda: LowLevelZeroStrategy(stage=1, device="cpu", timeout_seconds=180),
    "zero2": lambda: LowLevelZeroStrategy(device="cpu", timeout_seconds=180),
    "gemini": lambda: GeminiStrategy(device="cpu", timeout_seconds=180),
}
ROWS_OF_RANK = {0: slice(0, 1), 1: slice(1, 4)}  # one row and three
MAX_NORM = 0.5
NUM_STEPS = 3


def tiny_llama(seed):
    """A model whose input and output embeddings are tied, unlike those of the learner's models."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).double()


def make_optimizer(model):
    weights = [p for p in model.parameters() if p.ndim > 1]
    scales = [p for p in model.parameters() if p.ndim <= 1]
    return HybridAdam([{"params": weights, "weight_decay": 0.1}, {"params": scales, "lr": 3e-2}], lr=1e-2)


def batch(step):
    """Return ids and mask of the joined batch, [4, 7]; the rows have very different numbers of tokens."""
    ids = torch.randint(0, 23, (4, 7), generator=torch.Generator().manual_seed(step))
    lengths = torch.tensor([7, 2, 3, 5])
    return ids, torch.arange(7)[None] < lengths[:, None]


def loss_of(model, step, rows, num_tokens):
    ids, mask = (tensor[rows] for tensor in batch(step))
    logits = model(input_ids=ids, attention_mask=mask.long()).logits[:, :-1]  # [B, S - 1, V]
    nll = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")  # [B, S - 1]
    return (nll * mask[:, 1:]).sum() / num_tokens


def global_tokens(strategy, step, rows):
    return strategy.all_reduce_sum(batch(step)[1][rows][:, 1:].sum())


def state_of(strategy, model):
    chunks = strategy.get_model_state_dict_shard(model, shard_size=1 / 512)
    return {name: tensor.clone() for chunk in chunks for name, tensor in chunk.items()}


def whole_grads(strategy, model):
    grads = {name: p.grad for name, p in strategy.unwrap_model(model).named_parameters()}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in grads.items()}


def one_step(strategy, model, optimizer, step):
    rows = ROWS_OF_RANK[strategy.rank]
    optimizer.zero_grad()
    loss = loss_of(model, step, rows, global_tokens(strategy, step, rows))
    strategy.backward(loss, model, optimizer)
    grads = whole_grads(strategy, model) if step == 0 else None
    norm = strategy.clip_grad_norm(model, MAX_NORM)
    strategy.optimizer_step(optimizer)
    return grads, norm


def accumulated_grads(strategy, model, optimizer):
    """Compute a gradient over two micro-batches: each rank's rows of step 0, then its rows of step 1."""
    rows = ROWS_OF_RANK[strategy.rank]
    tokens = [global_tokens(strategy, step, rows) for step in (0, 1)]
    optimizer.zero_grad()
    with strategy.no_sync(model):
        strategy.backward(loss_of(model, 0, rows, sum(tokens)), model, optimizer)
    strategy.backward(loss_of(model, 1, rows, sum(tokens)), model, optimizer)
    return whole_grads(strategy, model)


def train_and_save(name, out):
    strategy = STRATEGIES[name]()
    # Ranks start with different weights; prepare must use rank 0's.
    model = tiny_llama(100 + strategy.rank)
    model, optimizer = strategy.prepare((model, make_optimizer(model)))
    seen = {"accumulated": accumulated_grads(strategy, model, optimizer), "norms": []}
    for step in range(NUM_STEPS):
        grads, norm = one_step(strategy, model, optimizer, step)
        seen["grads"] = grads or seen["grads"]
        seen["norms"].append(norm)
    seen["state"] = state_of(strategy, model)
    seen["num_states"] = len(optimizer.state)
    seen["wrapped"] = isinstance(model, DistributedDataParallel)
    seen["local_numel"] = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    strategy.save_model(model, out / f"model-{name}")
    strategy.save_optimizer(optimizer, out / f"optimizer-{name}", only_rank0=True)
    return seen


def resume(name, saved_by, out):
    strategy = STRATEGIES[name]()
    model = tiny_llama(7)
    model, optimizer = strategy.prepare((model, make_optimizer(model)))
    strategy.load_model(model, out / f"model-{saved_by}")
    strategy.load_optimizer(optimizer, out / f"optimizer-{saved_by}")
    for step in (NUM_STEPS, NUM_STEPS + 1):
        one_step(strategy, model, optimizer, step)
    return state_of(strategy, model)


def save_where_one_may_not(strategy, out):
    """Save to a foreign folder, which only rank 0 sees; both ranks must raise."""
    try:
        strategy.save_model(nn.Linear(1, 1), out / "foreign")
    except CheckpointError as error:
        return str(error)
    return ""


def load_what_rank1_does_not_have(strategy, out):
    """Load files that only rank 0 has; both ranks must raise and load nothing."""
    model = tiny_llama(7)
    optimizer, before = make_optimizer(model), model.lm_head.weight.detach().clone()
    heard = []
    for load, what, name in ((strategy.load_model, model, "model"), (strategy.load_optimizer, optimizer, "optimizer")):
        try:
            load(what, out / (f"{name}-ddp" if strategy.rank == 0 else "nowhere"))
        except CheckpointError as error:
            heard.append(str(error))
    return heard, torch.equal(model.lm_head.weight, before) and not optimizer.state


def main(out):
    seen = {}
    for name in STRATEGIES:
        seen[name] = train_and_save(name, out)
    names = list(STRATEGIES)
    for name, saved_by in zip(names, names[1:] + names[:1], strict=True):
        seen[f"resumed-{name}"] = resume(name, saved_by, out)
    strategy = DDPStrategy(device="cpu", timeout_seconds=180)
    lone = nn.Linear(1, 1)
    seen["lone_is_wrapped"] = strategy.prepare(lone) is not lone
    seen["foreign"] = save_where_one_may_not(strategy, out)
    seen["missing"] = load_what_rank1_does_not_have(strategy, out)
    torch.save(seen, out / f"rank{strategy.rank}.pt")

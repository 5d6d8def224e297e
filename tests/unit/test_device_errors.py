"""Device errors become coati errors that name the work, its size and the remedy."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import llama, maker_models, prompts
from torch import nn
from weight_testing import PlainStrategy, make_sender

from coati import build
from coati.actors.trainer import Trainer
from coati.config import TrainSettings, load_config
from coati.devices import device_errors_explained
from coati.errors import AcceleratorFailed, OutOfMemory
from coati.experience import Experience
from coati.experience_buffer.buffer import LeasedBuffer
from coati.experience_maker import NaiveExperienceMaker
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.ledger import LedgerRules
from coati.models import Actor
from coati.peers import LocalPeers
from coati.prompts.batch import parse_prompts
from coati.trainer.checkpoints import Checkpoints
from coati.trainer.strategies import DDPStrategy
from coati.weights.served import ServedModels


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: out of memory"), OutOfMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OutOfMemory),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfMemory),
        (MemoryError("no memory"), OutOfMemory),
        (OSError(12, "Cannot allocate memory"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), AcceleratorFailed),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), AcceleratorFailed),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
        (FileNotFoundError(2, "No such file or directory"), FileNotFoundError),
        (OutOfMemory("the inner work ran out of memory. Use less."), OutOfMemory),
    ],
)
def test_torch_errors_are_converted(error, expected):
    with pytest.raises(expected) as caught, device_errors_explained("the work on 8 tokens", "Lower the setting."):
        raise error
    is_translated = caught.value is not error
    assert is_translated == (expected is not type(error))
    if is_translated:
        assert "the work on 8 tokens" in str(caught.value)
        assert str(error) in str(caught.value)
        assert ("Lower the setting." in str(caught.value)) == (expected is OutOfMemory)


class Full(nn.Module):
    """A model that runs out of memory."""

    def forward(self, *_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def to(self, *_args):
        self()

    from_pretrained = forward


class OwnMaker(NaiveExperienceMaker):
    """Overrides how experience is made."""

    def make_experience(self, input_ids, attention_mask=None, **_kwargs):
        Full()()


def make(maker):
    pipeline = ExperiencePipeline(maker, ServedModels(maker.trained_models), generate_kwargs={"max_new_tokens": 4})
    pipeline.make_batch(parse_prompts(prompts(batch_size=4)[0]))


def generate():
    maker = NaiveExperienceMaker(*maker_models())
    maker.engine.advance = Full()
    make(maker)


def submit():
    maker = NaiveExperienceMaker(*maker_models())
    maker.engine.submit, real = Full(), maker.engine.submit
    try:
        make(maker)
    finally:
        assert maker.num_generating == 0
        maker.engine.submit = real
        make(maker)  # it recovers


def score():
    actor, critic, _, initial = maker_models()
    make(NaiveExperienceMaker(actor, critic, Full(), initial))


def make_in_own_way():
    make(OwnMaker(*maker_models()))


def load():
    config = load_config(None, ["model.path=m", "prompts.path=p.jsonl", "reward.model=r"])
    build._load_pretrained(config, "model.path", "m", Full())


def place():
    DDPStrategy(device="cpu").prepare(Full())


class Publishing(Trainer):
    """Runs out of memory when it publishes weights."""

    def next_batch(self):
        return Experience.blank(0)

    def training_step(self, experience):
        return {}

    def _update_remote_makers(self, fully_update=False):
        Full()()


def publish():
    rules = LedgerRules(samples_per_version=1, total_samples=1, lead=0, max_staleness=0)
    Publishing([], buffer=LeasedBuffer(rules, 1)).fit(1, 1)


def send():
    strategy = PlainStrategy()
    strategy.get_model_state_dict_shard = Full()
    make_sender({"actor": Actor(llama())}, LocalPeers(), [], strategy=strategy).send(1)


def resume():
    learner = SimpleNamespace(strategy=SimpleNamespace(run_on_all=Full()))
    Checkpoints(Path("folder"), learner, None, train=TrainSettings()).restore(Path("folder"))


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (submit, "generating 4 responses.*rollout.prompts_per_batch"),
        (generate, "generating 4 responses.*rollout.prompts_per_batch"),
        (score, r"scoring 4 sequences of up to \d tokens.*rollout.prompts_per_batch"),
        (make_in_own_way, "making 4 samples.*rollout.prompts_per_batch"),
        (load, "loading model.path 'm'.*model.dtype"),
        (place, "placing models on cpu.*zero2"),
        (publish, "between passes.*topology.gpus_per_trainer"),
        (send, "reading the weights to send.*topology.gpus_per_trainer"),
        (resume, "loading a checkpoint.*train.cpu_offload"),
    ],
)
def test_out_of_memory_errors_name_the_work_and_the_remedy(work, what):
    with pytest.raises(OutOfMemory, match=what):
        work()

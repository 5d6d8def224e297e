"""A maker on several ranks: the leader decides, the followers do the same with their part of the models.

        leader    ── make these prompts at version v ──► followers      both: generate, score (the models are cut, so
                  ── these weights come ──►                             every forward needs all of them)
                  ◄═ pieces of weights, sums of activations ═►

Prompts, admission, rewards, delivery and weight updates are the leader's alone. What a follower needs to know comes as
one message before the work that it is about, in the order in which the leader does it. Messages go through the process
group's store, which the leader's process holds: a follower whose leader is gone gets an error, not silence.
"""

import dataclasses
import json
import threading
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from coati.errors import ConfigError, DataError, DeadlineExceeded, PeerDied
from coati.experience_maker.dropping import AllSamplesDropped
from coati.experience_maker.naive import NaiveExperienceMaker, UnfinishedExperience
from coati.models.tensor_parallel import cut_model
from coati.rollout import GenerateOptions, Rollout
from coati.weights.canary import Canary
from coati.weights.mirrored import CommitNotice, take_commit


class MakeNotice(NamedTuple):
    """The leader is about to make experience of these prompts."""

    version: int
    input_ids: Tensor
    attention_mask: Tensor | None
    options: Mapping[str, Any]


class EndNotice(NamedTuple):
    """Nothing more will come."""


class LockStep:
    """The leader's messages to its followers, through the store of the default process group."""

    def __init__(self, *, deadline_seconds: float) -> None:
        if not dist.is_initialized() or dist.get_world_size() < 2:
            raise ConfigError(
                "a tensor-parallel maker needs a process group of 2 or more ranks. Give each of its actors an env_info "
                "with its rank and the world_size."
            )
        self.rank = dist.get_rank()
        self.group: ProcessGroup = dist.group.WORLD  # type: ignore[assignment]  # None only before it is made
        self._deadline = timedelta(seconds=deadline_seconds)
        # PrefixStore is public, though mypy sees no export.
        self._store = dist.PrefixStore("coati-lock-step", _get_default_store())  # type: ignore[attr-defined]
        self._num_followers = dist.get_world_size() - 1
        self._count = 0
        self._lock = threading.Lock()

    def say(self, notice: MakeNotice | CommitNotice | EndNotice) -> None:
        """The leader's side."""
        assert self.rank == 0
        with self._lock:
            self._store.set(f"{self._count}", _written(notice))
            self._count += 1

    def hear(self) -> Any:
        """A follower's side: the next message, when it comes."""
        assert self.rank > 0
        key = f"{self._count}"
        try:
            self._store.wait([key], self._deadline)
            notice = _read(self._store.get(key))
            if self._store.add(f"{key}-heard", 1) == self._num_followers:  # the last one tidies up
                self._store.delete_key(key)
                self._store.delete_key(f"{key}-heard")
        except dist.DistNetworkError as error:
            raise PeerDied(f"the leader of this maker (rank 0) is gone: {error}".splitlines()[0]) from None
        except dist.DistStoreError as error:
            raise DeadlineExceeded(
                f"rank {self.rank} waited {self._deadline.total_seconds():g} s for its leader (rank 0) to say what is "
                f"next. torch said: {str(error).splitlines()[0]}"
            ) from None
        self._count += 1
        return notice


def _written(notice: MakeNotice | CommitNotice | EndNotice) -> str:
    """The notice as JSON. Whoever reaches the store's port could write there, so nothing is ever unpickled from it."""
    if isinstance(notice, MakeNotice):
        return json.dumps({"make": notice._asdict()}, default=_plain)
    if isinstance(notice, CommitNotice):
        return json.dumps({"commit": notice._asdict()}, default=_plain)
    return json.dumps({"end": {}})


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": value.tolist()}  # ids and masks, all of them whole numbers
    if isinstance(value, Canary):
        return dataclasses.asdict(value)
    raise ConfigError(
        f"generate options of a tensor-parallel maker must be plain numbers and texts, got a {type(value).__name__}. "
        "Leave it out, or set topology.tensor_parallel = 1."
    )


def _read(message: bytes) -> MakeNotice | CommitNotice | EndNotice:
    ((kind, fields),) = json.loads(message, object_hook=_tensors).items()
    if kind == "make":
        return MakeNotice(**fields)
    if kind == "commit":
        keys = tuple((module, name) for module, name in fields["keys"])
        sent = fields["canary"]
        canary = None if sent is None else Canary(logprobs=tuple(sent["logprobs"]), tolerance=sent["tolerance"])
        return CommitNotice(fields["version"], keys, canary)
    return EndNotice()


def _tensors(fields: dict[str, Any]) -> Any:
    return torch.tensor(fields["tensor"], dtype=torch.long) if fields.keys() == {"tensor"} else fields


class FollowingMaker(NaiveExperienceMaker):
    """Does what the leader says, and checks that it writes the same tokens."""

    # Every pass talks to the other ranks, and all of them must hear the same order.
    may_overlap_passes = False

    def __init__(self, *models: Any, lock_step: LockStep, **settings: Any) -> None:
        # The native engine joins and reads weights that are in pieces here.
        super().__init__(*models, **{**settings, "engine": "reference"})
        self.lock_step = lock_step

    def _generate(self, prompts: Any, options: GenerateOptions) -> Rollout:
        rollout = super()._generate(prompts, options)
        digest = zlib.crc32(rollout.sequences.cpu().numpy().tobytes())
        digests: list[Any] = [None] * dist.get_world_size(self.lock_step.group)
        dist.all_gather_object(digests, digest, group=self.lock_step.group)
        if len(set(digests)) > 1:
            raise DataError(
                f"the ranks of a tensor-parallel maker wrote different tokens (checksums {digests}). They must run the "
                "same versions on the same kind of device."
            )
        return rollout


class LeadingMaker(FollowingMaker):
    """Tells the followers before it works."""

    # Between two tokens the followers wait in a sum with it, and not for its next word, which may be long in coming.
    may_pause = False

    def begin_experience(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> UnfinishedExperience:
        """As `NaiveExperienceMaker` does; columns, which only the reward reads, stay here."""
        shared = {name: value for name, value in options.items() if name != "columns"}
        self.lock_step.say(MakeNotice(self.policy_version, input_ids, attention_mask, shared))
        return super().begin_experience(input_ids, attention_mask, **options)


class NoReward(nn.Module):
    """What a follower has for a reward: the leader's is the one that counts."""

    def forward(self, sequences: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Zeros, [B]."""
        return torch.zeros(sequences.shape[0], device=sequences.device)


def cut_maker(
    models: tuple[nn.Module, nn.Module | None, Any, nn.Module],
    device: torch.device,
    lock_step: LockStep,
    **settings: Any,
) -> FollowingMaker:
    """This rank's maker from whole models (actor, critic, reward, initial model): all but the reward are cut.

    The reward is the leader's, whole and on its device; it may be None elsewhere.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    actor, critic, reward, initial_model = models
    cut = []
    for model in (actor, critic, initial_model):
        if model is not None:
            cut_model(model, mesh)  # before it moves: only the pieces have to fit the device
            model.to(device)
        cut.append(model)
    if lock_step.rank > 0:
        return FollowingMaker(cut[0], cut[1], NoReward(), cut[2], lock_step=lock_step, **settings)
    if isinstance(reward, nn.Module):
        reward.to(device)
    return LeadingMaker(cut[0], cut[1], reward, cut[2], lock_step=lock_step, **settings)


def follow(maker: FollowingMaker) -> None:
    """Do what the leader does until it says that it ends, or is gone."""
    lock_step = maker.lock_step
    while True:
        notice = lock_step.hear()
        if isinstance(notice, EndNotice):
            return
        if isinstance(notice, CommitNotice):
            take_commit(notice, maker.trained_models, lock_step.group)
            maker.policy_version = notice.version
        else:
            maker.policy_version = notice.version
            try:
                maker.make_experience(notice.input_ids, notice.attention_mask, **notice.options)
            except AllSamplesDropped:
                continue  # nothing was left of the batch; the leader counts it

"""Weight updates over Ray: staged, verified, committed whole, whoever sends them and whoever dies."""

import dataclasses
import os
import select
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.exceptions import ActorUnavailableError
from ray_testing import (
    PATIENCE,
    QUICK,
    Background,
    TokenReward,
    experience,
    make_maker,
    make_ppo_trainer,
    maker_models,
    numbered,
    strategy,
    tiny_llama,
    trainer_models,
)

from coati.errors import ActorNotFound, CheckpointError, PeerDied, WeightUpdateError
from coati.models import action_logprobs
from coati.ray import weight_channel, weight_path
from coati.ray.callbacks import MakerCallback
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder
from coati.ray.options import MakerOptions, TrainerOptions
from coati.ray.weight_channel import WeightChannel
from coati.ray.weight_path import WeightPath
from coati.weights import (
    DeviceSnapshots,
    MemorySnapshots,
    ServedModels,
    ShareProbe,
    WeightStage,
    make_canary,
    new_header,
    publisher,
    weight_messages,
)

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def shared_maker(cluster, _shared_sinks):
    """A maker actor that lives for this module. Its version only counts up, so tests look at differences."""
    maker = ExperienceMakerHolder.options(name="weights-maker", num_cpus=0).remote(
        list(_shared_sinks),
        strategy,
        maker_models,
        options=MakerOptions(deadlines=QUICK, num_threads=1),
        max_new_tokens=4,
    )
    yield "weights-maker", maker
    ray.kill(maker)


def weights_of(maker):
    """Actor and critic of a maker actor, as they serve now."""
    return ray.get(
        maker.__ray_call__.remote(
            lambda self: {
                (label, name): tensor.clone()
                for label, module in self._served._modules.items()
                for name, tensor in module.state_dict().items()
            }
        )
    )


def states(seed):
    actor, critic = trainer_models(seed)
    return actor.state_dict(), critic.state_dict()


def assert_serves(maker, seed):
    actor, critic = states(seed)
    served = weights_of(maker)
    for label, state in (("actor", actor), ("critic", critic)):
        for name, tensor in state.items():
            assert torch.equal(served[label, name], tensor), (label, name)


def call(maker, **arguments):
    return ray.get(maker.update_experience_maker.remote(**arguments), timeout=PATIENCE)


def version_of(maker):
    return ray.get(maker.progress.remote()).version


# Plain calls, as the seed documents make them.


def test_start_then_dicts_then_end_commits_at_the_end(shared_maker):
    _, maker = shared_maker
    actor, critic = states(10)
    before, version = weights_of(maker), version_of(maker)
    call(maker, chunk_start=True, fully_update=True)
    half = len(actor) // 2
    call(maker, new_actor_state_dict=dict(list(actor.items())[:half]), fully_update=True)
    call(maker, new_actor_state_dict=dict(list(actor.items())[half:]), fully_update=True)
    call(maker, new_critic_state_dict=critic, fully_update=True)
    staged = weights_of(maker)
    assert all(torch.equal(staged[key], before[key]) for key in before)
    call(maker, chunk_end=True, fully_update=True)
    assert_serves(maker, 10)
    assert version_of(maker) == version + 1


@pytest.mark.parametrize("flags", [{}, {"chunk_start": True, "chunk_end": True}])
def test_a_whole_update_in_one_call(shared_maker, flags):
    _, maker = shared_maker
    actor, critic = states(11)
    call(maker, new_actor_state_dict=actor, new_critic_state_dict=critic, fully_update=True, **flags)
    assert_serves(maker, 11)


def test_a_part_that_raises_rejects_the_whole_update_and_the_next_one_works(shared_maker):
    _, maker = shared_maker
    actor, critic = states(12)
    before, version = weights_of(maker), version_of(maker)
    bad = dict(actor)
    bad["model.lm_head.weight"] = torch.zeros(3, 3)
    call(maker, chunk_start=True)
    call(maker, new_actor_state_dict=bad)
    # The critic alone would be a whole module; after a rejection it must not get in by itself.
    call(maker, new_critic_state_dict=critic)
    with pytest.raises(WeightUpdateError, match=r"shape \[3, 3\]"):
        call(maker, chunk_end=True)
    call(maker, chunk_start=True)
    with pytest.raises(TypeError):
        call(maker, new_actor_state_dict={"no.such.weight": object()})
    with pytest.raises(WeightUpdateError, match="not open here"):
        call(maker, new_critic_state_dict=critic)
    with pytest.raises(WeightUpdateError, match="not open here"):
        call(maker, chunk_end=True)
    after = weights_of(maker)
    assert version_of(maker) == version
    assert all(torch.equal(after[key], before[key]) for key in before)
    call(maker, new_actor_state_dict=actor, new_critic_state_dict=critic)
    assert_serves(maker, 12)


# The trainers' own channel.


@ray.remote(num_cpus=0)
class HalfSender:
    """A trainer that sends the start of an update and some chunks, and never the rest."""

    def send_half(self, maker_name, seed):
        torch.set_num_threads(1)
        maker = ray.get_actor(maker_name)
        header = new_header(version=10**6, source="a trainer that dies")
        actor, critic = states(seed)
        messages = list(weight_messages(header, [("actor", actor), ("critic", critic)]))
        ray.get(maker.update_experience_maker.remote(update=header, fully_update=True, chunk_start=True))
        ray.get(maker.update_experience_maker.remote(chunk=ray.put(messages[0])))


def test_a_trainer_killed_between_chunks_blocks_nobody(shared_maker, keep):
    name, maker = shared_maker
    before = weights_of(maker)
    victim = HalfSender.remote()
    ray.get(victim.send_half.remote(name, 13), timeout=PATIENCE)
    ray.kill(victim)
    after = weights_of(maker)
    assert all(torch.equal(after[key], before[key]) for key in before)
    trainer = keep_trainer(keep, [name], seed=14)
    trainer.version = version_of(maker) + 1
    trainer.sync_models_to_remote_makers()
    assert_serves(maker, 14)
    assert version_of(maker) == trainer.version


def keep_trainer(keep, names, **kwargs):
    trainer = make_ppo_trainer(names, **kwargs)
    keep(trainer._buffer)
    return trainer


def test_two_trainers_that_update_one_maker_at_once_never_mix(shared_maker, keep):
    name, maker = shared_maker
    version = version_of(maker) + 1
    trainers = {seed: keep_trainer(keep, [name], seed=seed) for seed in (15, 16)}
    for trainer in trainers.values():
        trainer.version = version
    for _ in range(3):
        # Chunks of 1 KiB: about ten calls of each trainer, side by side.
        updates = [Background(t.sync_models_to_remote_makers) for t in trainers.values()]
        for update in updates:
            update.result()
    served = weights_of(maker)
    winners = [
        seed
        for seed in trainers
        if all(
            torch.equal(served[label, name], tensor)
            for label, state in zip(("actor", "critic"), states(seed), strict=True)
            for name, tensor in state.items()
        )
    ]
    assert len(winners) == 1
    assert version_of(maker) == version


def test_small_chunks_carry_the_same_weights(shared_maker, keep):
    name, maker = shared_maker
    trainer = keep_trainer(keep, [name], seed=17)
    trainer.version = version_of(maker) + 1
    trainer.sync_models_to_remote_makers(shard_size=1 / 1024)
    assert_serves(maker, 17)


def test_a_rejected_update_names_maker_and_reason_and_leaves_the_old_version(shared_maker):
    name, maker = shared_maker
    before, version = weights_of(maker), version_of(maker)
    header = new_header(version=version + 1, source="a trainer of another model")
    wider = {"model.lm_head.weight": torch.zeros(21, 16)}
    channel = WeightChannel([name], deadlines=QUICK)
    with pytest.raises(WeightUpdateError) as caught:
        channel.send(header, weight_messages(header, [("actor", wider)]), fully_update=True)
    text = str(caught.value)
    assert f"maker {name}: " in text
    assert "[21, 16]" in text
    assert "Traceback" not in text
    after = weights_of(maker)
    assert version_of(maker) == version
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_corrupt_chunk_is_named_with_its_maker_and_reason(shared_maker):
    name, maker = shared_maker
    version = version_of(maker)
    header = new_header(version=version + 1, source="a trainer on a bad wire")
    actor, critic = states(19)
    first, second, manifest = weight_messages(header, [("actor", actor), ("critic", critic)])
    damaged = dataclasses.replace(second, checksum=second.checksum ^ 1)
    with pytest.raises(WeightUpdateError, match=rf"maker {name}: chunk 1 of .*is corrupt: checksum 0x"):
        WeightChannel([name], deadlines=QUICK).send(header, [first, damaged, manifest], fully_update=True)
    assert version_of(maker) == version


def test_a_canary_passes_for_the_trainers_own_weights_and_stops_a_maker_that_computes_otherwise(shared_maker, keep):
    name, maker = shared_maker
    trainer = keep_trainer(keep, [name], seed=21, verify_updates="canary")
    trainer.version = version_of(maker) + 1
    trainer.sync_models_to_remote_makers()
    assert_serves(maker, 21)
    assert version_of(maker) == trainer.version
    header = new_header(version=trainer.version + 1, source="a trainer that computes something else")
    actor, critic = states(22)
    wrong = make_canary(trainer._learner.actor)
    messages = weight_messages(header, [("actor", actor), ("critic", critic)], canary=wrong)
    with pytest.raises(WeightUpdateError, match=rf"maker {name} does not compute .* version {header.version} .*found"):
        WeightChannel([name], deadlines=QUICK).send(header, messages, fully_update=True)
    trainer.version += 2
    trainer.sync_models_to_remote_makers()
    assert_serves(maker, 21)


def test_a_maker_that_does_not_exist_is_named(keep):
    trainer = keep_trainer(keep, ["no-such-maker"])
    with pytest.raises(ActorNotFound, match="no maker actor named 'no-such-maker'"):
        trainer.sync_models_to_remote_makers()


@ray.remote(num_cpus=0)
class Taker:
    """Takes anything; a stand-in for a maker in tests of the channel."""

    def __init__(self):
        self._num_whole = 0

    def update_experience_maker(self, **kwargs):
        self._num_whole += "manifest" in kwargs

    def num_whole_updates(self):
        return self._num_whole


def test_a_dead_maker_is_left_out_and_the_living_ones_are_updated(keep, unique, caplog):
    names = [unique("taker-a"), unique("taker-b")]
    takers = [Taker.options(name=name).remote() for name in names]
    channel = WeightChannel(names, deadlines=QUICK)

    def send(version):
        header = new_header(version=version, source="test")
        channel.send(header, weight_messages(header, [("actor", {"w": torch.zeros(1)})]), fully_update=False)

    send(1)
    ray.kill(takers[0])
    send(2)
    send(3)
    assert [r.args[0] for r in caplog.records if "gets no more weights" in r.message] == [names[0]]
    ray.kill(takers[1])
    with pytest.raises(PeerDied, match=r"every maker .* is gone; nobody takes the weights"):
        send(4)


def test_no_chunk_is_drawn_before_every_maker_has_answered_or_failed_to(keep, unique):
    names = [unique("taker-a"), unique("taker-b")]
    takers = [Taker.options(name=name).remote() for name in names]
    keep(takers[0])
    channel = WeightChannel(names, deadlines=QUICK)
    events = []

    def shards():
        events.append("drawn")
        yield "actor", {"w": torch.zeros(1)}

    def send(version):
        header = new_header(version=version, source="test")
        lender = SimpleNamespace(
            lend_to=events.append, retire=lambda: events.append("retired"), is_one_check_enough=False
        )
        channel.send(header, weight_messages(header, shards()), fully_update=False, snapshots=lender)

    send(1)
    ray.kill(takers[1])
    send(2)
    # The dead read no more, so nothing has to be kept for them.
    assert events == [names, "drawn", names[:1], "drawn"]


@ray.remote(num_cpus=0)
class Looker:
    """The real weight side of a maker, which notes what it was told and may die when it gets its first chunk."""

    def __init__(self, *, is_fragile=False):
        self._is_fragile = is_fragile
        self.begin_anew()

    def begin_anew(self):
        models = {"actor": torch.nn.ParameterDict({f"w{i}": torch.zeros(1) for i in range(4)})}
        self._served = ServedModels(models)
        self._stage = WeightStage(models, let_go=self._served.let_go)
        self._told = []

    def update_experience_maker(self, update=None, chunks=(), manifest=None, others_check=(), checked=(), **_):
        if chunks and self._is_fragile:
            os._exit(1)
        if update is not None:
            self._stage.begin(update.update_id, version=update.version, source=update.source, lender=update.lender)
        for chunk in chunks:
            self._told.append((chunk.index, chunk.index in others_check))
            self._stage.add_chunk(chunk, may_trust=chunk.index in others_check)
        if manifest is not None:
            self._told.append(sorted(checked))
            self._served.offer(self._stage.finish(manifest, checked=checked))

    def told(self):
        return self._told, self._served.version


def damaged_in_memory(messages, snapshots, index):
    """The messages; a bit of one chunk flips after it was hashed."""
    for message in messages:
        if index is not None and getattr(message, "index", None) == index:
            region = snapshots._sets[snapshots._turn].regions[index]
            region.buffer.data[region.start] ^= 1
        yield message


def send_four_chunks(names, *, damaged=None):
    snapshots = MemorySnapshots()
    header = new_header(version=1, source="test", snapshots=snapshots)
    shards = [("actor", {f"w{i}": torch.ones(1)}) for i in range(4)]
    messages = damaged_in_memory(weight_messages(header, shards, snapshots=snapshots), snapshots, damaged)
    WeightChannel(names, deadlines=QUICK).send(header, messages, fully_update=False, snapshots=snapshots)


@pytest.fixture(scope="module")
def shared_lookers(cluster):
    names = [f"looker-{index}" for index in range(2)]
    actors = [Looker.options(name=name).remote() for name in names]
    yield names, actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def lookers(shared_lookers):
    """Names and actors of two that have seen nothing yet; tests must not kill them."""
    names, actors = shared_lookers
    ray.get([actor.begin_anew.remote() for actor in actors], timeout=PATIENCE)
    return names, actors


@pytest.mark.parametrize("bytes_per_call", [1, 8, 2**20])
def test_makers_that_look_at_the_same_memory_check_each_chunk_once(lookers, monkeypatch, bytes_per_call):
    monkeypatch.setattr(weight_channel, "LENT_BYTES_PER_CALL", bytes_per_call)
    names, actors = lookers
    send_four_chunks(names)
    whole = [0, 1, 2, 3]
    assert ray.get([actor.told.remote() for actor in actors], timeout=PATIENCE) == [
        ([(0, False), (1, True), (2, False), (3, True), whole], 1),
        ([(0, True), (1, False), (2, True), (3, False), whole], 1),
    ]


@pytest.mark.parametrize("damaged", [0, 3])
def test_a_chunk_that_one_of_them_finds_damaged_is_served_by_none(lookers, damaged):
    names, actors = lookers
    with pytest.raises(WeightUpdateError) as caught:
        send_four_chunks(names, damaged=damaged)
    assert all(f"maker {name}: chunk {damaged} of weight update" in str(caught.value) for name in names)
    assert [version for _, version in ray.get([actor.told.remote() for actor in actors], timeout=PATIENCE)] == [0, 0]


@pytest.mark.parametrize("damaged", [None, 0])
def test_what_a_maker_that_died_was_to_check_the_others_check(lookers, keep, unique, damaged):
    fragile = unique("fragile")
    keep(Looker.options(name=fragile).remote(is_fragile=True))
    names, actors = [fragile, *lookers[0]], lookers[1]
    if damaged is None:
        send_four_chunks(names)
    else:
        with pytest.raises(WeightUpdateError, match=r"chunk 0 of weight update .* is corrupt"):
            send_four_chunks(names, damaged=damaged)
    told = ray.get([actor.told.remote() for actor in actors], timeout=PATIENCE)
    assert [(calls[-1], version) for calls, version in told] == [([1, 2], int(damaged is None))] * 2


def test_a_maker_that_cannot_be_reached_misses_one_update_and_gets_the_next(keep, unique, monkeypatch):
    name = unique("taker")
    taker = keep(Taker.options(name=name).remote())
    channel = WeightChannel([name], deadlines=QUICK)
    real_get, broken = ray.get, [True]

    def breaking_get(ref, **kwargs):
        if broken and broken.pop():
            raise ActorUnavailableError("the connection broke", b"\1" * 16)
        return real_get(ref, **kwargs)

    monkeypatch.setattr(weight_channel.ray, "get", breaking_get)
    monkeypatch.setattr(weight_channel, "MAX_CHUNKS_IN_FLIGHT", 0)  # the first answer is seen before the next call
    for version in (1, 2):
        header = new_header(version=version, source="test")
        channel.send(header, weight_messages(header, [("actor", {"w": torch.zeros(1)})]), fully_update=False)
    monkeypatch.undo()
    assert ray.get(taker.num_whole_updates.remote()) == 1


def test_weights_stay_on_the_card_only_if_every_maker_can_open_it(shared_maker, keep, unique, caplog):
    maker_name, _ = shared_maker
    taker_name = unique("taker")
    keep(Taker.options(name=taker_name).remote())
    probe = ShareProbe("GPU-7", None, 0)
    assert not WeightChannel([maker_name], deadlines=QUICK).all_can_open(probe, instead="the long way")
    assert not WeightChannel([taker_name], deadlines=QUICK).all_can_open(probe, instead="the long way")
    assert not WeightChannel([], deadlines=QUICK).all_can_open(probe, instead="the long way")
    reasons = [record.getMessage() for record in caplog.records if "the long way" in record.getMessage()]
    assert reasons == [
        f"weights go the long way, because of maker {maker_name}: it computes on cpu, and the sender on GPU-7",
        f"weights go the long way, because of maker {taker_name}: it takes plain updates only",
    ]


class Willing:
    """Stands for a channel whose makers can open the trainer's memory, or cannot."""

    def __init__(self, *, can_open=True):
        self.num_asked, self._can_open = 0, can_open
        self.has_newcomers = False

    def all_can_open(self, probe, *, instead):
        self.num_asked += 1
        return self._can_open


def test_a_trainer_asks_once_and_again_when_it_is_told_to_and_while_makers_join(monkeypatch):
    monkeypatch.setattr(weight_path, "DeviceSnapshots", lambda _: DeviceSnapshots(torch.device("cpu")))
    for device, kind in (("cuda:0", DeviceSnapshots), ("cpu", MemorySnapshots)):
        channel = Willing()
        path = WeightPath(channel, torch.device(device))
        first = path.snapshots
        assert isinstance(first, kind)
        assert path.snapshots is first
        assert channel.num_asked == 1
        path.ask_again()
        assert path.snapshots is first
        assert channel.num_asked == 2
        channel.has_newcomers = True
        assert path.snapshots is first
        assert channel.num_asked == 3
    assert WeightPath(Willing(can_open=False), torch.device("cpu")).snapshots is None


def test_a_system_that_shares_no_memory_uses_the_object_store_and_says_so_once(monkeypatch, caplog):
    monkeypatch.delattr("os.memfd_create")
    channel = Willing()
    path = WeightPath(channel, torch.device("cpu"))
    assert path.snapshots is None
    assert path.snapshots is None
    assert channel.num_asked == 0
    said = [record.getMessage() for record in caplog.records if "object store" in record.getMessage()]
    assert said == ["weights go through Ray's object store: this system has no memfd_create"]


# Weights that stay in the trainer's memory.


def enter(self):
    """Inside a maker: begin a piece of work with its models."""
    self.held = self._served.use()
    self.held.__enter__()


def leave(self):
    self.held.__exit__(None, None, None)


def mapped(self):
    """Inside a maker: inodes of the buffers of trainers that it has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "memfd:coati-weights" in line}


def lent(self):
    """Inside a trainer: inodes of its buffers."""
    return {buffer.handle.inode for one in self._publisher.path.snapshots._sets for buffer in one.buffers}


def train(self):
    """Inside a trainer: other weights, and the next version."""
    with torch.no_grad():
        for parameter in self._learner.actor.parameters():
            parameter.add_(1.0)
    self.version += 1


def ask(actor, function):
    return ray.get(actor.__ray_call__.remote(function), timeout=PATIENCE)


def test_updates_while_a_maker_works_are_lent_to_it_and_the_newest_is_committed(shared_maker, keep, monkeypatch):
    name, maker = shared_maker
    monkeypatch.setattr(publisher, "encode", None)  # nothing goes through the object store
    trainer = keep_trainer(keep, [name], seed=30)
    trainer.version = version_of(maker)
    before = weights_of(maker)
    ask(maker, enter)
    try:
        for _ in range(4):  # both sets, twice
            train(trainer)
            trainer.sync_models_to_remote_makers(shard_size=1 / 1024)
        assert version_of(maker) == trainer.version - 4
        serving = weights_of(maker)
        assert all(torch.equal(serving[key], before[key]) for key in before)
    finally:
        ask(maker, leave)
    assert version_of(maker) == trainer.version
    served = weights_of(maker)
    assert all(torch.equal(served["actor", n], tensor) for n, tensor in trainer._learner.actor.state_dict().items())
    assert lent(trainer) == ask(maker, mapped)


def test_a_killed_trainers_weights_are_committed_and_its_memory_goes_with_the_next_update(shared_maker, keep, unique):
    name, maker = shared_maker
    version = version_of(maker) + 1

    def start_at(self):
        self.version = version

    doomed = DetachedPPOTrainer.options(name=unique("doomed"), num_cpus=0).remote(
        [name], strategy, lambda: trainer_models(31), options=TrainerOptions(deadlines=QUICK, num_threads=1)
    )
    process = os.pidfd_open(ask(doomed, lambda _: os.getpid()))  # readable when the process has ended
    ask(doomed, start_at)
    ask(maker, enter)
    try:
        ray.get(doomed.sync_models_to_remote_makers.remote(), timeout=PATIENCE)
        buffers = ask(doomed, lent)
        assert buffers
        assert buffers <= ask(maker, mapped)
        ray.kill(doomed)
    finally:
        ask(maker, leave)
    assert version_of(maker) == version
    assert_serves(maker, 31)
    assert select.select([process], [], [], PATIENCE)[0], "the killed trainer did not end"
    os.close(process)
    successor = keep_trainer(keep, [name], seed=32)
    successor.version = version_of(maker) + 1
    successor.sync_models_to_remote_makers()
    assert_serves(maker, 32)
    assert ask(maker, mapped) == lent(successor)


def test_one_rank_of_a_group_does_not_save_alone_while_they_train(keep, tmp_path):
    trainer = keep_trainer(keep, [])
    trainer.strategy, trainer._state = SimpleNamespace(world_size=2), "fitting"
    with pytest.raises(CheckpointError, match="save_every and save_folder, or save after fit"):
        trainer.strategy_save_actor(str(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=r"asked to load while they train together.*Load before or after fit"):
        trainer.strategy_load_actor_optimizer(str(tmp_path / "optimizer"))


def test_weights_are_drawn_even_if_no_maker_is_this_trainers_to_update():
    # In a sharded group all ranks gather together; one that did not would leave the others waiting.
    drawn = []

    def shards():
        for module in ("actor", "critic"):
            drawn.append(module)
            yield module, {"w": torch.zeros(1)}

    header = new_header(version=1, source="test")
    WeightChannel([], deadlines=QUICK).send(header, weight_messages(header, shards()), fully_update=True)
    assert drawn == ["actor", "critic"]


# The models in work.


class GatedReward(TokenReward):
    """Stops inside the first scoring until the test lets it go on."""

    def __init__(self):
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def forward(self, sequences, attention_mask=None):
        self.reached.set()
        assert self.go_on.wait(PATIENCE)
        return super().forward(sequences)


def test_an_update_during_generation_is_not_seen_by_the_batch_in_work(sinks):
    made = []

    class Recorder(MakerCallback):
        def on_make_experience_end(self, experience):
            made.append(experience)

    reward = GatedReward()
    maker = make_maker(list(sinks), reward=reward, callbacks=[Recorder()])
    loop = Background(maker.workingloop, lambda: [numbered(0, 3), numbered(3, 3)])
    assert reward.reached.wait(PATIENCE)
    actor, critic = states(20)
    maker.update_experience_maker(new_actor_state_dict=actor, new_critic_state_dict=critic, fully_update=True)
    assert maker.progress().version == 0  # the old weights serve until the batch is done
    reward.go_on.set()
    loop.result()
    # Each batch's log-probs are those of one whole version: seed 0's weights, then seed 20's.
    for batch, version, seed in zip(made, (0, 1), (0, 20), strict=True):
        assert batch.policy_versions.unique().tolist() == [version]
        expected, _ = action_logprobs(
            tiny_llama(seed),
            batch.sequences,
            batch.attention_mask,
            batch.num_actions,
            temperatures=batch.temperatures,
        )
        assert torch.allclose(expected.masked_fill(~batch.action_mask, 0.0), batch.action_log_probs, atol=1e-6)


def test_training_steps_change_weights_that_then_serve(shared_maker, keep):
    name, maker = shared_maker
    trainer = keep_trainer(keep, [name], seed=18)
    trainer.version = version_of(maker)
    batch = experience(0, 8)
    batch.temperatures = torch.ones(8)
    trainer.buffer_append(batch)
    trainer.fit(2, 1, 2)
    served = weights_of(maker)
    own = trainer._learner.actor.state_dict()
    assert all(torch.equal(served["actor", name], tensor) for name, tensor in own.items())
    assert not torch.equal(own["model.lm_head.weight"], states(18)[0]["model.lm_head.weight"])
    assert version_of(maker) == trainer.version
    metrics = [record["metrics"] for record in trainer.records_since(0).records]
    assert sum("actor_loss" in one and "critic_loss" in one for one in metrics) == 4  # 2 batches, twice

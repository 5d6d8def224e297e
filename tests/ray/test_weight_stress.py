"""Two hundred updates of two trainers, over a network that drops, repeats, reorders, cuts and flips what they send.

Two makers generate all the while, one of them taking new weights between tokens. Every experience has to prove which
published weights it comes from: its log-probs, token by token, and its values are computed again with them.
"""

import asyncio
import functools
import hashlib
import random
import statistics
from collections import Counter
from typing import Any, NamedTuple

import pytest
import ray
import torch
from ray_testing import PATIENCE, VOCAB, maker_models, strategy, trainer_models
from transformers import DynamicCache

from coati.config import Deadlines, RolloutSettings
from coati.errors import WeightUpdateError
from coati.experience_buffer.utils import make_experience_batch
from coati.experience_maker.naive import action_values
from coati.models import action_logprobs
from coati.ray.experience_maker_holder import ExperienceMakerHolder
from coati.ray.options import MakerOptions
from coati.weights import UpdateHeader, WeightChunk, WeightManifest, weight_messages
from coati.wire import WireTensor

pytestmark = pytest.mark.usefixtures("cluster")

NUM_UPDATES = 200
TENSORS_IN_A_CHUNK = 4
NUM_PROMPT_TOKENS = 3
TOLERANCE = 1e-4
DEADLINES = Deadlines(start_seconds=PATIENCE, batch_seconds=PATIENCE, update_seconds=PATIENCE, grace_seconds=PATIENCE)


# What is published.


@functools.cache
def states_of(version):
    """The weights that are published as a version; 0 are those that makers are made with."""
    if version == 0:
        return {
            label: module.state_dict() for label, module in zip(("actor", "critic"), trainer_models(0), strict=True)
        }
    generator = torch.Generator().manual_seed(version)
    return {
        label: {name: _drawn(name, tensor.shape, generator) for name, tensor in state.items()}
        for label, state in states_of(0).items()
    }


def _drawn(name, shape, generator):
    """Far from uniform, so that a single wrong tensor shows clearly in the log-probs."""
    fresh = torch.randn(shape, generator=generator)
    return 1.0 + 0.3 * fresh if "norm" in name else 0.5 * fresh


def fingerprint(states):
    """One number for all bytes of actor and critic."""
    digest = hashlib.sha256()
    for label, state in states.items():
        for name, tensor in state.items():
            digest.update(f"{label}.{name}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


class Sent(NamedTuple):
    header: UpdateHeader
    chunks: list[WeightChunk]
    manifest: WeightManifest


def published(version, source):
    header = UpdateHeader(update_id=f"update-{version}", version=version, source=source)
    shards = [
        (label, dict(list(state.items())[start : start + TENSORS_IN_A_CHUNK]))
        for label, state in states_of(version).items()
        for start in range(0, len(state), TENSORS_IN_A_CHUNK)
    ]
    *chunks, manifest = weight_messages(header, shards)
    return Sent(header, chunks, manifest)


# What the network makes of it, and what a maker has to say to that.


class Call(NamedTuple):
    arguments: dict[str, Any]
    reason: str | None = None  # a pattern of the error that it has to raise; None: it has to be taken


def start(sent):
    return Call({"update": sent.header})


def part(chunk, reason=None):
    return Call({"chunk": chunk}, reason)


def end(sent, reason=None):
    return Call({"manifest": sent.manifest}, reason)


def late(chunk):
    return part(chunk, rf"chunk {chunk.index} from .* is not open here")


def missing(sent, indices):
    return rf"is missing {len(indices)} of {len(sent.chunks)} chunks \(first: {min(indices)}\)"


def whole(sent, other, dice):
    return [start(sent), *map(part, sent.chunks), end(sent)]


def drop_a_chunk(sent, other, dice):
    lost = dice.choice(sent.chunks)
    kept = [part(chunk) for chunk in sent.chunks if chunk is not lost]
    return [start(sent), *kept, end(sent, missing(sent, [lost.index]))]


def die_half_way(sent, other, dice):
    return [start(sent), *map(part, sent.chunks[: dice.randrange(len(sent.chunks))])]


def repeat_a_chunk(sent, other, dice):
    chunks = list(sent.chunks)
    chunks.insert(dice.randrange(len(chunks) + 1), dice.choice(chunks))
    return [start(sent), *map(part, chunks), end(sent)]


def repeat_the_start(sent, other, dice):
    """What was staged before the second start is discarded with the first."""
    position = dice.randrange(1, len(sent.chunks))
    first, second = sent.chunks[:position], sent.chunks[position:]
    calls = [start(sent), *map(part, first), start(sent), *map(part, second)]
    return [*calls, end(sent, missing(sent, range(position)))]


def repeat_the_end(sent, other, dice):
    return [*whole(sent, other, dice), end(sent, r"the manifest from .* is not open here")]


def shuffle_chunks(sent, other, dice):
    return [start(sent), *map(part, dice.sample(sent.chunks, len(sent.chunks))), end(sent)]


def end_too_early(sent, other, dice):
    position = dice.randrange(len(sent.chunks))
    early, rest = sent.chunks[:position], sent.chunks[position:]
    indices = [chunk.index for chunk in rest]
    return [start(sent), *map(part, early), end(sent, missing(sent, indices)), *map(late, rest)]


def start_too_late(sent, other, dice):
    position = dice.randrange(1, len(sent.chunks))
    early, rest = sent.chunks[:position], sent.chunks[position:]
    indices = [chunk.index for chunk in early]
    return [*map(late, early), start(sent), *map(part, rest), end(sent, missing(sent, indices))]


def _damaged(sent, dice, damage):
    """The network damages one chunk: that call is told so, and the rest belongs to nothing any more."""
    victim = dice.choice(sent.chunks)
    name = dice.choice(list(victim.tensors))
    tensors = dict(victim.tensors)
    damage(tensors, name)
    bad = WeightChunk(
        header=victim.header, index=victim.index, module=victim.module, tensors=tensors, checksum=victim.checksum
    )
    before, after = sent.chunks[: victim.index], sent.chunks[victim.index + 1 :]
    reason = rf"chunk {victim.index} of weight update .* is corrupt: checksum"
    calls = [start(sent), *map(part, before), part(bad, reason), *map(late, after)]
    return [*calls, end(sent, r"the manifest from .* is not open here")]


def flip_a_bit(sent, other, dice):
    def flip(tensors, name):
        array = tensors[name].array.copy()
        raw = array.reshape(-1).view("uint8")
        raw[dice.randrange(raw.size)] ^= 1 << dice.randrange(8)
        tensors[name] = WireTensor(array, tensors[name].dtype)

    return _damaged(sent, dice, flip)


def cut_a_tensor(sent, other, dice):
    def cut(tensors, name):
        tensors[name] = WireTensor(tensors[name].array[:-1], tensors[name].dtype)

    return _damaged(sent, dice, cut)


def lose_a_tensor(sent, other, dice):
    return _damaged(sent, dice, lambda tensors, name: tensors.pop(name))


def _foreign(sent, other, index):
    """The other trainer's chunk, whole in itself, under this trainer's update."""
    return WeightChunk(
        header=sent.header,
        index=index,
        module=other.chunks[index].module,
        tensors=other.chunks[index].tensors,
        checksum=other.chunks[index].checksum,
    )


def take_a_chunk_of_another_trainer(sent, other, dice):
    chunks = list(sent.chunks)
    index = dice.randrange(len(chunks))
    chunks.insert(dice.randrange(index + 1, len(chunks) + 1), _foreign(sent, other, index))
    return [start(sent), *map(part, chunks), end(sent, rf"chunk {index} is not the one the manifest lists")]


def add_a_chunk_of_another_trainer(sent, other, dice):
    extra = other.chunks[0]
    unheard = WeightChunk(
        header=UpdateHeader(update_id="unheard of", version=sent.header.version, source=other.header.source),
        index=extra.index,
        module=extra.module,
        tensors=extra.tensors,
        checksum=extra.checksum,
    )
    calls = whole(sent, other, dice)
    calls.insert(dice.randrange(len(calls) + 1), late(unheard))
    return calls


FATES = {
    "none": [whole],
    "dropped": [drop_a_chunk, die_half_way],
    "duplicated": [repeat_a_chunk, repeat_the_start, repeat_the_end],
    "reordered": [shuffle_chunks, end_too_early, start_too_late],
    "truncated": [cut_a_tensor, lose_a_tensor],
    "bit-flipped": [flip_a_bit],
    "second trainer": [take_a_chunk_of_another_trainer, add_a_chunk_of_another_trainer],
}


def is_taken(calls):
    return any("manifest" in call.arguments and call.reason is None for call in calls)


def interleaved(first, second, dice):
    """Two trainers' calls as they reach a maker: merged at random, each in its own order."""
    turns = [0] * len(first) + [1] * len(second)
    dice.shuffle(turns)
    calls = [iter(first), iter(second)]
    return [next(calls[turn]) for turn in turns]


# Who makes experience, and who takes it.


@ray.remote(num_cpus=0)
class Recorder:
    """A trainer with nothing but the seed's `buffer_extend`, which remembers what comes from whom."""

    def __init__(self):
        self._batches = {}
        self._news = asyncio.Condition()

    async def buffer_extend(self, items):
        maker = items[0].delivery_id[0].split("#")[0]
        async with self._news:
            self._batches.setdefault(maker, []).append(items)
            self._news.notify_all()

    async def wait_for(self, maker, version):
        """Until the maker has delivered something that these weights, or newer ones, have written the end of."""

        def has_come():
            batches = self._batches.get(maker, ())
            return bool(batches) and int(batches[-1][0].policy_versions[-1]) >= version

        async with self._news:
            await asyncio.wait_for(self._news.wait_for(has_come), PATIENCE)

    async def batches(self, maker):
        return self._batches[maker]


def endless_prompts(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(2, VOCAB, (4, NUM_PROMPT_TOKENS), generator=generator)


def look(self):
    """Runs in the maker: what it serves, seen at one moment, whatever else goes on."""
    maker = self._pipeline.maker
    with self._pipeline.served.use() as version:
        return version, fingerprint({"actor": maker.actor.state_dict(), "critic": maker.critic.state_dict()})


class Proof:
    """Computes experience again with published weights."""

    def __init__(self, versions):
        self._states = {version: states_of(version) for version in versions}
        self._actor, self._critic = trainer_models(0)
        self._actor.eval(), self._critic.eval()

    def _actor_of(self, version):
        self._actor.load_state_dict(self._states[version]["actor"])
        return self._actor

    def _critic_of(self, version):
        self._critic.load_state_dict(self._states[version]["critic"])
        return self._critic

    @torch.no_grad()
    def logprob_error(self, batch, version):
        expected, _ = action_logprobs(
            self._actor_of(version), batch.sequences, batch.attention_mask, batch.num_actions, temperatures=None
        )
        return _error(expected, batch.action_log_probs, batch)

    @torch.no_grad()
    def value_error(self, batch, version):
        values = action_values(self._critic_of(version), batch.sequences, batch.attention_mask, batch.num_actions)
        return _error(values, batch.values, batch)

    @torch.no_grad()
    def replay_error(self, batch, versions):
        """Token by token over one cache, as a generation whose weights change under it computes them."""
        cache, tokens, expected = DynamicCache(), batch.sequences[:, :NUM_PROMPT_TOKENS], []
        for step, version in enumerate(versions):
            logits = self._actor_of(version).model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            tokens = batch.sequences[:, NUM_PROMPT_TOKENS + step, None]
            expected.append(logits[:, -1].log_softmax(dim=-1).gather(1, tokens))
        return _error(torch.cat(expected, dim=1), batch.action_log_probs, batch)


def _error(expected, found, batch):
    return float((expected - found).masked_fill(~batch.action_mask, 0.0).abs().max())


def grouped(items):
    """Experience of the items that the same versions wrote, in one batch for each such history."""
    groups = {}
    for item in items:
        groups.setdefault(tuple(item.policy_versions.tolist()), []).append(item)
    return {versions: make_experience_batch(members) for versions, members in groups.items()}


@pytest.fixture(scope="module")
def recorder(cluster):
    actor = Recorder.options(name="stress-recorder").remote()
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def makers(recorder):
    """Two makers at work: one takes new weights between batches, the other between tokens."""
    settings = {"stress-between-batches": False, "stress-in-flight": True}
    actors = {
        name: ExperienceMakerHolder.options(name=name, num_cpus=0).remote(
            ["stress-recorder"],
            strategy,
            maker_models,
            options=MakerOptions(
                rollout=RolloutSettings(engine="reference", max_new_tokens=6, in_flight=in_flight),
                deadlines=DEADLINES,
                num_threads=1,
                seed=seed,
            ),
        )
        for seed, (name, in_flight) in enumerate(settings.items())
    }
    yield actors
    for actor in actors.values():
        ray.kill(actor)


@pytest.mark.timeout(280)
def test_no_experience_comes_from_weights_that_were_not_published(makers, recorder):
    dice = random.Random(2024)
    kinds = list(FATES)
    loops = [
        maker.workingloop.remote(lambda seed=seed: endless_prompts(seed), num_steps=10**9)
        for seed, maker in enumerate(makers.values())
    ]
    taken = {name: {0} for name in makers}  # versions whose every part was sent and accepted
    hashes = {0: fingerprint(states_of(0))}
    rejections = {name: Counter() for name in makers}

    def all_deliver():
        """Every maker goes on, with the newest weights that it has taken."""
        waits = [recorder.wait_for.remote(name, max(versions)) for name, versions in taken.items()]
        ray.get(waits, timeout=PATIENCE)

    all_deliver()
    for version in range(1, NUM_UPDATES, 2):
        updates = [published(version, "trainer 0"), published(version + 1, "trainer 1")]
        hashes |= {update.header.version: fingerprint(states_of(update.header.version)) for update in updates}
        is_last = version + 2 > NUM_UPDATES
        answers = []
        for name, maker in makers.items():
            fates = []
            for sent, other in (updates, updates[::-1]):
                # About a third come whole; the last do, so that the end is known.
                kind = "none" if is_last or dice.random() < 0.2 else dice.choice(kinds)
                calls = dice.choice(FATES[kind])(sent, other, dice)
                fates.append([(kind, call) for call in calls])
                if is_taken(calls):
                    taken[name].add(sent.header.version)
            for kind, call in interleaved(*fates, dice):
                answers.append((name, kind, call, maker.update_experience_maker.remote(**call.arguments)))
        for name, kind, call, ref in answers:
            if call.reason is None:
                ray.get(ref, timeout=PATIENCE)
            else:
                with pytest.raises(WeightUpdateError, match=call.reason):
                    ray.get(ref, timeout=PATIENCE)
                rejections[name][kind] += 1
        for name, (served, digest) in zip(
            makers,
            ray.get([maker.__ray_call__.remote(look) for maker in makers.values()], timeout=PATIENCE),
            strict=True,
        ):
            assert served in taken[name]
            assert digest == hashes[served]
        if version % 5 == 0:
            all_deliver()
    all_deliver()
    ray.get([maker.stop.remote() for maker in makers.values()], timeout=PATIENCE)
    ray.get(loops, timeout=PATIENCE)
    for name, maker in makers.items():
        assert ray.get(maker.__ray_call__.remote(look)) == (NUM_UPDATES, hashes[NUM_UPDATES])
        assert set(rejections[name]) == set(kinds) - {"none"}  # every kind of fault had a rejection with its reason
        assert len(taken[name]) > NUM_UPDATES / 3

    proof = Proof(hashes)
    between_batches, in_flight = (ray.get(recorder.batches.remote(name), timeout=PATIENCE) for name in makers)
    check_whole_batches(proof, between_batches, taken["stress-between-batches"])
    check_in_flight(proof, in_flight, taken["stress-in-flight"])


def check_whole_batches(proof, batches, taken):
    """One version wrote and scored each sample. Other weights of the run would give clearly other numbers."""
    by_history = grouped([item for items in batches for item in items])
    assert {version for versions in by_history for version in versions} <= taken
    controls = []
    for versions, batch in by_history.items():
        assert len(set(versions)) == 1
        assert proof.logprob_error(batch, versions[0]) < TOLERANCE, versions
        assert proof.value_error(batch, versions[0]) < TOLERANCE, versions
        controls.append(proof.logprob_error(batch, min(taken - {versions[0]})))
    assert statistics.median(controls) > 1000 * TOLERANCE


def check_in_flight(proof, batches, taken):
    """Every token by the version it names; values by one that served when the last token was written, or newer."""
    by_history = grouped([item for items in batches for item in items])
    assert {version for versions in by_history for version in versions} <= taken
    for versions, batch in by_history.items():
        assert list(versions) == sorted(versions)  # weights never go back
        assert proof.replay_error(batch, versions) < TOLERANCE, versions
    assert any(len(set(versions)) > 1 for versions in by_history)
    for items in batches:
        batch = make_experience_batch(items)
        newest = int(max(item.policy_versions.max() for item in items))
        candidates = sorted(version for version in taken if version >= newest)
        assert any(proof.value_error(batch, version) < TOLERANCE for version in candidates), newest

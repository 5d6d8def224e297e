"""Updates from two trainers over a network that drops, repeats, reorders, truncates and corrupts their messages.

Meanwhile two makers generate; one of them takes new weights between tokens. The test verifies which published weights
made each experience, by recomputing its log-probs, token by token, and its values with them.
"""

import dataclasses
import functools
import hashlib
import random
import statistics
import threading
from collections import Counter
from typing import NamedTuple

import pytest
import tiny
import torch
from thread_peers import PATIENCE
from transformers import DynamicCache
from weight_testing import Maker, header_of, messages_of

from coati.batching import make_experience_batch, split_experience_batch
from coati.errors import WeightUpdateError
from coati.experience_maker import NaiveExperienceMaker
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.models import action_logprobs, action_values
from coati.prompts.batch import parse_prompts
from coati.weights.message import WeightMessage

NUM_PROMPT_TOKENS = 3
TOLERANCE = 1e-4


# Published weights.


@functools.cache
def template():
    return dict(zip(("actor", "critic"), tiny.actor_and_critic(0), strict=True))


@functools.cache
def states_of(version):
    """Return actor and critic of a published version; version 0 is what makers start with."""
    generator = torch.Generator().manual_seed(version)
    return {
        label: {
            name: _drawn(name, tensor.shape, generator) if version else tensor.clone()
            for name, tensor in model.state_dict().items()
        }
        for label, model in template().items()
    }


def published(version, source):
    states_of(0)  # cached before the template changes
    for label, state in states_of(version).items():
        template()[label].load_state_dict(state)
    return messages_of(template(), header=header_of(version, source), max_bytes=2000)


def _drawn(name, shape, generator):
    """Draw weights that make the policy far from uniform, so that one wrong tensor clearly changes the log-probs."""
    fresh = torch.randn(shape, generator=generator)
    return 1.0 + 0.3 * fresh if "norm" in name else 0.5 * fresh


def fingerprint(states):
    """Hash all bytes of actor and critic."""
    digest = hashlib.sha256()
    for label, state in states.items():
        for name, tensor in state.items():
            digest.update(f"{label}.{name}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


# Network faults, and the errors that makers must raise for them.


class Call(NamedTuple):
    message: WeightMessage
    reason: str | None = None  # pattern of the error that the call must raise; None: it must succeed


def start(sent):
    return Call(sent.start())


def part(sent, chunk, reason=None):
    return Call(sent.part(chunk), reason)


def end(sent, reason=None):
    return Call(sent.end(), reason)


def late(sent, chunk):
    return part(sent, chunk, "is not open here")


def parts(sent, chunks):
    return [part(sent, chunk) for chunk in chunks]


def lates(sent, chunks):
    return [late(sent, chunk) for chunk in chunks]


def missing(sent, indices):
    return rf"is missing {len(indices)} of {len(sent.chunks)} chunks \(first: {min(indices)}\)"


def whole(sent, other, dice):
    return [start(sent), *parts(sent, sent.chunks), end(sent)]


def drop_a_chunk(sent, other, dice):
    lost = dice.choice(sent.chunks)
    kept = [part(sent, chunk) for chunk in sent.chunks if chunk is not lost]
    return [start(sent), *kept, end(sent, missing(sent, [lost.index]))]


def die_half_way(sent, other, dice):
    return [start(sent), *parts(sent, sent.chunks[: dice.randrange(len(sent.chunks))])]


def repeat_a_chunk(sent, other, dice):
    chunks = list(sent.chunks)
    chunks.insert(dice.randrange(len(chunks) + 1), dice.choice(chunks))
    return [start(sent), *parts(sent, chunks), end(sent)]


def repeat_the_start(sent, other, dice):
    """The second start discards what was staged after the first."""
    position = dice.randrange(1, len(sent.chunks))
    first, second = sent.chunks[:position], sent.chunks[position:]
    calls = [start(sent), *parts(sent, first), start(sent), *parts(sent, second)]
    return [*calls, end(sent, missing(sent, range(position)))]


def repeat_the_end(sent, other, dice):
    return [*whole(sent, other, dice), end(sent, "is not open here")]


def shuffle_chunks(sent, other, dice):
    return [start(sent), *parts(sent, dice.sample(sent.chunks, len(sent.chunks))), end(sent)]


def end_too_early(sent, other, dice):
    position = dice.randrange(len(sent.chunks))
    early, rest = sent.chunks[:position], sent.chunks[position:]
    indices = [chunk.index for chunk in rest]
    return [start(sent), *parts(sent, early), end(sent, missing(sent, indices)), *lates(sent, rest)]


def start_too_late(sent, other, dice):
    position = dice.randrange(1, len(sent.chunks))
    early, rest = sent.chunks[:position], sent.chunks[position:]
    indices = [chunk.index for chunk in early]
    return [*lates(sent, early), start(sent), *parts(sent, rest), end(sent, missing(sent, indices))]


def _damaged(sent, dice, damage):
    """Damage one chunk: its call raises, and the rest of the update is refused as not open."""
    victim = dice.choice(sent.chunks)
    bad = part(sent, damage(victim), rf"chunk {victim.index} of weight update .* is (corrupt|unreadable)")
    before, after = sent.chunks[: victim.index], sent.chunks[victim.index + 1 :]
    return [start(sent), *parts(sent, before), bad, *lates(sent, after), end(sent, "is not open here")]


def flip_a_bit(sent, other, dice):
    def flip(chunk):
        data = chunk.data.copy()
        data[dice.randrange(data.size)] ^= 1 << dice.randrange(8)
        return dataclasses.replace(chunk, data=data)

    return _damaged(sent, dice, flip)


def cut_a_tensor(sent, other, dice):
    def cut(chunk):
        return dataclasses.replace(chunk, data=chunk.data[:-1])

    return _damaged(sent, dice, cut)


def lose_a_tensor(sent, other, dice):
    return _damaged(sent, dice, lambda chunk: dataclasses.replace(chunk, data=chunk.data[256:]))


def take_a_chunk_of_another_trainer(sent, other, dice):
    """Insert an intact chunk of the other trainer into this trainer's update."""
    chunks = list(sent.chunks)
    index = dice.randrange(len(chunks))
    chunks.insert(dice.randrange(index + 1, len(chunks) + 1), other.chunks[index])
    return [start(sent), *parts(sent, chunks), end(sent, rf"chunk {index} does not match the manifest")]


def add_a_chunk_of_another_trainer(sent, other, dice):
    unknown = other._replace(header=dataclasses.replace(other.header, update_id="unknown"))
    calls = whole(sent, other, dice)
    calls.insert(dice.randrange(len(calls) + 1), late(unknown, other.chunks[0]))
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
    return any(call.message.manifest is not None and call.reason is None for call in calls)


def interleaved(first, second, dice):
    """Merge two trainers' calls at random, keeping the order of each."""
    turns = [0] * len(first) + [1] * len(second)
    dice.shuffle(turns)
    calls = [iter(first), iter(second)]
    return [next(calls[turn]) for turn in turns]


class Proof:
    """Recomputes experience with published weights."""

    def __init__(self, versions):
        self._states = {version: states_of(version) for version in versions}
        self._actor, self._critic = tiny.actor_and_critic(0)
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
        """Recompute log-probs token by token over one KV cache, as a generation with changing weights does."""
        cache, tokens, expected = DynamicCache(), batch.sequences[:, :NUM_PROMPT_TOKENS], []
        for step, version in enumerate(versions):
            logits = self._actor_of(version).model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            tokens = batch.sequences[:, NUM_PROMPT_TOKENS + step, None]
            expected.append(logits[:, -1].log_softmax(dim=-1).gather(1, tokens))
        return _error(torch.cat(expected, dim=1), batch.action_log_probs, batch)


def _error(expected, found, batch):
    return float((expected - found).masked_fill(~batch.action_mask, 0.0).abs().max())


def grouped(items):
    """Group items by the versions that generated their tokens; return one batch per group."""
    groups = {}
    for item in items:
        groups.setdefault(tuple(item.policy_versions.tolist()), []).append(item)
    return {versions: make_experience_batch(members) for versions, members in groups.items()}


# Makers.


class BusyMaker(Maker):
    """A maker that generates in its own thread and keeps all its experience."""

    def __init__(self, seed, *, in_flight):
        actor, critic, reward, reference = tiny.maker_models(0)
        maker = NaiveExperienceMaker(actor, critic, reward, reference, seed=seed)
        super().__init__(maker.trained_models)
        self.items, self.taken, self.rejections = [], {0}, Counter()
        generate_kwargs = {"max_new_tokens": 6}
        self._pipeline = ExperiencePipeline(
            maker, self.served, generate_kwargs=generate_kwargs, commit_between_tokens=in_flight
        )
        self._generator = torch.Generator().manual_seed(seed)
        self._stop, self._made = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self):
        while not self._stop.is_set():
            prompts = torch.randint(2, tiny.VOCAB, (4, NUM_PROMPT_TOKENS), generator=self._generator)
            experience = self._pipeline.finish_batch(self._pipeline.make_batch(parse_prompts(prompts)))
            with self._made:
                self.items.append(split_experience_batch(experience))
                self._made.notify_all()

    def await_newest(self):
        """Wait until it has made an item whose last token comes from the newest weights it has accepted."""

        def has_come():
            return bool(self.items) and int(self.items[-1][0].policy_versions[-1]) >= max(self.taken)

        with self._made:
            assert self._made.wait_for(has_come, PATIENCE)

    def look(self):
        with self.served.use() as version:
            return version, fingerprint({label: model.state_dict() for label, model in self.models.items()})

    def end(self):
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def dealt(dice):
    """Yield every fate once, with its kind, in random order; then repeat."""
    fates = [(kind, fate) for kind, several in FATES.items() for fate in several]
    while True:
        yield from dice.sample(fates, len(fates))


@pytest.mark.parametrize("num_updates", [30, pytest.param(200, marks=pytest.mark.long)])
def test_no_experience_comes_from_weights_that_were_not_published(num_updates):
    dice = random.Random(2024)
    makers = [BusyMaker(0, in_flight=False), BusyMaker(1, in_flight=True)]
    decks = [dealt(dice) for _ in makers]
    hashes = {0: fingerprint(states_of(0))}
    for version in range(1, num_updates, 2):
        updates = [published(version + rank, f"trainer {rank}") for rank in range(2)]
        hashes |= {update.header.version: fingerprint(states_of(update.header.version)) for update in updates}
        is_last = version + 2 > num_updates
        for maker, deck in zip(makers, decks, strict=True):
            fates = []
            for sent, other in (updates, updates[::-1]):
                # About a third arrive intact; the last ones always do, so that the final version is known.
                kind, fate = ("none", whole) if is_last or dice.random() < 0.2 else next(deck)
                calls = fate(sent, other, dice)
                fates.append([(kind, call) for call in calls])
                if is_taken(calls):
                    maker.taken.add(sent.header.version)
            for kind, call in interleaved(*fates, dice):
                if call.reason is None:
                    maker.update_experience_maker(message=call.message)
                else:
                    with pytest.raises(WeightUpdateError, match=call.reason):
                        maker.update_experience_maker(message=call.message)
                    maker.rejections[kind] += 1
            served, digest = maker.look()
            assert served in maker.taken
            assert digest == hashes[served]
            if version % 5 == 0:
                maker.await_newest()
    for maker in makers:
        maker.await_newest()
        maker.end()
        assert maker.look() == (num_updates, hashes[num_updates])
        assert set(maker.rejections) == set(FATES) - {"none"}  # every kind of fault caused a rejection
        assert len(maker.taken) > num_updates / 3
    proof = Proof(hashes)
    check_whole_batches(proof, makers[0].items, makers[0].taken)
    check_in_flight(proof, makers[1].items, makers[1].taken)


def check_whole_batches(proof, batches, taken):
    """Check that one version generated and scored each sample; other versions would give clearly different numbers."""
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
    """Check that tokens come from their recorded versions, and values from that of the last token or a newer one."""
    by_history = grouped([item for items in batches for item in items])
    assert {version for versions in by_history for version in versions} <= taken
    for versions, batch in by_history.items():
        assert list(versions) == sorted(versions)  # versions never decrease
        assert proof.replay_error(batch, versions) < TOLERANCE, versions
    assert any(len(set(versions)) > 1 for versions in by_history)
    for items in batches:
        batch = make_experience_batch(items)
        newest = int(max(item.policy_versions.max() for item in items))
        candidates = sorted(version for version in taken if version >= newest)
        assert any(proof.value_error(batch, version) < TOLERANCE for version in candidates), newest

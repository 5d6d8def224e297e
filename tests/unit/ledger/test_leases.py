import random

import pytest
from lease_world import World

from coati.ledger.leases import Ledger


def random_world(seed: int) -> World:
    rng = random.Random(seed)
    num_makers = rng.randint(1, 5)
    max_staleness = rng.choice([0, 0, 1, 2, 3, 4, 8, None])
    world = World(
        seed=seed,
        speeds=[rng.choice([0.05, 0.3, 1, 3]) for _ in range(num_makers)],
        slots=[rng.randint(1, 12) for _ in range(num_makers)],
        versions=6,
        train_time=rng.choice([0.01, 1, 5]),
        commit_delay=rng.choice([0, 0.05, 2.0]),
        tail=rng.choice([0, 0.5, 1.5]),
        drop_rate=rng.choice([0, 0, 0.2]),
        num_streams=rng.randint(1, 4),
        group_size=rng.choice([1, 1, 4]),
        groups_per_version=rng.randint(1, 12),
        lead=rng.choice([0, 1, 2]),
        max_staleness=max_staleness,
    )
    for index in range(rng.randint(0, 3)):
        world.at(rng.uniform(0.1, 20), "stall", f"maker-{rng.randrange(num_makers)}", rng.uniform(1, 20))
        world.at(rng.uniform(0.1, 20), "join", f"late-{index}", rng.choice([0.3, 3]), rng.randint(1, 8))
        if num_makers > 1:
            world.at(rng.uniform(0.1, 20), "die", f"maker-{rng.randrange(1, num_makers)}")
    return world


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_random_runs_end_within_the_bound_and_give_every_group_one_fate(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        world = random_world(seed)
        assert world.run(), f"seed {seed} stands still: {[ledger.blocked_by() for ledger in world.ledgers]}"
        bound = world.rules[0].max_staleness
        assert bound is None or max(world.ages) <= bound, f"seed {seed}"
        assert world.most_in_flight <= world.rules[0].limit, f"seed {seed}"
        assert set(world.fates.values()) == {1}, f"seed {seed}"
        trained = sum(len(world.fates) for _ in (0,)) - sum(ledger._num_dropped for ledger in world.ledgers)
        assert trained * world.rules[0].group_size == sum(rules.total_samples for rules in world.rules), f"seed {seed}"


@pytest.mark.parametrize("seed", range(10))
def test_events_and_state_restore_the_same_ledger(seed: int) -> None:
    world = random_world(seed)
    for ledger in world.ledgers:
        ledger.events.clear()
    world.run()
    for ledger in world.ledgers:
        again = Ledger.replayed(ledger.rules, ledger.events)
        assert again.state() == ledger.state()
        restored = Ledger.restored(ledger.rules, ledger.state())
        assert restored.num_picked == ledger.num_picked
        assert all(work.state != "open" for work in restored._works.values())

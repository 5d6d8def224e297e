"""A trainer or a maker that is 50 times slower than the others, with real ledgers in simulated time."""

import pytest
from lease_world import World

from coati.ledger.audit import TrainerAccount

SAMPLES, VERSIONS = 48, 10


def run(speeds: list[float], **options: float) -> World:
    settings = {"seed": 0, "versions": VERSIONS, "groups_per_version": SAMPLES, "max_staleness": 4} | options
    world = World(speeds=speeds, slots=[16] * len(speeds), **settings)  # type: ignore[arg-type]
    assert world.run()
    assert max(world.ages) <= settings["max_staleness"]
    account = TrainerAccount(world.rules[0])
    for event in world.ledgers[0].events:
        account.apply(event)
    assert account.problems == []
    return world


@pytest.mark.parametrize("lead", [0, 1])
def test_behind_a_slow_trainer_makers_stop_at_their_lead_and_nothing_piles_up(lead: int) -> None:
    world = run([1, 1, 1], train_time=50.0, lead=lead)
    assert world.most_in_flight == (lead + 1) * SAMPLES == world.rules[0].limit  # never more, and the limit is reached
    assert len(world.ledgers[0]._records) <= (lead + 1) * SAMPLES
    assert world.now < VERSIONS * 50.0 * (1.1 if lead else 2.0)  # with a lead, makers keep the slow trainer busy


@pytest.mark.parametrize("max_staleness", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 8))])
def test_beside_a_slow_maker_the_others_keep_nine_tenths_of_their_rate(max_staleness: int) -> None:
    seconds = [
        sum(run(speeds, seed=seed, max_staleness=max_staleness).now for seed in range(4))
        for speeds in ([1, 1, 1], [1, 1, 1, 1 / 50])
    ]
    assert seconds[1] <= seconds[0] / 0.9

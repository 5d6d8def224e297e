import random

import torch

from coati.experience_buffer import BufferItem
from coati.ledger import RoundOrder, WorkShare


def item(round_index):
    one = torch.zeros(1)
    return BufferItem(torch.tensor([1, 2]), one, one, torch.tensor(0.0), one, one, None, None, round_index=round_index)


def rounds(items):
    return [item.round_index for item in items]


def test_later_rounds_wait_for_earlier_ones():
    order = RoundOrder()
    assert rounds(order.add([item(1), item(3)])) == []
    assert rounds(order.add([item(0)])) == [0, 1]
    assert len(order) == 1
    assert rounds(order.add([item(2)])) == [2, 3]


def test_items_without_a_round_pass_at_once():
    order = RoundOrder()
    assert rounds(order.add([item(1), item(None)])) == [None]


def test_a_round_that_is_taken_or_past_passes_at_once_and_is_counted():
    order = RoundOrder()
    assert rounds(order.add([item(0), item(2)])) == [0]
    assert rounds(order.add([item(2)])) == [2]  # taken: another maker of the same index
    assert rounds(order.add([item(0)])) == [0]  # past: a maker made anew
    assert order.num_out_of_turn == 2
    assert rounds(order.add([item(1)])) == [1, 2]
    assert len(order) == 0


def test_flush_hands_out_what_waits_in_order_and_goes_on_after_it():
    order = RoundOrder()
    order.add([item(5), item(2)])
    assert rounds(order.flush()) == [2, 5]
    assert rounds(order.flush()) == []
    assert rounds(order.add([item(6)])) == [6]


def test_any_interleaving_of_makers_comes_out_in_one_order():
    num_makers, total = 3, 20
    shares = [
        WorkShare(rounds_per_version=4, total_rounds=total, maker_index=index, num_makers=num_makers)
        for index in range(num_makers)
    ]
    for seed in range(20):
        dice = random.Random(seed)
        streams = [[item(share.round_of(number)) for number in range(share.total)] for share in shares]
        order, out = RoundOrder(), []
        while any(streams):
            stream = dice.choice([stream for stream in streams if stream])
            count = dice.randint(1, len(stream))
            out += order.add(stream[:count])
            del stream[:count]
        assert rounds(out) == list(range(total))


def test_age_in_training_never_exceeds_the_bound_however_uneven_the_makers():
    # Makers issue at random speeds and deliver in rounds: round r is trained at version r // 4.
    eta, per_version, total, num_makers = 1, 4, 60, 3
    for seed in range(15):
        dice = random.Random(seed)
        weights = [dice.random() ** 3 + 1e-3 for _ in range(num_makers)]
        shares = [
            WorkShare(
                rounds_per_version=per_version,
                total_rounds=total,
                max_staleness=eta,
                maker_index=index,
                num_makers=num_makers,
            )
            for index in range(num_makers)
        ]
        issued, order, trained, version, made_at = [0] * num_makers, RoundOrder(), [], 0, {}
        while len(trained) < total:
            index = dice.choices(range(num_makers), weights)[0]
            share = shares[index]
            if issued[index] < share.limit(version):
                made_at[share.round_of(issued[index])] = version
                trained += order.add([item(share.round_of(issued[index]))])
                issued[index] += 1
            version = len(trained) // per_version
        ages = [position // per_version - made_at[one.round_index] for position, one in enumerate(trained)]
        assert max(ages) <= eta
        assert min(ages) >= 0

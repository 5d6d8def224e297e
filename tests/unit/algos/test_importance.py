import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.algos.importance import effective_sample_size, importance_weights, weight_moments
from coati.errors import DataError
from coati.trainer.steps import joined_moments

NAN, INF = float("nan"), float("inf")
GARBAGE = [NAN, INF, -INF, 1e308]
LEVELS = ("token", "sequence", "geometric")
MEASURED = ("token", "sequence")  # unbiased
KINDS = ("truncate", "mask", "none")
ALL = pytest.mark.parametrize(("level", "kind"), list(itertools.product(LEVELS, KINDS)))


def effective_share(log_ratios, mask, *, level):
    return effective_sample_size(weight_moments(log_ratios, mask, level=level))


def random_batch(seed, *, batch=5, length=4, scale=0.7):
    generator = torch.Generator().manual_seed(seed)
    logprobs, behavior = torch.randn(2, batch, length, generator=generator, dtype=torch.float64) * scale
    return logprobs, behavior, torch.rand(batch, length, generator=generator) < 0.7


@pytest.mark.parametrize(
    ("level", "kind", "expected"),
    [
        # ratios 4, 0.5 and 0.1, 3, 1; padding at the end of the first row
        # cap 2
        ("token", "truncate", [[2.0, 0.5, 0.0], [0.1, 2.0, 1.0]]),
        ("token", "mask", [[0.0, 0.5, 0.0], [0.1, 0.0, 1.0]]),
        # products 4 · 0.5 = 2 and 0.1 · 3 · 1 = 0.3
        ("sequence", "truncate", [[1.9, 1.9, 0.0], [0.3, 0.3, 0.3]]),
        ("sequence", "mask", [[0.0, 0.0, 0.0], [0.3, 0.3, 0.3]]),
        ("token", "none", [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]),
        ("sequence", "none", [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]),
    ],
)
def test_weights_by_hand(level, kind, expected):
    cap = 2.0 if level == "token" else 1.9  # between the two products and away from rounding
    behavior = torch.tensor([[-1.0, -2.0, NAN], [-3.0, -0.5, -1.0]], dtype=torch.float64)
    ratios = torch.tensor([[4.0, 0.5, 1.0], [0.1, 3.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    weights = importance_weights(behavior + ratios.log(), behavior, mask, level=level, kind=kind, cap=cap)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_icepop_and_the_geometric_mask_by_hand():
    # IcePop keeps ratios of 0.5 to 5 with their weight: 4 and 0.5, not 5.1 and 0.4
    mask = torch.tensor([[True, True, True, True, False]])
    ratios = torch.tensor([[4.0, 0.5, 5.1, 0.4, 1.0]], dtype=torch.float64)
    zero = torch.zeros_like(ratios)
    weights = importance_weights(ratios.log(), zero, mask, level="token", kind="mask", floor=0.5, cap=5.0)
    torch.testing.assert_close(weights, torch.tensor([[4.0, 0.5, 0.0, 0.0, 0.0]], dtype=torch.float64))
    # Geometric means of 2 tokens: sqrt(2 · 0.5005) = 1.00050, sqrt(2 · 0.502) = 1.00200, sqrt(0.4985 · 2) = 0.99850
    ratios = torch.tensor([[2.0, 0.5005], [2.0, 0.502], [0.4985, 2.0]], dtype=torch.float64)
    mask, zero = torch.ones(3, 2, dtype=torch.bool), torch.zeros_like(ratios)
    weights = importance_weights(ratios.log(), zero, mask, level="geometric", kind="mask", floor=0.999, cap=1.001)
    kept = math.sqrt(1.001)
    torch.testing.assert_close(weights, torch.tensor([[kept] * 2, [0.0] * 2, [0.0] * 2], dtype=torch.float64))


@given(
    seed=st.integers(0, 2**31),
    cap=st.floats(1, 10),
    floor=st.floats(0, 1),
    level=st.sampled_from(LEVELS),
    kind=st.sampled_from(KINDS),
)
def test_weights_equal_their_definition(seed, cap, floor, level, kind):
    logprobs, behavior, mask = random_batch(seed, batch=2)
    weights = importance_weights(logprobs, behavior, mask, level=level, kind=kind, cap=cap, floor=floor)
    for b, row in enumerate(mask.tolist()):
        ratios = {t: math.exp(logprobs[b, t] - behavior[b, t]) for t, real in enumerate(row) if real}
        product = math.prod(ratios.values())
        of_row = {"sequence": product, "geometric": product ** (1 / max(1, len(ratios)))}
        expected = []
        for t, real in enumerate(row):
            w = of_row.get(level, ratios[t]) if real else 0.0
            cut = {"truncate": min(w, cap), "mask": w if floor <= w <= cap else 0.0, "none": 1.0}[kind]
            expected.append(cut if real else 0.0)
        assert weights[b].tolist() == pytest.approx(expected, rel=1e-12)


@ALL
def test_on_policy_weights_are_exactly_one(level, kind):
    logprobs, _, mask = random_batch(0)
    # the tightest possible bounds
    weights = importance_weights(logprobs, logprobs, mask, level=level, kind=kind, cap=1.0)
    assert torch.equal(weights, mask.double())


@pytest.mark.parametrize("level", MEASURED)
def test_weights_average_to_one_under_the_behavior_policy(level):
    # Two independent tokens from three words: Σ over all texts of behavior(text) · w(text) = 1.
    policy, behavior = torch.randn(2, 3, generator=torch.Generator().manual_seed(4)).double().log_softmax(-1)
    texts = torch.cartesian_prod(torch.arange(3), torch.arange(3))  # [9, 2]
    weights = importance_weights(
        policy[texts],
        behavior[texts],
        torch.ones(9, 2, dtype=torch.bool),
        level=level,
        kind="truncate",
        cap=INF,
    )
    probability = behavior[texts].sum(-1).exp()  # [9]
    assert (probability * weights[:, 0]).sum().item() == pytest.approx(1.0, rel=1e-12)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_that_overflows_stays_finite(level, kind, dtype):
    logprobs = torch.tensor([[0.0, 2000.0], [-2000.0, 0.0], [INF, 0.0]], dtype=dtype)
    mask = torch.ones(3, 2, dtype=torch.bool)
    weights = importance_weights(logprobs, torch.zeros_like(logprobs), mask, level=level, kind=kind, cap=INF)
    assert weights.isfinite().all()
    if kind != "none":
        assert weights[0, 1] > 1e37
        assert weights[1, 0] == 0.0


@given(seed=st.integers(0, 2**31), garbage=st.sampled_from(GARBAGE), data=st.data())
def test_padding_and_the_order_of_rows_do_not_matter(seed, garbage, data):
    logprobs, behavior, mask = random_batch(seed)
    order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
    dirty, dirty_behavior = (torch.where(mask, x, garbage)[order] for x in (logprobs, behavior))
    for level, kind in itertools.product(LEVELS, KINDS):
        clean = importance_weights(logprobs, behavior, mask, level=level, kind=kind, cap=1.5)
        result = importance_weights(dirty, dirty_behavior, mask[order], level=level, kind=kind, cap=1.5)
        assert torch.equal(result, clean[order])
    for level in MEASURED:
        clean = effective_share(logprobs - behavior, mask, level=level)
        result = effective_share(dirty - dirty_behavior, mask[order], level=level)
        torch.testing.assert_close(result, clean, rtol=0, atol=1e-12)


def test_effective_sample_size_by_hand():
    # tokens 3, 1 and 2: (3 + 1 + 2)² / (3 · (9 + 1 + 4)) = 36 / 42
    # responses 3 · 1 and 2: (3 + 2)² / (2 · (9 + 4)) = 25 / 26; the third row has no token
    log_ratios = torch.tensor([[3.0, 1.0], [2.0, NAN], [NAN, NAN]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    assert effective_share(log_ratios, mask, level="token").item() == pytest.approx(36 / 42)
    assert effective_share(log_ratios, mask, level="sequence").item() == pytest.approx(25 / 26)


@pytest.mark.parametrize("level", MEASURED)
def test_effective_sample_size_at_its_limits(level):
    mask = torch.ones(8, 3, dtype=torch.bool)
    assert effective_share(torch.zeros(8, 3), mask, level=level).item() == 1.0
    # one token e^500 times as likely: far beyond the range of float32
    lonely = torch.zeros(8, 3)
    lonely[2, 0] = 500.0
    share = effective_share(lonely, mask, level=level).item()
    assert share == pytest.approx(1 / 8 if level == "sequence" else 1 / 24, rel=1e-4)
    # scaling all weights equally changes nothing, even beyond overflow
    same = effective_share(torch.full((8, 3), 400.0), mask, level=level).item()
    assert same == pytest.approx(1.0, rel=1e-3)
    # rounding never gives more than 1
    for n, log_ratio in itertools.product(range(1, 12), (0.1, 1.7, 5.5)):
        real = torch.ones(n, 1, dtype=torch.bool)
        assert 0.999 < effective_share(torch.full((n, 1), log_ratio), real, level=level) <= 1
    # cut weights: half of them 0
    halved = torch.zeros(8, 3)
    halved[:4] = -INF
    assert effective_share(halved, mask, level=level).item() == pytest.approx(0.5, rel=1e-6)


@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 4)), scale=st.floats(0.01, 30))
def test_effective_sample_size_combines_over_micro_batches(seed, cuts, scale):
    logprobs, behavior, mask = random_batch(seed, scale=scale)
    log_ratios = logprobs - behavior
    pieces = [slice(a, b) for a, b in itertools.pairwise([0, *sorted(cuts), 5])]
    count = mask.sum()
    for level in MEASURED:
        parts = [weight_moments(log_ratios[a], mask[a], level=level) for a in pieces]
        joined = joined_moments(*(torch.stack(column).double() for column in zip(*parts, strict=True)))
        whole = effective_share(log_ratios, mask, level=level)
        torch.testing.assert_close(effective_sample_size(joined), whole, rtol=1e-9, atol=0)
        assert 0 < whole <= 1 or count == 0


@pytest.mark.parametrize("level", MEASURED)
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_no_response_tokens_give_zero(level, shape):
    garbage, mask = torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool)
    for kind in KINDS:
        weights = importance_weights(garbage, garbage, mask, level=level, kind=kind, cap=2.0)
        assert torch.equal(weights, torch.zeros(shape))
    assert effective_share(garbage, mask, level=level).item() == 0.0


def test_nothing_is_differentiated_and_half_precision_is_widened():
    logprobs, behavior, mask = random_batch(3)
    logprobs, behavior = logprobs.bfloat16().requires_grad_(), behavior.bfloat16().requires_grad_()
    for level, kind in itertools.product(LEVELS, KINDS):
        weights = importance_weights(logprobs, behavior, mask, level=level, kind=kind, cap=2.0)
        wide = importance_weights(logprobs.float(), behavior.float(), mask, level=level, kind=kind, cap=2.0)
        assert weights.dtype == torch.float32
        assert torch.equal(weights, wide)
        assert not weights.requires_grad
    log_ratios = logprobs - behavior
    assert log_ratios.requires_grad
    assert not any(x.requires_grad for x in weight_moments(log_ratios, mask, level="token"))


@pytest.mark.parametrize(("floor", "cap"), [(0.0, 0.5), (0.0, NAN), (1.5, 2.0)])
def test_bounds_that_would_cut_on_policy_data_are_rejected(floor, cap):
    one, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(AssertionError, match=f"{floor} and {cap}"):
        importance_weights(one, one, mask, level="token", kind="mask", floor=floor, cap=cap)


def test_an_unknown_kind_is_rejected():
    one, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(AssertionError, match="clamp"):
        importance_weights(one, one, mask, level="token", kind="clamp", cap=2.0)


def test_wrong_shapes_are_rejected_by_name():
    one, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(DataError, match="behavior_logprobs must have the shape"):
        importance_weights(one, torch.zeros(1), mask, level="token", kind="none", cap=2.0)

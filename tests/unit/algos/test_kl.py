import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.algos.losses import adapted_coefficient, kl_estimate

NAN, INF = float("nan"), float("inf")
KINDS = ("k1", "k2", "k3")


def everywhere(kind):
    return lambda policy, reference: kl_estimate(
        policy, reference, torch.ones_like(policy, dtype=torch.bool), kind=kind
    )


k1, k2, k3 = map(everywhere, KINDS)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # d = -1 - (-1.5) = 0.5
        ("k1", 0.5),
        ("k2", 0.125),  # 0.5² / 2
        ("k3", math.exp(-0.5) - 0.5),  # exp(-0.5) - 1 + 0.5
    ],
)
def test_by_hand_with_garbage_in_the_padding(kind, expected):
    logprobs = torch.tensor([[-1.0, NAN, 3.0]], dtype=torch.float64)
    reference = torch.tensor([[-1.5, 0.0, -INF]], dtype=torch.float64)
    result = kl_estimate(logprobs, reference, torch.tensor([[True, False, False]]), kind=kind)
    assert result.tolist() == [[pytest.approx(expected, rel=1e-12), 0.0, 0.0]]


@given(logits=st.lists(st.tuples(st.floats(-4, 4), st.floats(-4, 4)), min_size=2, max_size=6))
def test_k1_and_k3_are_exact_in_expectation(logits):
    logits = torch.tensor(logits, dtype=torch.float64)
    policy, reference = logits[:, 0].log_softmax(0), logits[:, 1].log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum().item()
    for estimator in (k1, k3):
        expectation = (policy.exp() * estimator(policy, reference)).sum().item()
        assert expectation == pytest.approx(exact, rel=1e-10, abs=1e-12)


def test_k2_is_biased():
    # policy (3/4, 1/4), reference (1/2, 1/2)
    policy, reference = torch.tensor([0.75, 0.25]).log(), torch.tensor([0.5, 0.5]).log()
    exact = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    by_hand = 0.75 * math.log(1.5) ** 2 / 2 + 0.25 * math.log(0.5) ** 2 / 2
    assert (policy.exp() * k2(policy, reference)).sum().item() == pytest.approx(by_hand, rel=1e-5)
    assert by_hand != pytest.approx(exact, rel=1e-2)


@given(
    policy=st.floats(-50, 0),
    difference=st.floats(-10, 10) | st.floats(-1e-3, 1e-3) | st.floats(-1e-7, 1e-7),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_k2_and_k3_are_never_negative(policy, difference, dtype):
    policy = torch.full((32,), policy, dtype=dtype)
    reference = policy - difference
    assert (k2(policy, reference) >= 0).all()
    assert (k3(policy, reference) >= 0).all()
    assert (k3(torch.full((32,), difference, dtype=dtype), torch.zeros(32, dtype=dtype)) >= 0).all()


@given(difference=st.floats(-0.01, 0.01))
def test_k2_and_k3_agree_to_second_order(difference):
    d = torch.tensor(difference, dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    # exp(-d) - 1 + d = d²/2 - d³/6 + ...
    assert abs((k3(d, zero) - k2(d, zero)).item()) <= abs(difference) ** 3 / 5 + 1e-18


def test_all_three_agree_to_second_order_in_expectation():
    # the differences shrink with the third power of the distance
    base = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    direction = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    for step in (1e-2, 1e-3):
        policy, reference = base.log_softmax(0), (base + step * direction).log_softmax(0)
        expectations = [(policy.exp() * k(policy, reference)).sum().item() for k in (k1, k2, k3)]
        assert max(expectations) - min(expectations) <= step**3
        assert min(expectations) > 0.1 * step**2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_padding(kind):
    torch.manual_seed(0)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    policy = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(2, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, mask, kind=kind), policy)
    for garbage in (NAN, INF, -INF, 1e308):
        dirty = torch.where(mask, policy.detach(), garbage).requires_grad_()
        result = kl_estimate(dirty, torch.where(mask, reference, garbage), mask, kind=kind)
        assert torch.equal(result, kl_estimate(policy, reference, mask, kind=kind))
        grad = torch.autograd.grad(result.sum(), dirty)[0]
        clean = torch.autograd.grad(kl_estimate(policy, reference, mask, kind=kind).sum(), policy)[0]
        assert torch.equal(grad, clean)


def test_the_adapted_coefficient_moves_the_kl_to_its_target():
    assert adapted_coefficient(1.0, kl=0.09, target=0.1) == pytest.approx(0.99)  # 0.1 · (0.9 - 1)
    assert adapted_coefficient(1.0, kl=0.0, target=0.1) == pytest.approx(0.98)  # errors are clipped to 20 %
    assert adapted_coefficient(1.0, kl=NAN, target=0.1) == 1.0
    coefficient = 0.01
    for _ in range(1000):
        coefficient = adapted_coefficient(coefficient, kl=0.05 / coefficient, target=0.1)  # KL inversely proportional
    assert coefficient == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_computed_in_float32(kind):
    policy = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    reference = torch.tensor([[-1.0078125]], dtype=torch.bfloat16)
    mask = torch.ones(1, 1, dtype=torch.bool)
    result = kl_estimate(policy, reference, mask, kind=kind)
    assert result.dtype == torch.float32
    assert torch.equal(result, kl_estimate(policy.float(), reference.float(), mask, kind=kind))

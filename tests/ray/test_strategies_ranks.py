"""Two ranks, every strategy, against plain torch on the joined batch. Needs no Ray, but some time."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

WORKER = Path(__file__).with_name("strategies_worker.py")
_spec = importlib.util.spec_from_file_location("strategies_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)

CASES = [(name, tie) for tie in (False, True) for name in worker.STRATEGIES]


@pytest.fixture(scope="module")
def out(tmp_path_factory, run_ranks):
    """The folder in which two ranks have lived through strategies_worker.main."""
    out = tmp_path_factory.mktemp("ranks")
    (out / "foreign").mkdir()
    (out / "foreign" / "notes.txt").write_text("not a model")
    run_ranks(WORKER, out)
    return out


@pytest.fixture(scope="module")
def seen(out):
    """What each of the two ranks wrote down."""
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def reference(request):
    return request.param, reference_run(request.param)


def reference_run(tie):
    """Plain torch on the joined batch, in one process."""
    rows = slice(None)
    model = worker.tiny_llama(tie=tie, seed=100)
    weights = [p for p in model.parameters() if p.ndim > 1]
    scales = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": scales, "lr": 3e-2, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    tokens = [worker.batch(step)[1][:, 1:].sum() for step in range(7)]
    run = {"norms": []}
    sum(worker.loss_of(model, step, rows, tokens[0] + tokens[1]) for step in (0, 1)).backward()
    run["accumulated"] = {name: p.grad.clone() for name, p in model.named_parameters()}
    for step in range(7):
        optimizer.zero_grad()
        worker.loss_of(model, step, rows, tokens[step]).backward()
        if step == 0:
            run["grads"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), worker.MAX_NORM)
        run["norms"].append(norm)
        optimizer.step()
        if step == worker.NUM_STEPS - 1:
            run["state"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    run["resumed"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def assert_same(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", worker.STRATEGIES)
def test_gradients_are_those_of_the_joined_batch(seen, reference, name):
    tie, expected = reference
    for rank in range(2):
        assert_same(seen[rank][f"{name}-{tie}"]["grads"], expected["grads"], 1e-12)
        assert_same(seen[rank][f"{name}-{tie}"]["accumulated"], expected["accumulated"], 1e-12)


@pytest.mark.parametrize("name", worker.STRATEGIES)
def test_five_steps_end_in_the_weights_of_one_process(seen, reference, name):
    tie, expected = reference
    assert_same(seen[0][f"{name}-{tie}"]["state"], expected["state"], 1e-6)


@pytest.mark.parametrize("name", worker.STRATEGIES)
def test_norms_are_global_and_clipping_bites(seen, reference, name):
    tie, expected = reference
    assert min(expected["norms"]) > worker.MAX_NORM  # or the test would not see a wrong scale
    for rank in range(2):
        ours = torch.stack(seen[rank][f"{name}-{tie}"]["norms"])
        torch.testing.assert_close(ours, torch.stack(expected["norms"][: worker.NUM_STEPS]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "tie"), CASES)
def test_ranks_agree_to_the_last_bit(seen, name, tie):
    left, right = (seen[rank][f"{name}-{tie}"]["state"] for rank in range(2))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_what_each_rank_holds(seen):
    def of_both(key, name):
        return [seen[rank][f"{name}-False"][key] for rank in range(2)]

    num_params = len(seen[0]["ddp-False"]["state"])
    numel = sum(tensor.numel() for tensor in seen[0]["ddp-False"]["state"].values())
    assert of_both("wrapped", "ddp") == [True, True]
    assert of_both("num_states", "ddp") == [num_params, num_params]
    assert sum(of_both("num_states", "zero1")) == num_params
    assert min(of_both("num_states", "zero1")) > 0
    for name in ("zero2", "gemini"):
        assert sum(of_both("local_numel", name)) == numel
        assert max(of_both("local_numel", name)) < 0.6 * numel
    assert not seen[0]["lone_is_wrapped"]


@pytest.mark.parametrize("name", worker.STRATEGIES)
def test_a_run_goes_on_from_another_strategys_files(seen, name):
    for rank in range(2):
        assert_same(seen[rank][f"resumed-{name}"], reference_run(True)["resumed"], 1e-6)


@pytest.mark.parametrize(("name", "tie"), CASES)
def test_one_process_loads_what_two_ranks_saved(out, seen, name, tie):
    loaded = AutoModelForCausalLM.from_pretrained(out / f"model-{name}-{tie}", dtype=torch.float64)
    for key, tensor in seen[0][f"{name}-{tie}"]["state"].items():
        assert torch.equal(loaded.state_dict()[key], tensor)


def test_every_node_gets_the_folder_unless_only_rank0(out):
    def files(folder):
        return {file.name: file.read_bytes() for file in (out / folder / "model").iterdir()}

    assert "model.safetensors" in files("node0")
    assert files("node1") == files("node0")
    assert not (out / "alone1").exists()
    assert files("shared") == files("node0")
    assert [entry.name for entry in (out / "shared").iterdir()] == ["model"]


def test_a_failed_save_is_heard_on_every_rank(seen):
    assert "not something coati saved" in seen[0]["foreign"]
    assert "another rank could not save" in seen[1]["foreign"]


def test_a_load_that_fails_on_one_rank_fails_on_all(seen):
    assert [seen[rank]["missing"][1] for rank in range(2)] == [True, True], "nothing was loaded"
    assert ["another rank could not load" in message for message in seen[0]["missing"][0]] == [True, True]
    assert ["does not exist" in message for message in seen[1]["missing"][0]] == [True, True]


def test_a_missed_barrier_names_the_missing(seen):
    assert "rank 0 of 2 waited 0.5 s at a barrier" in seen[0]["barrier"]
    assert "[1]" in seen[0]["barrier"] or "Ranks 1" in seen[0]["barrier"], seen[0]["barrier"]

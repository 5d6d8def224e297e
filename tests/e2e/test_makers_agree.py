"""On-policy on the CPU, the number of makers does not change the result; test_train.py compares two with none."""

import pytest

SETTINGS = ("train.total_steps=4", "train.batch_size=12", "rollout.prompts_per_batch=5", "algorithm.kl_estimator=k3")


@pytest.fixture
def weights(film_run, coati_here, forked_workers, tmp_path):
    """The model that a run ends in."""

    def run(name, *arguments, settings=()):
        changes = (*SETTINGS, *settings, f"run.output={tmp_path / name}")
        finished = coati_here("train", film_run, *arguments, *(part for one in changes for part in ("--set", one)))
        assert finished.returncode == 0, finished.stderr
        (file,) = (tmp_path / name / "model").glob("*model.safetensors")  # of adapters, if it has some
        return file.read_bytes()

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("rollout.engine=reference",),
        ("algorithm.name=grpo", "rollout.samples_per_prompt=4"),
        ("lora.rank=2",),
    ],
    ids=["ppo", "reference", "groups", "adapters"],
)
def test_any_number_of_makers_ends_in_the_same_bits(weights, settings):
    alone = weights("synchronous", "--sync", settings=settings)
    for makers in (1, 2, 3):
        assert alone == weights(str(makers), settings=(*settings, f"topology.makers={makers}"))

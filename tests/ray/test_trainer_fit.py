"""A trainer in an actor: its concurrency groups answer while `fit` computes."""

import ray
from ray_testing import DEADLINES, PATIENCE, Gate, RecordingTrainer, pass_gate
from tiny import experience, items


@ray.remote(concurrency_groups={"buffer_length": 1, "buffer_append": 1, "buffer_sample": 1, "compute": 1}, num_cpus=0)
class GatedTrainer(RecordingTrainer):
    def __init__(self, gate, **kwargs):
        super().__init__([], train_batch_size=2, deadlines=DEADLINES, **kwargs)
        self.in_step = lambda: pass_gate(gate, "arrive", "step")


def test_in_an_actor_every_concurrency_group_answers_while_fit_computes(keep):
    gate = keep(Gate.remote())
    trainer = keep(GatedTrainer.remote(gate, buffer_limit=1))
    ray.get(trainer.buffer_extend.remote(items(0, 2)), timeout=PATIENCE)
    fit = trainer.fit.remote(3, 1)
    pass_gate(gate, "wait", "step reached")
    ray.get(trainer.buffer_append.remote(experience(2, 2)), timeout=PATIENCE)
    full = trainer.buffer_extend.remote(items(4, 2))  # blocks: one batch is waiting, which is the limit
    assert ray.get(trainer.buffer_get_length.remote(), timeout=PATIENCE) == 1
    assert ray.get(trainer.progress.remote(), timeout=PATIENCE).state == "working"
    assert ray.wait([full, fit], timeout=0)[0] == []
    pass_gate(gate, "open", "step")
    ray.get([full, fit], timeout=PATIENCE)
    assert ray.get(trainer.state.remote())[0] == [[0, 1], [2, 3], [4, 5]]

"""Names, argument order, defaults and concurrency groups of the contract's Ray classes."""

import inspect

import pytest

from coati.ray.detached_replay_buffer import DetachedReplayBuffer
from coati.ray.detached_trainer_base import DetachedTrainer
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder

REQUIRED = inspect.Parameter.empty
MAKER = ExperienceMakerHolder.__ray_metadata__
PPO = DetachedPPOTrainer.__ray_metadata__

CONTRACT = {
    (MAKER.modified_class, "__init__"): {
        "detached_trainer_name_list": REQUIRED,
        "strategy_fn": REQUIRED,
        "model_fn": REQUIRED,
        "env_info": None,
        "sync_models_from_trainers": False,
        "buffer_cpu_offload": True,
        "kl_coef": 0.1,
        "callbacks": (),
        "eval_performance": False,
        "debug": False,
        "update_lora_weights": False,
    },
    (MAKER.modified_class, "workingloop"): {"dataloader_fn": REQUIRED, "num_epochs": 1, "num_steps": 0},
    (MAKER.modified_class, "update_experience_maker"): {
        "new_actor_state_dict": None,
        "new_actor_lora_config_dict": None,
        "new_critic_state_dict": None,
        "new_critic_lora_config_dict": None,
        "fully_update": False,
        "chunk_start": None,
        "chunk_end": None,
    },
    (DetachedReplayBuffer, "__init__"): {"sample_batch_size": REQUIRED, "limit": 0},
    (DetachedReplayBuffer, "append"): {"experience": REQUIRED},
    (DetachedReplayBuffer, "extend"): {"items": REQUIRED},
    (DetachedReplayBuffer, "clear"): {},
    (DetachedReplayBuffer, "sample"): {"worker_rank": 0, "to_device": "cpu"},
    (DetachedReplayBuffer, "get_length"): {},
    (DetachedTrainer, "__init__"): {
        "experience_maker_holder_name_list": REQUIRED,
        "train_batch_size": 8,
        "buffer_limit": 0,
        "dataloader_pin_memory": True,
        "callbacks": (),
        "debug": False,
    },
    (DetachedTrainer, "_update_remote_makers"): {"fully_update": False},
    (DetachedTrainer, "training_step"): {"experience": REQUIRED},
    (DetachedTrainer, "fit"): {"total_steps": REQUIRED, "update_steps": REQUIRED, "train_epochs": 1},
    (DetachedTrainer, "sync_models_to_remote_makers"): {},
    (DetachedTrainer, "buffer_get_length"): {},
    (DetachedTrainer, "buffer_append"): {"experience": REQUIRED},
    (DetachedTrainer, "buffer_extend"): {"items": REQUIRED},
    (DetachedTrainer, "_buffer_sample"): {},
    (PPO.modified_class, "__init__"): {
        "experience_maker_holder_name_list": REQUIRED,
        "strategy_fn": REQUIRED,
        "model_fn": REQUIRED,
        "env_info": None,
        "train_batch_size": 8,
        "buffer_limit": 0,
        "eps_clip": 0.2,
        "value_clip": 0.4,
        "dataloader_pin_memory": True,
        "callbacks": (),
        "eval_performance": False,
        "debug": False,
        "update_lora_weights": False,
    },
    (PPO.modified_class, "training_step"): {"experience": REQUIRED},
    (PPO.modified_class, "_update_remote_makers"): {"fully_update": False},
    (PPO.modified_class, "strategy_save_actor"): {"path": REQUIRED, "only_rank0": False},
    (PPO.modified_class, "strategy_save_critic"): {"path": REQUIRED, "only_rank0": False},
}
TAKES_ANY_KEYWORD = {
    (MAKER.modified_class, "__init__"),  # **generate_kwargs
    (DetachedTrainer, "_update_remote_makers"),
    (DetachedTrainer, "sync_models_to_remote_makers"),
    (PPO.modified_class, "_update_remote_makers"),
}


@pytest.mark.parametrize(
    ("owner", "method"), CONTRACT, ids=[f"{owner.__name__}.{method}" for owner, method in CONTRACT]
)
def test_positional_arguments_and_defaults_are_the_contracts(owner, method):
    parameters = list(inspect.signature(getattr(owner, method)).parameters.values())[1:]
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(CONTRACT[owner, method].items())
    further = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert all(p.default is not REQUIRED for p in further), "additional arguments must be optional"
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    assert takes_any == ((owner, method) in TAKES_ANY_KEYWORD)


def test_concurrency_groups_are_declared_with_one_thread_each():
    assert MAKER.concurrency_groups == {"experience_io": 1, "model_io": 1, "compute": 1}
    groups = ("buffer_length", "buffer_append", "buffer_sample", "model_io", "compute")
    assert PPO.concurrency_groups == dict.fromkeys(groups, 1)


def test_methods_run_in_the_groups_of_the_contract():
    # An override without the decorator would run in the default group and could block `stop` there.
    maker = MAKER.method_meta.concurrency_group_for_methods
    assert maker == {
        "workingloop": "compute",
        "update_experience_maker": "model_io",
        "report": "experience_io",
    }
    assert PPO.method_meta.concurrency_group_for_methods == {
        "fit": "compute",
        "training_step": "compute",
        "buffer_get_length": "buffer_length",
        "lease": "buffer_length",
        "next_evaluation": "buffer_length",
        "evaluated": "buffer_length",
        "buffer_append": "buffer_append",
        "buffer_extend": "buffer_append",
        "_buffer_sample": "buffer_sample",
        "sync_models_to_remote_makers": "model_io",
        "change_makers": "model_io",
        "strategy_save_actor": "model_io",
        "strategy_save_critic": "model_io",
    }


def test_a_trainer_needs_both_abstract_methods():
    assert DetachedTrainer.__abstractmethods__ == {"_update_remote_makers", "training_step"}

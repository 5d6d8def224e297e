"""How a model computes while it learns: without dropout, compiled, or with activations computed twice."""

import os
import shlex
import shutil
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from coati.errors import ConfigError
from coati.models.actor import unwrap
from coati.models.packing import base_of
from coati.models.value_head import ValueHeadModel
from coati.trainer.strategies.ddp import checkpoint_contexts
from coati.trainer.strategies.sharded import transformer_blocks


def set_learning_mode(model: nn.Module) -> None:
    """Turn dropout off; layers that compute their activations twice do so only in training mode, and stay in it."""
    model.eval()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only the inputs of each transformer block; the backward pass computes the rest again."""
    inner = unwrap(model)
    base: Any = base_of(inner.body if isinstance(inner, ValueHeadModel) else inner)
    if not getattr(base, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"activation_checkpointing needs transformers models that support it, got {type(base).__name__}. Leave it "
            "out, or lower micro_batch_tokens to save memory."
        )
    base.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": checkpoint_contexts}
    )


def compile_blocks(model: nn.Module) -> None:
    """Compile each transformer block when it is first called, for any number of tokens; hooks around it stay."""
    blocks = list(transformer_blocks(model))
    if not blocks:
        raise ConfigError(f"compile needs a model with two or more blocks, got {type(model).__name__}. Leave it out.")
    for block in blocks:
        block.compile(dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Refuse to compile without a compiler for what torch.compile writes: C++ for a CPU, for a GPU C around kernels."""
    variable, usual = ("CC", ("gcc", "clang")) if device.type == "cuda" else ("CXX", ("g++", "clang++"))
    named = shlex.split(os.environ.get(variable, ""))[:1]
    if not any(map(shutil.which, named or usual)):
        found = f"{variable} = {named[0]!r}, which is no program" if named else "none"
        raise ConfigError(
            f"train.compile needs {' or '.join(usual)}, or the compiler that {variable} names, on every machine of a "
            f"trainer or maker, got {found}. Install one, or set train.compile to false."
        )

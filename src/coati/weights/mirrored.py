"""Weights of models that are cut over several ranks: the leader verifies an update, and deals its pieces out.

Only the leader is sent updates. When it commits one it tells its followers which weights will come, and each of them
takes its piece of each; nothing is staged on the followers, and no two ranks can serve different versions.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from coati.errors import WeightUpdateError
from coati.models.tensor_parallel import local_part, parts_of
from coati.weights.canary import Canary, canary_logprobs
from coati.weights.served import ServedModels

_LEADER = 0


class CommitNotice(NamedTuple):
    """What the leader is about to deal out."""

    version: int
    keys: tuple[tuple[str, str], ...]  # module, name
    canary: Canary | None  # its forward needs all ranks, as any other does


class LeadingModels(ServedModels):
    """The leader's models: a commit reaches the followers before it is counted as one."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        *,
        group: ProcessGroup,
        announce: Callable[[CommitNotice], None],
        name: str = "this maker",
    ) -> None:
        super().__init__(modules, name=name)
        self._group = group
        self._announce = announce

    def newest_weight(self, module: str, name: str) -> Tensor:
        """A copy of one weight; of one that is cut, only this rank's piece is here, and no adapter fits that."""
        found = super().newest_weight(module, name)
        if isinstance(found, DTensor):
            raise WeightUpdateError(
                f"the {module} weight {name!r} is cut over several ranks, and adapters cannot be added to a piece. "
                "Rejected whole; send all weights (topology.update_lora_weights = false, lora.rank = 0)."
            )
        return found

    @torch.no_grad()
    def _commit_if_free(self) -> bool:
        if self._pending is not None and self._num_users == 0:
            update, targets = self._pending, _targets(self._modules)
            try:
                self._announce(CommitNotice(update.version, tuple(update.tensors), update.canary))
                for key, whole in update.tensors.items():
                    _deal(whole, targets[key], self._group)
            except BaseException as error:
                self._pending = None
                self._fault = f"{self._name}: a commit of version {update.version} failed half way: {error}"
                raise
            self._pending = update._replace(tensors={})  # all copied; what is left is to count it
        return super()._commit_if_free()


@torch.no_grad()
def take_commit(notice: CommitNotice, modules: Mapping[str, nn.Module], group: ProcessGroup) -> None:
    """A follower's side of a commit."""
    targets = _targets(modules)
    for key in notice.keys:
        local = local_part(targets[key])
        received = torch.empty_like(local, memory_format=torch.contiguous_format)
        if isinstance(targets[key], DTensor):
            dist.scatter(_as_bytes(received), None, src=_LEADER, group=group)
        else:
            dist.broadcast(_as_bytes(received), src=_LEADER, group=group)
        local.copy_(received)
    if notice.canary is not None:
        canary_logprobs(modules["actor"])  # the leader judges


def _deal(whole: Tensor, target: Tensor, group: ProcessGroup) -> None:
    whole = whole.to(target.device, target.dtype).contiguous()
    if isinstance(target, DTensor):
        parts = parts_of(whole, target)
        own = torch.empty_like(parts[_LEADER])
        dist.scatter(_as_bytes(own), [_as_bytes(part) for part in parts], src=_LEADER, group=group)
        local_part(target).copy_(own)
    else:
        dist.broadcast(_as_bytes(whole), src=_LEADER, group=group)
        target.copy_(whole)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as bytes: gloo does not know every number format, and nothing is added up here."""
    return tensor.reshape(-1).view(torch.uint8)


def _targets(modules: Mapping[str, nn.Module]) -> dict[tuple[str, str], Tensor]:
    return {(label, name): tensor for label, module in modules.items() for name, tensor in module.state_dict().items()}

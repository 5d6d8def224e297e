"""What a receiving module has, and how sent weights map onto it: names, shapes, dtypes, tied weights, adapters."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from coati.errors import WeightUpdateError
from coati.models.lora import LayerLoRA, LoRAConstructor, has_adapters
from coati.models.memory import state_tensors, tied_names

_REMEDY = "Update rejected; use the same model on both sides."


class Target:
    """A module of the receiver, under its label ("actor" or "critic")."""

    def __init__(self, label: str, module: nn.Module, newest_weight: Callable[[str, str], Tensor]) -> None:
        """`newest_weight(label, name)` gives a copy of a weight as it is after all accepted updates."""
        self._label = label
        tensors = state_tensors(module)
        self._specs = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        tied = tied_names(module)  # tied weights travel once, under any of their names
        self._first_name = {name: tied.get(name, name) for name in tensors}
        self._has_adapters = has_adapters(tensors)
        self.constructor = LoRAConstructor(_BaseWeights(tensors, lambda name: newest_weight(label, name)))

    def resolve(self, sent: Mapping[str, Tensor], lora: Mapping[str, LayerLoRA], source: str) -> dict[str, Tensor]:
        """The sent weights under this module's own names, checked.

        Adapters for a module that has none become weights of it: W₀ + scale·B·A, from the same W₀ each time.
        """
        if not self._has_adapters:
            sent = self.constructor.reconstruct(sent, lora)
        resolved: dict[str, Tensor] = {}
        for name, tensor in sent.items():
            own = self._own_name(name, source)
            self._check_spec(own, tensor, source)
            if own in resolved:
                raise WeightUpdateError(
                    f"{source} sent the {self._label} weight {own!r} twice, the second time as {name!r}. "
                    "Update rejected; send each weight once."
                )
            resolved[own] = tensor
        return resolved

    def missing(self, names: Mapping[str, Tensor]) -> list[str]:
        """Weights that were not sent, and no weight that is tied to them either."""
        sent = {self._first_name[name] for name in names}
        return [name for name, first_name in self._first_name.items() if first_name not in sent]

    def check_complete(self, names: Mapping[str, Tensor], source: str) -> None:
        """Raise WeightUpdateError if any weight is missing."""
        if missing := self.missing(names):
            raise WeightUpdateError(
                f"{source} sent only part of the {self._label}, which lacks {len(missing)} of {len(self._specs)} "
                f"weights (first: {missing[0]!r}). Update rejected; send all weights, or use update_lora_weights for "
                "adapters only."
            )

    def _own_name(self, name: str, source: str) -> str:
        for candidate in _aliases(name):
            if candidate in self._specs:
                return candidate
        raise WeightUpdateError(
            f"{source} sent {self._label} weight {name!r}, which this maker's {self._label} does not have "
            f"(it has e.g. {next(iter(self._specs), 'nothing')!r}). {_REMEDY}"
        )

    def _check_spec(self, name: str, tensor: Tensor, source: str) -> None:
        shape, dtype = self._specs[name]
        if tensor.shape != shape:
            raise WeightUpdateError(
                f"{source} sent {self._label} weight {name!r} with shape {list(tensor.shape)}, but it is "
                f"{list(shape)} here. {_REMEDY}"
            )
        # A float may be rounded to the width that the receiver computes in. Integers must be exact.
        are_floats = tensor.dtype.is_floating_point and dtype.is_floating_point
        if tensor.dtype != dtype and not are_floats:
            raise WeightUpdateError(
                f"{source} sent {self._label} weight {name!r} as {tensor.dtype}, but it is {dtype} here. {_REMEDY}"
            )


class _BaseWeights(Mapping[str, Tensor]):
    """The receiver's weights under all names that a sender may call them by, copied when asked for."""

    def __init__(self, names: Mapping[str, Tensor], newest_weight: Callable[[str], Tensor]) -> None:
        self._newest_weight = newest_weight
        self._own_name = {alias: name for name in reversed(list(names)) for alias in reversed(_aliases(name))}

    def __getitem__(self, name: str) -> Tensor:
        return self._newest_weight(self._own_name[name])

    def __contains__(self, name: object) -> bool:
        return name in self._own_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._own_name)

    def __len__(self) -> int:
        return len(self._own_name)


def _aliases(name: str) -> tuple[str, ...]:
    """Names that a weight may have on the other side, which may or may not have wrapped its model."""
    return (name, f"model.{name}", name.removeprefix("model."), name.removeprefix("module."))

"""Prompts: reading them from files and datasets, and turning them into an endless, keyed stream of batches.

Reading needs no torch, so that a dry run can look into a prompt file at once; `PromptStream`, which makes
tensors, is imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from coati.prompts.table import PromptTable, load_prompts

if TYPE_CHECKING:
    from coati.prompts.stream import PromptStream

__all__ = ["PromptStream", "PromptTable", "load_prompts"]


def __getattr__(name: str) -> Any:
    if name == "PromptStream":
        from coati.prompts.stream import PromptStream

        return PromptStream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

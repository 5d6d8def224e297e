"""Experience and the makers of it.

`NaiveExperienceMaker` brings transformers along, so it is imported on first use: a trainer that only reads
experience starts without it.
"""

from typing import TYPE_CHECKING, Any

from coati.experience import Experience
from coati.experience_maker.base import ExperienceMaker

if TYPE_CHECKING:
    from coati.experience_maker.naive import AllSamplesDropped, NaiveExperienceMaker

__all__ = ["AllSamplesDropped", "Experience", "ExperienceMaker", "NaiveExperienceMaker"]


def __getattr__(name: str) -> Any:
    if name in ("AllSamplesDropped", "NaiveExperienceMaker"):
        from coati.experience_maker import naive

        return getattr(naive, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

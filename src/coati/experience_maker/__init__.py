"""Experience and the makers of it."""

from coati.experience_maker.base import Experience, ExperienceMaker
from coati.experience_maker.naive import AllSamplesDropped, NaiveExperienceMaker

__all__ = ["AllSamplesDropped", "Experience", "ExperienceMaker", "NaiveExperienceMaker"]

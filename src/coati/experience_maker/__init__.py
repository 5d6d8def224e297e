"""Experience makers: they generate responses to prompts and score them."""

from coati.experience import Experience
from coati.experience_maker.base import AllSamplesDropped, ExperienceMaker
from coati.experience_maker.naive import NaiveExperienceMaker

__all__ = ["AllSamplesDropped", "Experience", "ExperienceMaker", "NaiveExperienceMaker"]

"""Makers of experience: prompts in, scored samples out."""

from coati.experience import Experience
from coati.experience_maker.base import AllSamplesDropped, ExperienceMaker
from coati.experience_maker.naive import NaiveExperienceMaker

__all__ = ["AllSamplesDropped", "Experience", "ExperienceMaker", "NaiveExperienceMaker"]

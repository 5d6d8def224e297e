"""The settings of a learner by name, sorted into their sections."""

from coati.config import AlgorithmSettings, TrainSettings


def sections(**settings):
    """TrainSettings and AlgorithmSettings, each with those of the settings that it knows."""
    train = {name: value for name, value in settings.items() if name in TrainSettings.model_fields}
    rest = {name: value for name, value in settings.items() if name not in train}
    return TrainSettings(**train), AlgorithmSettings(**rest)

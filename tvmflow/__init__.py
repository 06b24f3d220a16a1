"""tvmflow takes a trained model and ships it as a verified Apache TVM bundle."""

__version__ = "0.1.0"

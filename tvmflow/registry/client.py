"""The registry as the pipeline uses it: MLflow's runs, logged models, versions and aliases, by explicit ids."""

from tvmflow.registry.models import Models
from tvmflow.registry.versions import Versions


class Registry(Models, Versions):
    """An MLflow server or SQLite file.

    The base classes are in modules by subject: `connection` opens and checks the connection, `runs` has runs with
    metrics and artifacts, `models` logged models and sources, `versions` registered versions, tags, aliases and
    webhooks.

    The first call connects. Every method raises RegistryError, in one sentence, when MLflow cannot be reached or
    refuses. Threads may share a registry, because nothing depends on MLflow's active run.
    """

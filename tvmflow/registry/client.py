"""The registry as the pipeline uses it: MLflow's runs, logged models, versions and aliases, by explicit ids."""

from tvmflow.registry.models import Models
from tvmflow.registry.versions import Versions


class Registry(Models, Versions):
    """An MLflow server or SQLite file.

    Its methods stand where a reader looks for them: `connection` opens and checks, `runs` holds runs with metrics and
    artifacts, `models` logged models and sources, `versions` registered versions, tags, aliases and webhooks.

    It connects with the first call. Every method raises RegistryError, in one sentence, when MLflow cannot be reached
    or refuses. Threads may share it: nothing depends on an active run.
    """

"""Work pools: how they are created, and whether a worker takes their runs."""

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flows.runs import connect
from tvmflow.errors import SettingsError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import WorkPool

PoolType = Literal["process", "docker", "kubernetes"]
# The config map and the secret of the cluster that give a pod of a Kubernetes work pool its environment.
_KUBERNETES_ENVIRONMENT = "tvmflow"


def ensure_pool(name: str, kind: PoolType | None = None, image: str | None = None) -> bool:
    """Create a work pool of type `kind` if it is missing, by default of type process; return whether it was created.

    Runs of a process pool start in the current folder, where the settings file and the state folder are. Runs of the
    other two types start in containers of `image`; a Docker worker, or the secret and the config map `tvmflow` of the
    cluster, give them their settings. Raises SettingsError when the pool is of another type, or `image` is missing, and
    PrefectError when the server fails.
    """
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound

    with connect(f"create the work pool {name!r}") as client:
        try:
            pool = client.read_work_pool(name)
        except ObjectNotFound:
            template = _job_template(client, kind or "process", image)
            client.create_work_pool(WorkPoolCreate(name=name, type=kind or "process", base_job_template=template))
            return True
        if kind is not None and pool.type != kind:
            raise SettingsError(
                f"the work pool {name!r} is of type {pool.type}, not {kind}; name another with --pool, or delete it "
                f"with `prefect work-pool delete {name}`"
            )
        return False


def why_idle(client: "SyncPrefectClient", pool: "WorkPool") -> str | None:
    """Return why no worker takes runs of a pool, and what to do, as a clause to follow the pool's name.

    For example "which is paused; resume it with `prefect work-pool resume NAME`". Returns None if a worker takes them.
    """
    if pool.is_paused:
        return f"which is paused; resume it with `prefect work-pool resume {pool.name}`"
    if pool.is_push_pool or pool.is_managed_pool:
        return None
    workers = client.read_workers_for_work_pool(pool.name)
    if any(worker.status.value == "ONLINE" for worker in workers):
        return None
    return f"which has no running worker; start one with `prefect worker start --pool {pool.name}`"


def _job_template(client: "SyncPrefectClient", kind: PoolType, image: str | None) -> dict[str, Any]:
    if kind == "process":
        from prefect.workers.process import ProcessWorker

        template = deepcopy(ProcessWorker.get_default_base_job_template())
        template["variables"]["properties"]["working_dir"]["default"] = str(Path.cwd())
        return template
    if image is None:
        raise SettingsError(f"a work pool of type {kind} needs the image that its containers run; name it with --image")
    metadata = client.read_worker_metadata()
    template = deepcopy(metadata[f"prefect-{kind}"][kind]["default_base_job_configuration"])
    properties = template["variables"]["properties"]
    properties["image"]["default"] = image
    properties["image_pull_policy"]["default"] = "IfNotPresent"
    if kind == "docker":
        properties["auto_remove"]["default"] = True
        return template
    (container,) = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["containers"]
    source = {"name": _KUBERNETES_ENVIRONMENT, "optional": True}
    container["envFrom"] = [{"configMapRef": source}, {"secretRef": source}]
    return template

"""The InferenceService beside the whole schema of KServe: `python tests/infra/kserve.py CRD.yaml`.

CRD.yaml is config/crd/full/serving.kserve.io_inferenceservices.yaml of KServe's repository, 2 MB that no package ships.
A key that the schema does not list is refused, where a cluster would drop it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

MANIFEST = Path(__file__).parents[2] / "infra/kubernetes/serving/inferenceservice.yaml"


def make_strict(schema: Any) -> Any:
    """A copy of a schema of Kubernetes as JSON Schema, which refuses keys that it does not list."""
    if isinstance(schema, list):
        return [make_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: make_strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        copy.pop("type", None)
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    return (
        copy if is_open or not isinstance(schema.get("properties"), dict) else {**copy, "additionalProperties": False}
    )


def main() -> None:
    """Print the faults of the manifest, one a line; exit with 1 if there are any."""
    crd = yaml.load(Path(sys.argv[1]).read_text(), Loader=yaml.CSafeLoader)
    manifest = yaml.safe_load(MANIFEST.read_text())
    _, version = manifest["apiVersion"].split("/")
    (schema,) = (item["schema"]["openAPIV3Schema"] for item in crd["spec"]["versions"] if item["name"] == version)
    faults = list(Draft202012Validator(make_strict(schema)).iter_errors(manifest))
    for fault in faults:
        sys.stdout.write(f"{fault.json_path}: {json.dumps(fault.message)}\n")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
